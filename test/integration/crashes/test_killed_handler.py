"""The crash handler is killed in the middle of its work on a real server, which ends all the same.

What is on disk can be read, says what is missing, and the server's next start finishes it.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from integration.crashes.whole import assert_saved
from integration.faults import TP0 as SURVIVOR
from integration.faults import TP1 as RANK
from integration.scenario import Wreck, break_one, handler_pid, start
from lanelib.servers import Server
from sglang_crashkit.cli.main import main
from sglang_crashkit.handler.unfinished import REASON
from sglang_crashkit.incident.exit_status import ServerExit
from sglang_crashkit.incident.store import StoredIncident, find_incidents
from unit.support.waiting import wait_until

RELEASE = "0.5.23"
#: A loaded machine takes minutes to import SGLang.
START_S = 400.0
#: The handler is killed a moment after it was seen at a stage, and may have come further by then.
ATTEMPTS = 4

pytestmark = [pytest.mark.live, pytest.mark.matrix, pytest.mark.timeout(ATTEMPTS * 600)]


@dataclass(frozen=True)
class Stage:
    """How far the handler got."""

    name: str  # what the test calls it
    reached: str  # an event that the incident has by then
    not_yet: str  # one that it must not have
    is_published: bool = False  # the incident has its final name by then


OPENED = Stage("opened", "process_exited", "stacks_captured")
CAPTURED = Stage("stacks_captured", "stacks_captured", "requests_saved")
REQUESTS_TOLD = Stage("reported the requests", "requests_saved", "incident_finished")
PUBLISHED = Stage("published", "incident_finished", "server_exited", is_published=True)
STAGES = [OPENED, CAPTURED, REQUESTS_TOLD, PUBLISHED]


def events_of(found: StoredIncident) -> set[str]:
    assert found.document is not None, found.problem
    return {entry["event"] for entry in found.document["timeline"]}


def is_seen(stage: Stage, incidents: Path) -> bool:
    """Say whether the handler is at that stage or beyond, from what is on disk."""
    found = [each for each in find_incidents(incidents) if each.document and stage.reached in events_of(each)]
    return any(each.finished or not stage.is_published for each in found)


def kill_at(stage: Stage, folder: Path) -> Callable[[Server], None]:
    """Return a fault: rank 1 is killed, and then the handler as soon as it is at that stage."""

    def fault(server: Server) -> None:
        handler, rank = handler_pid(server), server.pid_of(RANK)
        (incidents,) = folder.glob("*/incidents")
        os.kill(rank, signal.SIGKILL)
        deadline = time.monotonic() + 30
        # Without a pause: a stage lasts some hundredths of a second.
        while not is_seen(stage, incidents):
            assert time.monotonic() < deadline, f"the handler was never {stage.name}"
        os.kill(handler, signal.SIGKILL)

    return fault


def wreck_at(stage: Stage, tmp_path: Path, temporary: Path) -> tuple[Wreck, StoredIncident]:
    """Return what was left of a server whose handler was killed at that stage, and the incident."""
    missed = []
    for attempt in range(ATTEMPTS):
        folder = tmp_path / str(attempt)
        env = {"TMPDIR": str(temporary)}
        left = break_one(RELEASE, folder, kill_at(stage, folder), requests=2, tp=2, env=env)
        (found,) = find_incidents(folder)
        events = events_of(found)
        if found.finished == stage.is_published and stage.reached in events and stage.not_yet not in events:
            return left, found
        missed.append(sorted(events))
    raise AssertionError(f"the handler was never killed when it was {stage.name}: {missed}")


def check_the_evidence(stage: Stage, found: StoredIncident, left: Wreck) -> None:
    """Who died is there at every stage, and from the capture on what the others did."""
    document = found.document
    verdict = document["verdict"]
    assert (verdict["first_failure"]["pid"], verdict["level"]) == (left.pids[RANK], "established")
    reports = {process["pid"]: process for process in document["processes"]}
    assert reports[left.pids[RANK]]["exit"]["signal"] == "SIGKILL"
    if stage is OPENED:
        return
    assert {member.pid for member in left.members if member.lasts} <= reports.keys()
    (stack,) = [piece for piece in reports[left.pids[SURVIVOR]]["evidence"] if piece["kind"] == "stack"]
    assert stack["status"] == "captured"
    assert (found.path / stack["path"]).stat().st_size > 0


def check_what_is_finished(stage: Stage, found: StoredIncident, left: Wreck) -> None:
    """What the next server's handler made of it says what is missing and why, and has the requests."""
    document = found.document
    assert document["complete"] is False
    assert "The crash handler was killed before the incident was complete." in document["verdict"]["text"]
    assert "The crash handler was killed before the incident was complete." in (found.path / "summary.md").read_text()
    assert "finished_by_another_handler" in events_of(found)
    assert not [path for path in found.path.rglob("*") if path.name.startswith(".")]
    for process in document["processes"]:
        assert "stack" in {piece["kind"] for piece in process["evidence"]}
        for piece in process["evidence"]:
            assert piece["reason"] or piece["status"] == "captured", piece
            assert piece["path"] is None or (found.path / piece["path"]).is_file()
    check_the_evidence(stage, found, left)
    requests = document["requests"]
    if stage is REQUESTS_TOLD:
        assert Path(requests["path"]).is_file()
        assert requests["unfinished"] == len(left.sent)
    else:
        assert requests["reason"] == REASON
    # The journal was the handler's memory; the server saves its requests itself.
    (saved,) = left.crash_folder.glob("*/crash_dump_*.pkl")
    assert_saved([str(saved)], left.sent)


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
def test_a_killed_handlers_incident_is_finished_at_the_next_start(
    stage: Stage, tmp_path: Path, temporary: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    left, found = wreck_at(stage, tmp_path, temporary)
    # The server ended by itself, soon, with a status that tells the cause, and nothing of it is left.
    assert left.left == []
    # What SGLang sees by itself comes first or not, and says no signal.
    assert left.status in (ServerExit.KILLED, ServerExit.CRASHED)
    assert left.seconds_to_exit < 60
    # What the killed handler left says what is known by then, and who reads it is told that it is not finished.
    assert main(["incidents", str(left.crash_folder)]) == 0
    listed = capsys.readouterr().out
    assert str(found.path) in listed
    assert ("(not finished)" in listed) is not stage.is_published
    assert found.document["complete"] is stage.is_published
    # It is written after the document, for want of room before all else: it may tell what was known a moment before.
    known = "sglang::scheduler_TP1" if stage is OPENED else "was killed by SIGKILL"
    assert known in (found.path / "summary.md").read_text()
    check_the_evidence(stage, found, left)
    before = {path: path.read_bytes() for path in found.path.rglob("*") if path.is_file()}

    with start(RELEASE, left.crash_folder, tp=2, env={"TMPDIR": str(temporary)}) as server:
        log = next(left.crash_folder.glob("*/crash_handler.log"))
        known = f"watching server {server.pid},"
        wait_until(lambda: known in log.read_text(), "the next server's handler is at work", START_S)
        assert server.popen.poll() is None
    (after,) = find_incidents(left.crash_folder)
    assert after.finished
    assert after.name == found.name
    if stage.is_published:
        assert {path: path.read_bytes() for path in before} == before
    else:
        assert f"incident {after.path} of a killed crash handler is finished" in log.read_text()
        check_what_is_finished(stage, after, left)
    assert main(["incidents", str(left.crash_folder)]) == 0
    assert "(not finished)" not in capsys.readouterr().out
