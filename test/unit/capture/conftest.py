from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_crashkit.capture.pyspy import EXECUTABLE_VARIABLE
from unit.support.targets import make_tool


@pytest.fixture
def use_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Put a stand-in for py-spy in its place, given its script; see `make_tool`."""
    return lambda script: monkeypatch.setenv(EXECUTABLE_VARIABLE, make_tool(tmp_path, script))
