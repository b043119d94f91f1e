from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

from sglang_crashkit import settings
from sglang_crashkit.kernel import procfs
from sglang_crashkit.srt.utils.common import on_kill_process_tree
from unit.srt.conftest import Listener
from unit.waiting import LONG, child


@on_kill_process_tree
def kill(parent_pid: int | None, include_parent: bool = True, *rest: Any, **more: Any) -> tuple[Any, ...]:
    """Stand for upstream's function, and tell how it was called."""
    return (parent_pid, include_parent, rest, more)


def test_everything_is_passed_through() -> None:
    assert kill(1) == (1, True, (), {})
    assert kill(parent_pid=1, include_parent=False) == (1, False, (), {})
    assert kill(None, False, 3, skip_pid=4) == (None, False, (3,), {"skip_pid": 4})
    assert kill.__doc__ == "Stand for upstream's function, and tell how it was called."


def test_what_upstream_raises_is_raised() -> None:
    @on_kill_process_tree
    def broken(parent_pid: int | None) -> None:
        raise ProcessLookupError(parent_pid)

    with pytest.raises(ProcessLookupError):
        broken(1)


def test_the_handler_is_told_first(listener: Listener) -> None:
    @on_kill_process_tree
    def kill_and_listen(parent_pid: int | None, skip_pid: int | None = None) -> Any:
        return listener.heard()

    told = kill_and_listen(None)
    assert (told["event"], told["pid"]) == ("teardown", os.getpid())
    with child("ready(); pause()") as process:
        assert kill_and_listen(process.pid)["pid"] == process.pid


def test_the_handler_of_another_server_is_told_when_that_server_is_to_end(
    short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(short_folder))
    with child("ready(); pause()") as server:
        stat = procfs.read_stat(server.pid)
        assert stat is not None
        path = settings.socket_path(server.pid, stat.start_ticks)
        path.parent.mkdir(parents=True)
        other = Listener(path, {})
        try:
            kill(server.pid)
            assert other.heard()["pid"] == server.pid
        finally:
            other.kill()
            assert other.process.stdout is not None
            other.process.stdout.close()
        # A socket that was left behind does not keep the tree from being killed.
        assert kill(server.pid)[0] == server.pid


@pytest.mark.parametrize("pid", [-1, 0, 2**40, "x", 1.5])
def test_a_pid_that_is_none_is_upstreams_to_refuse(pid: Any) -> None:
    assert kill(pid)[0] == pid


def test_a_process_that_is_gone_is_upstreams_to_find_out() -> None:
    process = subprocess.Popen(["true"])
    process.wait(LONG)
    assert kill(process.pid)[0] == process.pid
