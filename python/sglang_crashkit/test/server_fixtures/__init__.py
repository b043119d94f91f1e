"""Mirrors ``sglang/test/server_fixtures``: the hooks that its patched fixtures call."""
