"""The table of hooks in the one file that the patches add, read from its source."""

from __future__ import annotations

import ast

#: The file that the other patched files have the kit's functions from.
HOOK_FILE = "srt/crashkit.py"


def read_hooks(text: bytes) -> dict[str, str]:
    """Return the dotted name in the kit of each function that the source of `HOOK_FILE` hands out, by name."""
    tables = [
        ast.literal_eval(ast.Dict(node.value.keys, [row.elts[0] for row in node.value.values]))
        for node in ast.parse(text).body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)
    ]
    return {name: f"sglang_crashkit.{module}.{name}" for name, module in tables[0].items()}
