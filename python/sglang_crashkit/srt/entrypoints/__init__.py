"""Mirrors ``sglang/srt/entrypoints``: what the patched modules there call."""
