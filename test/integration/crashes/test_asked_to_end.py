"""SIGTERM to a real server that hangs, or seems to, before any health check failed: what is known 30 s later counts."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import pytest

from integration.faults import DETOKENIZER, TP0, TP1
from integration.scenario import EXIT_TIMEOUT_S, PATIENCE, Sent, ask_in_flight, handler_pid, serving
from sglang_crashkit.incident.store import StoredIncident, find_incidents
from sglang_crashkit.kernel import procfs
from unit.support.waiting import wait_until

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]

#: Longer than what is taken for silence, in seconds.
SILENT_S = 6.0
REQUEST = Sent("in-flight", "Once upon a time")
#: What is essential is on disk this soon after SIGTERM, in seconds: an orchestrator kills after 30. A machine that is
#: not busy needs 5.
EVIDENCE_S = 15.0


def titles_with_stacks(stored: StoredIncident) -> set[str]:
    """Return whose stacks are on disk."""
    return {
        process["title"].split(" ")[0]
        for process in (stored.document or {"processes": []})["processes"]
        for piece in process["evidence"]
        if (piece["kind"], piece["status"]) == ("stack", "captured") and (stored.path / piece["path"]).is_file()
    }


def test_the_stopped_rank_is_named_within_the_grace_period(release: str, tmp_path: Path) -> None:
    folder = tmp_path / "crash"
    with serving(release, folder, tp=2, env=PATIENCE) as server:
        ask_in_flight(server, REQUEST)
        os.kill(server.pid_of(TP1), signal.SIGSTOP)
        time.sleep(SILENT_S)
        os.kill(server.pid, signal.SIGTERM)
        wanted = {TP0, TP1, DETOKENIZER}
        wait_until(
            lambda: any(wanted <= titles_with_stacks(one) for one in find_incidents(folder)),
            "the stacks are on disk",
            EVIDENCE_S,
        )
        wait_until(lambda: any(one.finished for one in find_incidents(folder)), "the incident is finished", EVIDENCE_S)
        assert server.popen.poll() is None
        # WHEN all of the container is killed
        for pid in (handler_pid(server), *(pid for pid, _title in server.processes())):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    (stored,) = find_incidents(folder)
    assert (stored.document["kind"], stored.document["trigger"]["event"]) == ("hang", "silent_at_sigterm")
    assert stored.document["verdict"]["first_failure"]["title"] == TP1
    assert stored.document["requests"]["journal"]["unfinished"] == 1


@pytest.mark.matrix
@pytest.mark.parametrize("release", ["0.5.9", "0.5.23"])
def test_a_server_that_goes_on_and_drains_leaves_no_incident(release: str, tmp_path: Path) -> None:
    folder = tmp_path / "crash"
    with serving(release, folder, tp=2, env=PATIENCE) as server:
        ask_in_flight(server, REQUEST, tokens=700)
        handler, rank = handler_pid(server), server.pid_of(TP1)
        os.kill(rank, signal.SIGSTOP)
        time.sleep(SILENT_S)
        os.kill(server.pid, signal.SIGTERM)
        wait_until(lambda: any(map(titles_with_stacks, find_incidents(folder))), "the stacks are on disk", EVIDENCE_S)
        # WHEN what looked like a hang was a false alarm
        os.kill(rank, signal.SIGCONT)
        server.popen.wait(timeout=EXIT_TIMEOUT_S)
        wait_until(lambda: procfs.read_stat(handler) is None, "the handler leaves", EXIT_TIMEOUT_S)
    assert find_incidents(folder) == []
