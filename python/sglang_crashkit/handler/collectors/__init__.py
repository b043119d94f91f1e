"""Each takes one kind of evidence into an incident."""
