"""Real two-rank servers to which two things happen at once, one of them without py-spy."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from integration.faults import TP0, TP1
from integration.scenario import break_one
from lanelib.servers import Server
from sglang_crashkit.incident.exit_status import ServerExit

pytestmark = [pytest.mark.live, pytest.mark.matrix, pytest.mark.timeout(900)]

RANKS = FIRST, SECOND = TP0, TP1


def test_a_rank_dying_at_shutdown_is_told_without_py_spy(tmp_path: Path) -> None:
    missing = str(tmp_path / "py-spy")

    def fault(server: Server) -> None:
        os.kill(server.pid_of(SECOND), signal.SIGKILL)
        os.kill(server.pid, signal.SIGTERM)

    env = {"SGLANG_CRASHKIT_PYSPY": missing}
    left = break_one("0.5.23", tmp_path / "crash", fault, tp=2, env=env)
    assert (left.status, left.left) == (ServerExit.KILLED, [])
    first = left.incident["verdict"]["first_failure"]
    assert (left.incident["kind"], first["title"]) == ("killed", SECOND)
    assert left.incident["requests"]["unfinished"] == 3
    stack = left.evidence(FIRST, "stack")
    assert stack["status"] == "captured"
    assert stack["source"] in ("in-process", "faulthandler")
    assert f"{missing}: No such file or directory" in stack["reason"]
    assert "run_scheduler_process" in left.text(FIRST, "stack")


def test_two_ranks_that_die_at_once_are_one_incident(tmp_path: Path) -> None:
    def fault(server: Server) -> None:
        pids = [server.pid_of(title) for title in RANKS]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    left = break_one("0.5.23", tmp_path, fault, tp=2)
    assert (left.status, left.left) == (ServerExit.KILLED, [])
    assert left.incident["kind"] == "killed"
    assert left.incident["verdict"]["first_failure"]["title"] in RANKS
    for title in RANKS:
        assert left.report(title)["exit"]["signal"] == "SIGKILL"
    survivors = [process for process in left.incident["processes"] if process["role"] in ("detokenizer", "server")]
    assert len(survivors) == 2
    for process in survivors:
        assert [piece["status"] for piece in process["evidence"] if piece["kind"] == "stack"] == ["captured"]
    assert left.incident["requests"]["unfinished"] == 3
