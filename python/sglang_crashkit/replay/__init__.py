"""Send the requests of an incident again, and find the fewest that reproduce its fault."""
