"""Pure functions from what was seen to a verdict."""
