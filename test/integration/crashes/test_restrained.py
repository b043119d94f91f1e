"""Real two-rank servers to which two things happen at once, one of them without py-spy."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from integration.scenario import Wreck, wreck
from lanelib.lanes import ensure_lane
from lanelib.servers import Server
from sglang_crashkit.incident.exit_status import ServerExit

pytestmark = [pytest.mark.live, pytest.mark.matrix, pytest.mark.timeout(900)]

RANKS = FIRST, SECOND = "sglang::scheduler_TP0", "sglang::scheduler_TP1"


def stack_of(left: Wreck, title: str) -> str:
    return (left.folder / left.evidence(title, "stack")["path"]).read_text()


def test_a_rank_dying_at_shutdown_is_told_without_py_spy(tmp_path: Path) -> None:
    missing = str(tmp_path / "py-spy")

    def fault(server: Server) -> None:
        os.kill(server.pid_of(SECOND), signal.SIGKILL)
        os.kill(server.pid, signal.SIGTERM)

    env = {"SGLANG_CRASHKIT_PYSPY": missing}
    options = ["--crash-dump-folder", str(tmp_path / "crash")]
    with Server.start(ensure_lane("0.5.23"), tp=2, extra_args=options, env=env) as server:
        server.wait_ready()
        left = wreck(server, tmp_path / "crash", fault)
    assert (left.status, left.left) == (ServerExit.KILLED, [])
    first = left.incident["verdict"]["first_failure"]
    assert (left.incident["kind"], first["title"]) == ("killed", SECOND)
    assert left.incident["requests"]["unfinished"] == 3
    stack = left.evidence(FIRST, "stack")
    assert stack["status"] == "captured"
    assert stack["source"] in ("in-process", "faulthandler")
    assert f"{missing}: No such file or directory" in stack["reason"]
    assert "run_scheduler_process" in stack_of(left, FIRST)


def test_two_ranks_that_die_at_once_are_one_incident(tmp_path: Path) -> None:
    def fault(server: Server) -> None:
        pids = [server.pid_of(title) for title in RANKS]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    with Server.start(ensure_lane("0.5.23"), tp=2, extra_args=["--crash-dump-folder", str(tmp_path)]) as server:
        server.wait_ready()
        left = wreck(server, tmp_path, fault)
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
