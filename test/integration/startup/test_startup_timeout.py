"""Ranks that never get ready: the server gives up at its limit, and an incident says where they were."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from integration.faults import TP0, TP1
from integration.scenario import PATIENCE, start
from sglang_crashkit.incident.exit_status import ServerExit
from sglang_crashkit.incident.store import find_incidents

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]

RANKS = (TP0, TP1)
#: Seconds from the launch of the ranks. The second one is for a machine that is too busy for them to be where they stay
#: `SETTLED_S` before the first.
LIMITS_S = (60.0, 150.0)
SETTLED_S = 10.0
#: In the log right before the ranks are launched; to import all that comes before takes a busy machine a minute.
LAUNCHING = "crash kit: incidents of this server go to"
#: Upstream's own test hook: every scheduler sleeps while it initialises, once it has loaded its weights.
ENV = PATIENCE | {"SGLANG_TEST_STUCK_SCHEDULER_INIT": "3600"}
LOADED = "Load weight end"


def end_at(limit_s: float, folder: Path, *, patiently: bool) -> tuple[int, float, str] | None:
    """Start a server that gives up at the limit, and whose ranks never get ready.

    Returns:
        Its exit status, how long it took in seconds, and what it printed; None where the ranks are late, unless
        `patiently`.
    """
    began = launched = time.monotonic()
    env = ENV | {"SGLANG_CRASHKIT_STARTUP_TIMEOUT_SECS": str(limit_s)}
    with start("0.5.23", folder, tp=2, env=env) as server:
        while not patiently and server.popen.poll() is None:
            log = server.log_path.read_text(errors="replace")
            launched = launched if LAUNCHING in log else time.monotonic()
            if log.count(LOADED) >= len(RANKS):
                break
            if time.monotonic() > launched + limit_s - SETTLED_S:
                return None
            time.sleep(0.5)
        status = server.popen.wait(timeout=limit_s + 200)
        took = time.monotonic() - began
        return status, took, server.log_path.read_text(errors="replace")


def test_ranks_that_stay_silent_end_the_server_at_its_limit(tmp_path: Path) -> None:
    limit_s, folder = LIMITS_S[0], tmp_path / "first"
    if (ended := end_at(limit_s, folder, patiently=False)) is None:
        limit_s, folder = LIMITS_S[1], tmp_path / "second"
        ended = end_at(limit_s, folder, patiently=True)
    assert ended is not None
    status, took, log = ended
    assert status == ServerExit.FAILED_START
    assert took > limit_s
    (stored,) = find_incidents(folder)
    incident = stored.document
    assert (incident["kind"], incident["complete"]) == ("failed_start", True)
    assert "startup_timeout" in {entry["event"] for entry in incident["timeline"]}
    for title in RANKS:
        (report,) = [process for process in incident["processes"] if process["title"] == title]
        (stack,) = [piece for piece in report["evidence"] if piece["kind"] == "stack"]
        assert stack["status"] == "captured"
        # Where it sleeps, in the scheduler's constructor.
        assert "scheduler.py" in (stored.path / stack["path"]).read_text()
        assert title in log
