"""Mirrors ``sglang/srt/managers``: what the patched modules there call."""
