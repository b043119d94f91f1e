"""Mirrors ``sglang/test``: code that ends a test at once when a process on which it depends has ended."""
