"""The crash folder of a real server takes no more: it fills up, is full or read-only on a tmpfs, or is no folder."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from integration.crashes.whole import journaled
from integration.faults import send
from integration.scenario import SCHEDULER, Wreck, break_one, incidents_of
from lanelib.lanes import Lane
from lanelib.servers import Server
from sglang_crashkit.incident.exit_status import ServerExit
from sglang_crashkit.incident.store import StoredIncident, find_incidents
from unit.support.small_disk import fill, mounted
from unit.support.waiting import LONG, wait_until

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]

#: The small disk is for incidents.
ENVIRONMENT = {"SGLANG_CRASHKIT_KEEP_FREE_MB": "0"}


kill_scheduler = send(SCHEDULER)


def break_it(
    lane: Lane, folder: Path, temporary: Path, fault: Callable[[Server], None], *, is_elsewhere: bool = True
) -> tuple[Wreck, StoredIncident]:
    """Break a server whose crash folder takes no more; return what it left, and its only incident.

    It ended with a telling status, and the incident says who died and what was asked. It is in the temporary folder if
    `is_elsewhere`.
    """
    left = break_one(lane, folder, fault, requests=2, env=ENVIRONMENT | {"TMPDIR": str(temporary)})
    (fallback,) = temporary.glob("sglang-crashkit-*")
    inside, outside = incidents_of(folder), find_incidents(fallback)
    (found,) = [*inside, *outside]
    assert bool(outside) is is_elsewhere
    assert left.status == ServerExit.KILLED
    assert left.left == []
    assert left.seconds_to_exit < 60
    assert f"crash kit: incident {found.path}" in left.log
    document = found.document
    assert document["complete"] is True
    assert document["verdict"]["first_failure"]["title"] == SCHEDULER
    assert document["verdict"]["level"] == "established"
    assert document["requests"]["unfinished"] == 2
    # Where it is elsewhere, so is the server's own file; the journal is in memory.
    assert not is_elsewhere or Path(document["requests"]["path"]).is_relative_to(found.path.parents[2])
    living = [process for process in document["processes"] if process["exit"] is None]
    assert {"sglang::detokenizer", SCHEDULER} <= {process["title"] for process in document["processes"]}
    pieces = [piece for process in living for piece in process["evidence"] if piece["kind"] == "stack"]
    assert pieces
    assert all(piece["status"] == "captured" or piece["reason"] for piece in pieces)
    assert (found.path / "summary.md").read_text().startswith("# killed: ")
    return left, found


@pytest.mark.matrix
def test_a_disk_that_fills_meanwhile_has_what_is_essential(lane: Lane, temporary: Path, tmp_path: Path) -> None:
    with mounted(tmp_path / "small", "size=8m,mode=700") as folder:

        def fill_up() -> None:
            wait_until(lambda: list(folder.glob("*/incidents/.partial-*/events.jsonl")), "an incident is begun")
            fill(folder)

        filling = threading.Thread(target=fill_up)

        def fault(server: Server) -> None:
            filling.start()
            kill_scheduler(server)

        _left, found = break_it(lane, folder, temporary, fault, is_elsewhere=False)
        filling.join(LONG)
        # Nothing half-written, and what was kept for this case is given back.
        assert [path.name for path in found.path.rglob(".*")] == []


@pytest.mark.matrix
def test_with_a_full_disk_the_incident_is_elsewhere(lane: Lane, temporary: Path, tmp_path: Path) -> None:
    with mounted(tmp_path / "small", "size=8m,mode=700") as folder:

        def fault(server: Server) -> None:
            fill(folder)
            kill_scheduler(server)

        left, found = break_it(lane, folder, temporary, fault)
        kept = journaled(found.document, found.path, "unfinished")
        assert kept == {request.rid: request.text for request in left.sent}


def test_one_that_cannot_be_made_costs_neither_end_nor_evidence(lane: Lane, temporary: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    left, _found = break_it(lane, tmp_path / "file" / "crash", temporary, kill_scheduler)
    # Upstream's server is there, and useless, 100 s later.
    assert left.seconds_to_exit < 50
    assert "cannot be used" in left.log
    assert f"Not a directory: '{tmp_path}/file/crash" in left.log


@pytest.mark.matrix
def test_a_read_only_folder_is_replaced_by_the_temporary_one(lane: Lane, temporary: Path, tmp_path: Path) -> None:
    with mounted(tmp_path / "small", "size=8m,mode=700,ro") as folder:
        left, _found = break_it(lane, folder, temporary, kill_scheduler)
        assert list(folder.iterdir()) == []
        assert f"crash folder {folder}" in left.log
        assert "Read-only file system" in left.log
