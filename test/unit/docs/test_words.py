"""The words that a person reads are those of the field: none of `words.txt` in what users see, few in the rest."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
WORDS = Path(__file__).with_name("words.txt")
PATTERNS = [line for line in WORDS.read_text().splitlines() if line and not line.startswith("#")]
_ANY = re.compile("|".join(PATTERNS))
#: What others wrote, and the patterns themselves.
NOT_OURS = ("test/corpus/", "LICENSE", WORDS.relative_to(ROOT).as_posix())
#: In comments, docstrings, tests and scripts.
MOST = 30


def tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    names = [name for name in listed.stdout.split("\0") if name and not name.startswith(NOT_OURS)]
    return [ROOT / name for name in names if (ROOT / name).is_file()]


def found_in(text: str) -> list[str]:
    return [match[0] for match in _ANY.finditer(text)]


def strings_of(source: str) -> Iterator[str]:
    """Yield the strings of a module that are no docstrings: its messages, help texts and phrases."""
    tree = ast.parse(source)
    bare = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in bare:
            yield node.value


def seen_by_users(path: Path) -> str:
    """Return the part of a file that a user reads; empty where that is nothing of it."""
    name = path.relative_to(ROOT).as_posix()
    if name.startswith("docs/") or name in ("README.md", "CHANGELOG.md"):
        return path.read_text()
    if name.startswith("python/"):
        return "\n".join(strings_of(path.read_text())) if path.suffix == ".py" else path.read_text()
    return ""


@pytest.fixture(scope="module")
def texts() -> dict[Path, str]:
    read = {}
    for path in tracked():
        try:
            read[path] = path.read_text()
        except UnicodeDecodeError:
            # A picture, or recorded evidence.
            continue
    return read


def test_what_users_see_has_none_of_them(texts: dict[Path, str]) -> None:
    pages = [path for path in texts if path.suffix != ".png"]
    assert len(pages) > 500
    assert {path.name: words for path in pages if (words := found_in(seen_by_users(path)))} == {}


def test_the_rest_has_few_of_them(texts: dict[Path, str]) -> None:
    counted = {path.relative_to(ROOT).as_posix(): len(found_in(text)) for path, text in texts.items()}
    assert sum(counted.values()) <= MOST, {name: number for name, number in counted.items() if number}
