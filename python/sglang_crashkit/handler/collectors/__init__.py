"""The collectors: each module adds one kind of evidence to an incident."""
