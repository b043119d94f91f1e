"""Paths of the lanes, and of their sources, in a checkout."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
#: Folder for everything that the scripts make, which can be deleted at any time; ignored by git.
LANES = ROOT / ".lanes"
#: Locked versions and the stub's source; tracked by git.
RECIPES = ROOT / "test" / "lanes"
PATCHES = ROOT / "patches"
KIT_VERSION_FILE = ROOT / "python" / "sglang_crashkit" / "__init__.py"
PYPROJECT = ROOT / "pyproject.toml"


def hash_files(files: Iterable[Path], *, relative_to: Path = ROOT) -> str:
    """Return one sha256 over the names and contents of `files`, in sorted order."""
    digest = hashlib.sha256()
    for path in sorted(files):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(relative_to)}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def write_whole(path: Path, text: str) -> None:
    """Write a file in one step, so that no reader ever sees a part of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f"{path.name}.new")
    fresh.write_text(text)
    fresh.replace(path)
