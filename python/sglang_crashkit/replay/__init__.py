"""Send the requests of an incident again, and find the smallest that bring its fault back."""
