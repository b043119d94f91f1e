from __future__ import annotations

import sys
from pathlib import Path

import pytest


class Programs:
    """A PATH that holds only what a test puts on it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add(self, name: str, python: str) -> Path:
        """Put a program on it, given the source of a python script."""
        path = self.folder / name
        path.write_text(f"#!{sys.executable}\n{python}\n")
        path.chmod(0o755)
        return path


@pytest.fixture
def programs(tmp_path, monkeypatch) -> Programs:
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("CC", raising=False)
    return Programs(folder)
