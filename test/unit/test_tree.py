"""How the tree is kept: short names of tests."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
MAX_WORDS = 10


def test_a_test_is_named_in_ten_words_at_most() -> None:
    names = {
        (str(path.relative_to(ROOT)), node.name)
        for path in (ROOT / "test").rglob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }
    assert names
    assert {each for each in names if len(each[1].split("_")) - 1 > MAX_WORDS} == set()
