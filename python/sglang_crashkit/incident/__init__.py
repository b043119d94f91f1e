"""The folder of an incident: what is in it, what is kept, what is told."""
