"""Mirrors ``sglang/srt/disaggregation``: what the patched modules there call."""
