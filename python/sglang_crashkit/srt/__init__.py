"""Mirrors ``sglang/srt``: the code that runs in SGLang's own processes, one module for each patched one.

A hook never raises, blocks no longer than its documented limit, and does nothing where there is no crash handler.
"""
