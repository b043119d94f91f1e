"""Mirrors ``sglang/test/server_fixtures``: what the patched fixtures there call."""
