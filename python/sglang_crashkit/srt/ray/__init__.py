"""Hooks of ``sglang/srt/ray/``: the ranks are Ray's actors, which Ray's own daemon starts."""
