"""Pure functions from evidence to statements about it."""
