from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from unit.support.waiting import LONG

TEST = Path(__file__).parents[2]


@pytest.fixture
def paths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a child import this folder's modules."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TEST), *sys.path]))


@pytest.fixture
def serve(paths: None) -> Any:
    words = [sys.executable, "-m", "unit.replay.breakable", "--rule"]
    return lambda rule, what="forward": shlex.join([*words, rule, "--what", what])


def commands() -> str:
    """Return the command lines of all processes."""
    listed = subprocess.run(["ps", "-wweo", "args"], capture_output=True, text=True, check=True, timeout=LONG)
    return listed.stdout
