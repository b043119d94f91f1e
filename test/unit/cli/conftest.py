from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_crashkit import settings
from unit.support.targets import SLEEPER, TITLE, settle_in_sleep
from unit.support.waiting import child

#: A stand-in for a debugger: it leaves a mark where it ran, and says which process it was asked for.
GDB = '#!/bin/sh\ntouch "$0.ran"\nwhile [ "$1" != -p ]; do shift; done\necho "asked for $2"\n'


@pytest.fixture
def rank() -> Iterator[int]:
    """The pid of a scheduler's stand-in, in its sleep."""
    with child(SLEEPER, title=TITLE) as process:
        settle_in_sleep(process.pid)
        yield process.pid


@pytest.fixture
def nothing_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where servers without a crash folder would leave incidents, which is not there; and no server runs."""
    folder = tmp_path / "fallback"
    monkeypatch.setattr(settings, "fallback_folder", lambda: folder)
    monkeypatch.setattr("sglang_crashkit.cli.commands.status.find_running_servers", list)
    return folder


@pytest.fixture
def gdb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for cuda-gdb that is first on PATH."""
    tool = tmp_path / "bin" / "cuda-gdb"
    tool.parent.mkdir()
    tool.write_text(GDB)
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    return tool
