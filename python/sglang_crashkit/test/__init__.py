"""Mirrors ``sglang/test``: what ends a test at once when a process that it depends on has ended."""
