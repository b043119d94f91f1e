"""What the programs without a suffix import, which no collection of tests imports, is there."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FILES = [path for folder in ("benchmarks", "scripts") for path in sorted((ROOT / folder).iterdir()) if path.is_file()]
PROGRAMS = [path for path in FILES if not path.suffix and "python" in path.read_text().partition("\n")[0]]


def is_there(module: str, name: str) -> bool:
    if hasattr(importlib.import_module(module), name):
        return True
    return importlib.util.find_spec(f"{module}.{name}") is not None


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.name)
def test_what_a_program_imports_of_the_kit_is_there(program: Path) -> None:
    imports = [node for node in ast.walk(ast.parse(program.read_text())) if isinstance(node, ast.ImportFrom)]
    named = [(node.module or "", one.name) for node in imports for one in node.names]
    ours = [(module, name) for module, name in named if module.partition(".")[0] in ("sglang_crashkit", "lanelib")]
    assert [f"{module}.{name}" for module, name in ours if not is_there(module, name)] == []
