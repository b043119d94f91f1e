"""Processes, stacks, exits and incidents. Imports neither sglang nor torch."""
