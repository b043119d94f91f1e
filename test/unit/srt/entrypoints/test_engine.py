from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from sglang_crashkit import settings
from sglang_crashkit.srt import crash_exit, handler_process, supervisor
from sglang_crashkit.srt.entrypoints.engine import (
    on_engine_launch,
    on_launch_phase_sigquit,
    on_wait_for_scheduler_ready,
)
from unit.srt.conftest import Listener

STACKS, CORES = "SGLANG_PYSPY_DUMP_BEFORE_CRASH", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH"


@pytest.fixture(autouse=True)
def own_environ() -> Iterator[None]:
    """What a launch sets is not there for other tests."""
    with patch.dict(os.environ):
        yield


@pytest.fixture(autouse=True)
def watches(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, bool]]:
    """How this process was asked to watch its workers, which it does not do."""
    asked: list[dict[str, bool]] = []
    monkeypatch.setattr(supervisor, "begin", lambda **how: asked.append(how))
    return asked


def test_a_handler_that_hangs_at_its_start_is_ended(
    short_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "python"
    tool.write_text("#!/bin/sh\nexec sleep 600\n")
    tool.chmod(0o755)
    monkeypatch.setattr(tempfile, "tempdir", str(short_folder))
    monkeypatch.setattr(sys, "executable", str(tool))
    monkeypatch.setattr(handler_process, "START_SECS", 0.2)
    handler_process.start(str(tmp_path / "crash"))
    assert settings.SOCKET_VARIABLE not in os.environ
    assert list((settings.fallback_folder() / "run").iterdir()) == []


def test_a_failed_launch_is_told_before_the_tree_is_killed(
    listener: Listener, caplog: pytest.LogCaptureFixture
) -> None:
    @on_launch_phase_sigquit
    def handler(signum: int, frame: Any) -> Any:
        return signum, listener.heard()["event"]

    assert handler(3, frame=None) == (3, "launch_failed")
    assert "incident /incident" in caplog.text


@pytest.mark.parametrize(("rank", "follows"), [(0, False), (None, False), (1, True)])
def test_a_node_above_the_first_follows(
    monkeypatch: pytest.MonkeyPatch, watches: list[dict[str, bool]], rank: int | None, follows: bool
) -> None:
    monkeypatch.setattr(handler_process, "start", lambda _folder: None)
    on_engine_launch(SimpleNamespace(crash_dump_folder=None, node_rank=rank))
    assert watches == [{"follows": follows}]


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("is_program", [False, True])
def test_a_program_has_the_variables_while_ranks_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_program: bool, fails: bool
) -> None:
    seen: list[bool] = []

    def is_set() -> bool:
        return "CUDA_COREDUMP_FILE" in os.environ

    @on_wait_for_scheduler_ready
    def wait(_readers: object, _processes: object) -> str:
        seen.append(is_set())
        if fails:
            raise RuntimeError("not ready")
        return "infos"

    monkeypatch.setattr(handler_process, "start", lambda _folder: None)
    crash_exit.state.is_program = is_program
    on_engine_launch(SimpleNamespace(crash_dump_folder=str(tmp_path)))
    with pytest.raises(RuntimeError) if fails else contextlib.nullcontext():
        # Stand-ins for pipes and processes, as Ray's actors are.
        wait([object()], [object()])
    assert seen == [True]
    assert is_set() is is_program
