"""Mirrors ``sglang/srt``: the code that runs in SGLang's own processes, one module for each patched one."""
