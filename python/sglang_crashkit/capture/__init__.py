"""Stacks and other evidence, taken from running processes."""
