"""How the tree is kept: short names of tests, flat folders."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
MAX_WORDS = 10
MAX_FILES = 16


def test_a_test_is_named_in_ten_words_at_most() -> None:
    names = {
        (str(path.relative_to(ROOT)), node.name)
        for path in (ROOT / "test").rglob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }
    assert names
    assert {each for each in names if len(each[1].split("_")) - 1 > MAX_WORDS} == set()


def test_no_folder_of_the_package_has_too_many_files() -> None:
    folders = Counter(path.parent for path in (ROOT / "python" / "sglang_crashkit").rglob("*.py"))
    assert folders
    assert {str(folder.relative_to(ROOT)) for folder, count in folders.items() if count > MAX_FILES} == set()
