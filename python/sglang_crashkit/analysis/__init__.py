"""Pure functions that analyse the evidence of an incident."""
