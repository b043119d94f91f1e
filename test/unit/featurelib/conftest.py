from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from featurelib.kitsource import KitSource

MakeKit = Callable[..., KitSource]


@pytest.fixture
def make_kit(tmp_path: Path) -> MakeKit:
    """Make a kit out of files below its package."""

    def make(files: Mapping[str, str], pyproject: str = "") -> KitSource:
        root = tmp_path / "sglang_crashkit"
        for name, text in {"__init__.py": "", **files}.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            (path.parent / "__init__.py").touch()
            path.write_text(textwrap.dedent(text))
        return KitSource(root, pyproject)

    return make
