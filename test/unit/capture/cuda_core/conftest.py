from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

Write = Callable[[bytes], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a core, and return its path."""

    def write_core(data: bytes) -> Path:
        path = tmp_path / "core.cuda"
        path.write_bytes(data)
        return path

    return write_core
