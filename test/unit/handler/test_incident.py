"""The same fault again and again: each crash has one incident, most of them in short."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sglang_crashkit.handler.incident import (
    IncidentRun,
    add,
    add_journal,
    count_repeat,
    incident_with_core,
    requests_of,
)
from sglang_crashkit.handler.processes import ProcessTree
from sglang_crashkit.incident.fingerprint import read_faults
from sglang_crashkit.incident.folder import IncidentFolder, NullFolder, new_id
from sglang_crashkit.incident.retention import size_of
from sglang_crashkit.incident.store import StoredIncident, find_incidents
from sglang_crashkit.model.incident import (
    Evidence,
    Exit,
    Failure,
    Incident,
    JournaledRequests,
    ProcessReport,
    Requests,
    ServerInfo,
    Trigger,
    Verdict,
    iso_time,
)
from sglang_crashkit.settings import MB, DiskLimits, Settings
from unit.waiting import LONG, child, wait_until

FORKS = """
import ctypes, os, signal
for number in range(3):
    if os.fork() == 0:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        setproctitle.setproctitle(f"sglang::scheduler_TP{number}")
        signal.pause()
ready(); pause()
"""


def stored(folder: IncidentFolder, names: list[str]) -> Incident:
    """Return an incident in which TP1 was killed, with the stacks `names` of TP0 and one of TP1."""
    incident = Incident(
        folder.id, "killed", Trigger("process_exited", "t", 8, "TP1"), ServerInfo(1, "0.5.23", "0.1", "h")
    )
    dead = ProcessReport(8, "TP1", "scheduler", {"tp": 1}, exit=Exit(None, "SIGSEGV", "signal", "", "t"))
    dead.evidence = [Evidence("fault_stack", "captured", folder.write_text("stacks/TP1-8.fault.txt", "x"))]
    living = ProcessReport(9, "TP0", "scheduler", {"tp": 0}, doing=["wait (x.py:1)"])
    living.evidence = [Evidence("proc_state", "captured"), Evidence("exception", "captured", "ranks/TP0.json")]
    living.evidence += [Evidence("stack", "captured", folder.write_text(name, "x"), source="py-spy") for name in names]
    incident.processes = [dead, living]
    incident.verdict = Verdict("signal", Failure(8, "TP1"), "established", "It died.")
    return incident


def test_stacks_of_a_repeated_fault_are_given_up(tmp_path: Path) -> None:
    names = ["stacks/TP0-9.txt", "stacks/TP0-9.2.txt", "stacks/TP0-9.native.txt"]
    ids = []
    for number in range(3):
        folder = IncidentFolder(tmp_path, "killed", new_id(), number)
        incident = stored(folder, names)
        before = incident.to_json()["processes"]
        spare = count_repeat(incident, folder, keep=2)
        assert incident.fault.count == number + 1
        ids.append(folder.id)
        if number < 2:
            assert (spare, incident.fault.repeats, incident.to_json()["processes"]) == ([], None, before)
        folder.publish()
    assert sorted(spare) == sorted(str(Path(name).with_suffix(end)) for name in names for end in (".txt", ".json"))
    assert incident.fault.repeats == ids[0]
    dead, living = incident.processes
    assert dead.evidence[0].path == "stacks/TP1-8.fault.txt"
    assert living.doing == ["wait (x.py:1)"]
    state, record, *stacks = living.evidence
    assert (state.status, record.path) == ("captured", "ranks/TP0.json")
    assert {(piece.status, piece.path, piece.source) for piece in stacks} == {("skipped", None, None)}
    assert stacks[0].reason == f"the same fault as in incident {ids[0]}, which has its stacks"


def test_of_a_fault_that_has_cores_no_more_are_wanted(tmp_path: Path) -> None:
    first, second = (IncidentFolder(tmp_path, "killed", new_id(), number) for number in range(2))
    incident, repeated = stored(first, []), stored(second, [])
    assert incident_with_core(repeated, second, keep=3) is None
    count_repeat(incident, first, keep=3)
    # The first one had none.
    assert incident_with_core(repeated, second, keep=3) is None
    incident.processes[1].evidence.append(Evidence("cuda_core", "captured", path="../../core.cuda.1.9"))
    count_repeat(incident, first, keep=3)
    assert incident_with_core(repeated, second, keep=3) == first.id
    assert incident_with_core(repeated, second, keep=0) is None
    assert incident_with_core(repeated, NullFolder("full"), keep=3) is None
    repeated.processes[0].exit = Exit(None, "SIGBUS", "signal", "", "t")
    assert incident_with_core(repeated, second, keep=3) is None
    # WHEN it has made room for others
    repeated.processes[0].exit = incident.processes[0].exit
    first.discard()
    assert incident_with_core(repeated, second, keep=3) is None


def test_what_is_written_nowhere_is_not_counted(tmp_path: Path) -> None:
    folder = IncidentFolder(tmp_path, "snapshot", new_id(), 1.0)
    incident = stored(folder, [])
    assert count_repeat(incident, NullFolder("full"), keep=1) == []
    incident.verdict = None
    assert count_repeat(incident, folder, keep=1) == []
    assert incident.fault is None
    assert read_faults(tmp_path) == {}


@pytest.fixture(scope="module")
def tree() -> Iterator[ProcessTree]:
    with child(FORKS, title="sglang::server") as process:
        tree = ProcessTree(process.pid)

        def schedulers() -> bool:
            tree.refresh()
            for process in tree:
                tree.register(process.pid, 0)
            return sum(its.role == "scheduler" for its in tree) == 3

        wait_until(schedulers, "three ranks have their titles")
        yield tree


@contextmanager
def one_that_died(tree: ProcessTree) -> Iterator[Any]:
    """Have the tree's rank TP1 look as if it had just been killed."""
    (rank,) = (process for process in tree if process.title == "sglang::scheduler_TP1")
    rank.exited_at = time.time()
    yield rank
    rank.exited_at = None


