from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

TEST = Path(__file__).parents[2]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Any:
    paths = [str(TEST), *sys.path]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))

    def command(rule: str, what: str = "forward") -> str:
        return shlex.join([sys.executable, "-m", "unit.replay.breakable", "--rule", rule, "--what", what])

    return command
