"""Mirrors ``sglang/srt/utils``: what the patched modules there call."""
