from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_crashkit.capture.pyspy import EXECUTABLE_VARIABLE
from unit.support.targets import make_tool


@pytest.fixture
def use_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Put a stand-in for py-spy in its place, given its script; see `make_tool`."""
    return lambda script: monkeypatch.setenv(EXECUTABLE_VARIABLE, make_tool(tmp_path, script))


@pytest.fixture
def cuda_gdb(monkeypatch: pytest.MonkeyPatch) -> str:
    """NVIDIA's own cuda-gdb, which is first on PATH, or a skipped test."""
    tool = Path(__file__).parents[3] / ".lanes" / "cuda-gdb" / "cuda-gdb"
    if not tool.is_file():
        pytest.skip("no cuda-gdb; scripts/cuda_gdb installs it")
    monkeypatch.setenv("PATH", str(tool.parent), prepend=os.pathsep)
    return str(tool)
