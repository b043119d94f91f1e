"""Mirrors ``sglang/srt/disaggregation/common``: what the patched modules there call."""
