"""Ranks that never get ready: the server gives up at its limit, and an incident says where they were."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from integration.scenario import PATIENCE
from lanelib.lanes import ensure_lane
from lanelib.servers import Server
from sglang_crashkit.incident.exit_status import ServerExit
from sglang_crashkit.incident.store import find_incidents

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]

RANKS = ("sglang::scheduler_TP0", "sglang::scheduler_TP1")
#: Long enough for the ranks to be where they stay, on a busy machine too.
LIMIT_S = 150.0
#: Upstream's own test hook: every scheduler sleeps while it initialises.
ENV = PATIENCE | {"SGLANG_TEST_STUCK_SCHEDULER_INIT": "3600", "SGLANG_CRASHKIT_STARTUP_TIMEOUT_SECS": str(LIMIT_S)}


def test_ranks_that_stay_silent_end_the_server_at_its_limit(tmp_path: Path) -> None:
    began = time.monotonic()
    with Server.start(
        ensure_lane("0.5.23"), tp=2, extra_args=["--crash-dump-folder", str(tmp_path)], env=ENV
    ) as server:
        status = server.popen.wait(timeout=LIMIT_S + 200)
        took = time.monotonic() - began
        log = server.log_path.read_text(errors="replace")
    assert status == ServerExit.FAILED_START
    assert took > LIMIT_S
    (stored,) = find_incidents(tmp_path)
    incident = stored.document
    assert incident is not None
    assert (incident["kind"], incident["complete"]) == ("failed_start", True)
    assert "startup_timeout" in {entry["event"] for entry in incident["timeline"]}
    for title in RANKS:
        (report,) = [process for process in incident["processes"] if process["title"] == title]
        (stack,) = [piece for piece in report["evidence"] if piece["kind"] == "stack"]
        assert stack["status"] == "captured"
        # Where it sleeps, in the scheduler's constructor.
        assert "scheduler.py" in (stored.path / stack["path"]).read_text()
        assert title in log
