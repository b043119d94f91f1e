from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from sglang_crashkit.kernel.pidfd import ExitStatus
from sglang_crashkit.srt.children import Child, Supervisor
from unit.support.locked_memory import locked_process
from unit.support.waiting import LONG, child


def test_a_title_that_comes_too_late_is_given_up(tmp_path: Path) -> None:
    with locked_process(tmp_path, title="sglang::scheduler_TP0") as target:
        found = Child("Rank 0 scheduler", target.pid)
        found.look_up_title()
        assert (found.has_title, found.label()) == (True, f"Rank 0 scheduler (pid {target.pid})")


@pytest.mark.parametrize(("title", "known"), [("sglang::scheduler_TP0", True), ("python", False), (None, False)])
def test_a_title_is_taken_of_sglangs_living_processes(title: str | None, known: bool) -> None:
    with child("ready(); pause()", title=title or "sglang::scheduler_TP0") as process:
        if title is None:
            process.kill()
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        found = Child("Rank 0 scheduler", process.pid)
        found.look_up_title()
        words = f"{title}, " if known else ""
        assert (found.has_title, found.label()) == (known, f"Rank 0 scheduler ({words}pid {process.pid})")


@pytest.mark.parametrize("with_pidfd", [True, False])
@pytest.mark.parametrize(
    ("code", "status"), [("os._exit(3)", ExitStatus(code=3)), (None, ExitStatus(signal="SIGKILL"))]
)
def test_how_a_zombie_ended_is_known(
    monkeypatch: pytest.MonkeyPatch, with_pidfd: bool, code: str | None, status: ExitStatus
) -> None:
    with child(f"ready(); sys.stdin.read(1); {code or 'pause()'}") as process:
        if not with_pidfd:
            monkeypatch.setattr(os, "pidfd_open", lambda *_: os.open("/nonexistent", os.O_RDONLY))
        found = Child("", process.pid)
        watched = Supervisor([found])
        assert bool(found.descriptors()) is with_pidfd
        process.stdin.close()
        if code is None:
            process.kill()
        watched.wait_for_all(LONG)
        watched.learn_exits([found], LONG)
        watched.close()
        assert found.exit == status
        assert process.wait(LONG) in (3, -signal.SIGKILL)
        assert Child("", process.pid).hold() is False
