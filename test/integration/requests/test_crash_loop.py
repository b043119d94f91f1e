"""A server that crashes again and again in one crash folder, as an orchestrator starts it anew: one incident each time.

``SGLANG_CRASHKIT_TEST_CRASHES`` sets how often; a hundred take half an hour on two idle cores.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from integration.faults import TP1 as RANK
from integration.scenario import handlers_of, left_of, members_of, rank_that_starts, start
from lanelib.procs import read_process, tree_of
from lanelib.servers import Server
from sglang_crashkit.incident.exit_status import ServerExit
from sglang_crashkit.incident.fingerprint import read_faults
from sglang_crashkit.incident.retention import size_of
from sglang_crashkit.incident.store import StoredIncident, find_incidents
from sglang_crashkit.kernel import procfs
from sglang_crashkit.settings import MB
from unit.support.waiting import wait_until

#: How often it crashes.
CRASHES = int(os.environ.get("SGLANG_CRASHKIT_TEST_CRASHES", "10"))
#: Of so many crashes the last is while the server serves; of the others, some are when the rank has its title.
SERVES_EVERY, IS_TITLED_EVERY = 10, 4
#: What all incidents together may take: less than a hundred do, even in short.
MAX_USE_MB = 1
#: So many of a fault are kept in full.
FULL = 3
#: A loaded machine takes minutes to import SGLang.
START_S, EXIT_S = 400.0, 60.0

pytestmark = [pytest.mark.live, pytest.mark.matrix, pytest.mark.timeout(300 + 120 * CRASHES)]


@dataclass(frozen=True)
class Crash:
    """One crash of the loop."""

    number: int  # how many there were, this one included
    serves: bool  # the server was up
    pid: int  # the rank's that was killed
    status: int  # the main process's exit status, negative for a signal
    seconds: float  # from the rank's death to the server's end
    left: list[str]  # processes of the server, and its crash handler, that were still there 5 s later
    incident: StoredIncident  # the newest incident
    found: list[Path]  # the incidents that are on disk by then, the newest first
    use: int  # what all incidents take, in bytes

    @property
    def is_full(self) -> bool:
        return self.document["fault"]["repeats"] is None

    @property
    def document(self) -> dict[str, Any]:
        assert self.incident.document is not None
        return self.incident.document


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("crash")


@pytest.fixture(scope="module")
def temporary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # SGLang puts its sockets there, whose paths must be short.
    return tmp_path_factory.mktemp("t")


@pytest.fixture(scope="module")
def crashes(folder: Path, temporary: Path) -> list[Crash]:
    return [crash(folder, temporary, number) for number in range(1, CRASHES + 1)]


def crash(folder: Path, temporary: Path, number: int) -> Crash:
    """Start a server, kill its rank 1 and wait for the end."""
    serves = number % SERVES_EVERY == 0
    environment = {"TMPDIR": str(temporary), "SGLANG_CRASHKIT_MAX_USE_MB": str(MAX_USE_MB)}
    with start("0.5.23", folder, tp=2, env=environment) as server:
        if serves:
            server.wait_ready()
            server.generate(max_new_tokens=2, timeout_s=120)
            pid = server.pid_of(RANK)
        else:
            is_titled = number % IS_TITLED_EVERY == 0
            pid = (
                rank_that_starts(server, RANK, START_S)
                if is_titled
                else wait_until(lambda: started_rank(server), "a rank starts", START_S)
            )
        known = [member.process for member in members_of(server)]
        began = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        # It is there before the first rank, but may have to wait for a processor.
        handler = read_process(wait_until(lambda: handlers_of(server), "a handler watches", START_S)[0])
        assert handler is not None
        status = server.popen.wait(timeout=EXIT_S)
        seconds = time.monotonic() - began
        left = left_of([server], [*known, handler])
    found = find_incidents(folder)
    (incidents,) = folder.glob("*/incidents")
    return Crash(
        number, serves, pid, status, seconds, left, found[0], [each.path for each in found], size_of(incidents)
    )


def started_rank(server: Server) -> int | None:
    """Return the second process that the server starts for itself, as soon as it is there.

    Killed then, multiprocessing reaps it when it starts the third, and the crash handler may never have seen it.
    """
    assert server.popen.poll() is None, server.log_tail()
    children = sorted(
        (process for process in tree_of(server.pid) if process.parent == server.pid),
        key=lambda its: (its.started, its.pid),
    )
    titles = [procfs.read_title(its.pid) for its in children]
    # Before them is multiprocessing's own helper; a later one may have its title sooner.
    is_there = (
        len(titles) > 2 and titles[0].endswith("resource_tracker") and titles[2].endswith("multiprocessing.spawn")
    )
    return children[2].pid if is_there else None


def test_each_crash_ends_with_the_same_status_and_leaves_nothing(crashes: list[Crash], temporary: Path) -> None:
    assert {one.status for one in crashes} == {ServerExit.KILLED}
    assert [one.left for one in crashes if one.left] == []
    assert max(one.seconds for one in crashes) < EXIT_S / 2
    assert not list(temporary.glob("sglang-crashkit-*/run/*"))


def test_each_crash_has_one_complete_incident_that_names_the_rank(crashes: list[Crash]) -> None:
    assert len({one.incident.path for one in crashes}) == CRASHES
    for one in crashes:
        document = one.document
        assert one.incident.finished
        assert document["complete"] is True
        verdict = document["verdict"]
        assert (verdict["first_failure"]["pid"], verdict["kind"]) == (one.pid, "signal"), verdict
        assert verdict["level"] == "established"


def test_the_same_fault_is_counted_and_seldom_stored_in_full(crashes: list[Crash], folder: Path) -> None:
    (incidents,) = folder.glob("*/incidents")
    counts = sorted(entry["count"] for entry in read_faults(incidents).values())
    for serves in (False, True):
        same = [one for one in crashes if one.serves is serves]
        faults = [one.document["fault"] for one in same]
        assert len({fault["key"] for fault in faults}) == min(1, len(same))
        assert [fault["count"] for fault in faults] == list(range(1, len(same) + 1))
        # Of a fault so many are kept in full; one that gave up its room for others is made up for by one more.
        for position, one in enumerate(same):
            full = {earlier.incident.path for earlier in same[:position] if earlier.is_full}
            before = crashes[one.number - 2].found if one.number > 1 else []
            # Room may be made before it is counted, or after.
            assert one.is_full or len(full.intersection(before)) >= FULL
            assert not one.is_full or len(full.intersection(one.found)) < FULL
        if same:
            assert len(same) in counts
    assert sum(counts) == CRASHES
    assert len(counts) == len({one.serves for one in crashes})


def test_a_short_incident_has_no_stacks_but_what_everybody_did(crashes: list[Crash], folder: Path) -> None:
    stored = [each for each in find_incidents(folder) if each.document]
    short = [each for each in stored if each.document and each.document["fault"]["repeats"]]
    assert len(stored) - len(short) <= FULL * len({one.serves for one in crashes})
    for each in short:
        assert not list(each.path.glob("stacks/*"))
        assert "the same fault " in (each.path / "summary.md").read_text()
        living = [process for process in each.document["processes"] if process["exit"] is None]
        assert any(process["doing"] for process in living)


def test_the_disk_contract_holds_and_only_the_oldest_went(crashes: list[Crash], folder: Path) -> None:
    assert max(one.use for one in crashes) <= MAX_USE_MB * MB
    if CRASHES >= 100:
        assert len(crashes[-1].found) < CRASHES
    stored = find_incidents(folder)
    newest = [one.incident.path for one in reversed(crashes)]
    assert [each.path for each in stored] == newest[: len(stored)]
    (incidents,) = folder.glob("*/incidents")
    # Nothing half-written, and no record that no one took in.
    assert {path.name for path in incidents.iterdir()} == {"faults.json", *(each.name for each in stored)}
    assert list(folder.glob("*/.*")) == []