@pytest.mark.wide
def test_a_hundred_crashes_are_a_hundred_incidents_within_the_limits(tree: ProcessTree, tmp_path: Path) -> None:
    max_use = MB
    limits = DiskLimits(max_use=max_use, keep_free=0)
    settings = replace(Settings.from_environ({}), disk=limits, capture_secs=LONG)
    made = []
    for _ in range(100):
        with one_that_died(tree) as rank:
            folder = IncidentFolder(tmp_path, "killed", new_id(), time.time(), limits, server=tree.root.pid)
            trigger = Trigger("process_exited", iso_time(time.time()), rank.pid, rank.title)
            run = IncidentRun("killed", trigger, tree, folder, tmp_path, settings)
            run.capture()
            run.add_exit(rank)
            made.append(run.finish())
            assert made[-1].is_dir()
            assert size_of(tmp_path) <= max_use
    assert len(set(made)) == 100
    found = find_incidents(tmp_path)
    assert {each.path for each in found} == {path for path in made if path.is_dir()}
    assert all(each.finished and each.document and each.document["complete"] for each in found)
    (entry,) = read_faults(tmp_path).values()
    assert entry["count"] == 100
    assert [number_of(each) for each in found] == list(range(100, 100 - len(found), -1))
    short = [each for each in found if is_short(each)]
    # One that gave up its room for others is made up for by one more in full.
    assert len(found) - len(short) <= settings.full_per_fault
    assert len(short) > 10
    for each in short:
        assert not list(each.path.glob("stacks/*"))
        assert (each.path / "summary.md").is_file()


def number_of(found: StoredIncident) -> int:
    return int(found.document["fault"]["count"])


def is_short(found: StoredIncident) -> bool:
    return found.document["fault"]["repeats"] is not None


def test_what_was_saved_has_a_path_and_counts() -> None:
    told = requests_of({"path": "/x.pkl", "finished": 3, "unfinished": 1, "reason": "of no account"})
    assert told == Requests(3, 1, "/x.pkl", None, "pickle")


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"error": "OSError: full", "reason": "x"}, "OSError: full"),
        ({"reason": "x"}, "x"),
        ({}, "there were no requests to save"),
        ({"finished": True, "unfinished": "7"}, "there were no requests to save"),
    ],
)
def test_what_was_not_saved_has_a_reason(fields: dict[str, object], reason: str) -> None:
    assert requests_of(fields) == Requests(None, None, None, reason, None)


def test_those_of_two_workers_are_added_up() -> None:
    first, second = Requests(3, 1, "/a.pkl", None, "pickle"), Requests(2, 0, "/b.pkl", None, "pickle")
    assert add(first, second) == Requests(5, 1, "/a.pkl", None, "pickle")
    assert add(Requests(), second) == second
    nothing = Requests(0, None, None, "there were no requests to save", None)
    assert add(first, nothing) == first


def test_the_journal_counts_where_the_server_did_not() -> None:
    journal = JournaledRequests("requests/requests.jsonl", finished=4, unfinished=2)
    by_server, by_nobody = Requests(3, 1, "/a.pkl", None, "pickle"), Requests()
    add_journal(by_server, journal)
    add_journal(by_nobody, journal)
    assert (by_server.finished, by_server.source, by_server.journal) == (3, "pickle", journal)
    assert (by_nobody.finished, by_nobody.unfinished, by_nobody.source) == (4, 2, "journal")
    empty = Requests()
    add_journal(empty, JournaledRequests(reason="torn"))
    assert (empty.finished, empty.source) == (None, None)
