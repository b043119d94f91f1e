from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sglang_crashkit.incident import fingerprint
from sglang_crashkit.incident.fingerprint import (
    Fault,
    count_fault,
    fault_of,
    is_same_fault,
    read_faults,
)
from sglang_crashkit.kernel.private_files import FolderLock
from sglang_crashkit.model.incident import Incident
from unit.support.stored import NOON, changed, make_incident
from unit.support.waiting import LONG

FAULT = Fault("0.5.23", "exception", "scheduler tp=1", "ValueError", ("forward (model.py:7)",))
RAISED: dict[str, Any] = {
    "server": {"sglang_version": "0.5.23", "pid": 1},
    "verdict": {"kind": "exception", "first_failure": {"pid": 8, "title": "sglang::scheduler_TP1"}},
    "timeline": [{"event": "exception", "pid": 8, "message": "ValueError: 0x7f"}, {"event": "stacks_captured"}],
    "processes": [
        {"pid": 8, "role": "scheduler", "rank": {"tp": 1}, "doing": ["forward (model.py:7)", "run (x.py:1)"]},
        {"pid": 9, "role": "scheduler", "rank": {"tp": 0}, "doing": ["wait (y.py:1)"]},
    ],
}
KILLED: dict[str, Any] = {
    "server": {"sglang_version": "0.5.23", "pid": 1},
    "verdict": {"kind": "oom_kill", "first_failure": {"pid": 8, "title": "sglang::scheduler_TP1"}},
    "timeline": [],
    "processes": [
        {"pid": 8, "role": "scheduler", "rank": {"tp": 1}, "doing": [], "exit": {"signal": "SIGKILL", "code": None}},
        {"pid": 9, "role": "scheduler", "rank": {"tp": 0}, "doing": ["wait (y.py:1)", "run (x.py:2)", "a (x.py:3)"]},
        {"pid": 5, "role": "detokenizer", "rank": {}, "doing": ["recv (z.py:1)"]},
    ],
}


def found_fault(document: dict[str, Any]) -> Fault | None:
    return fault_of(Incident.of(document))


def same_fault(some: dict[str, Any], other: dict[str, Any]) -> bool:
    return is_same_fault(Incident.of(some), Incident.of(other))


def test_a_fault_says_who_failed_of_what_and_where() -> None:
    assert found_fault(RAISED) == Fault(
        "0.5.23", "exception", "scheduler tp=1", "ValueError", ("forward (model.py:7)", "run (x.py:1)")
    )
    # Where the others waited depends on the moment; the function does not.
    assert found_fault(KILLED) == Fault(
        "0.5.23", "oom_kill", "scheduler tp=1", "SIGKILL", ("run (x.py)", "wait (y.py)")
    )


@pytest.mark.parametrize(
    ("document", "path", "value", "is_same"),
    [
        (RAISED, "timeline.0.message", "ValueError: 0x9c", True),
        (RAISED, "processes.1.doing", ["elsewhere (y.py:9)"], True),
        (RAISED, "server.pid", 99, True),
        (RAISED, "timeline.0.message", "KeyError: 0x7f", False),
        (RAISED, "processes.0.rank", {"tp": 0}, False),
        (RAISED, "processes.0.doing", ["forward (model.py:8)"], False),
        (RAISED, "server.sglang_version", "0.5.9", False),
        (RAISED, "verdict.kind", "hang", False),
        (KILLED, "processes.0.exit", {"signal": "SIGSEGV"}, False),
        (KILLED, "processes.0.exit", {"signal": None, "code": 3}, False),
        (KILLED, "processes.1.doing", ["elsewhere (y.py:9)"], False),
        (KILLED, "processes.0.role", "detokenizer", False),
    ],
)
def test_only_what_tells_faults_apart_does(document: dict[str, Any], path: str, value: Any, is_same: bool) -> None:
    fault, other = found_fault(changed(document, path, value)), found_fault(document)
    assert (fault.key == other.key) is is_same


def test_hangs_without_a_stack_are_not_taken_for_the_same() -> None:
    hung = changed(changed(RAISED, "verdict.kind", "hang"), "timeline", [])
    assert found_fault(hung) is not None
    for process in hung["processes"]:
        process["doing"] = []
    assert found_fault(hung) is None


def starting(title: str, rank: dict[str, int], doing: list[str]) -> dict[str, Any]:
    """Return an incident in which a rank was killed while the server started."""
    role = "scheduler" if title.startswith("sglang::") else "helper"
    document = changed(KILLED, "processes.0", KILLED["processes"][0] | {"title": title, "role": role, "rank": rank})
    document["timeline"] = [{"event": "launch_failed", "pid": 1, "message": "died"}]
    return changed(document, "processes.1.doing", doing)


def test_at_startup_neither_the_moment_nor_a_missing_title_matters() -> None:
    one = found_fault(starting("sglang::scheduler_TP1", {"tp": 1}, ["get_code (<frozen importlib>:1)"]))
    assert one == found_fault(starting("Rank 1 scheduler", {}, ["compile (model.py:7)"]))
    assert one.who == "scheduler tp=1"
    assert one not in (found_fault(KILLED), found_fault(starting("Rank 2 scheduler", {}, [])))
    early = starting("python", {}, [])
    early["processes"][0]["role"] = "helper"
    early["timeline"][0]["message"] = "Rank 1 scheduler died during initialization (exit code: -9)."
    assert found_fault(early) == found_fault(starting("Rank 1 scheduler", {}, []))
    only = found_fault(starting("sglang::scheduler", {}, []))
    assert only == found_fault(starting("Rank 0 scheduler", {}, []))
    replica = found_fault(starting("sglang::scheduler_DP1", {"dp": 1}, []))
    assert replica == found_fault(starting("DP1 Rank 0 scheduler", {}, []))
    assert replica not in (one, only)


@pytest.mark.parametrize(
    "document",
    [{}, {"verdict": None}, {"verdict": {"first_failure": None}}, changed(RAISED, "verdict.first_failure.pid", 4)],
)
def test_where_nothing_was_seen_to_fail_there_is_no_fault(document: dict[str, Any]) -> None:
    assert found_fault(document) is None


def seen(incidents: Path, number: int, fault: Fault = FAULT, keep: int = 3) -> tuple[int, str | None] | None:
    """Count a fault and store its incident; return the count, and which one it repeats."""
    path = make_incident(incidents, seconds=NOON + number)
    found = count_fault(incidents, fault, f"id-{number}", path.name, keep)
    assert found is None or found.key == fault.key
    return found and (found.count, found.repeats)


def test_the_first_few_of_a_fault_are_kept_in_full(tmp_path: Path) -> None:
    found = [seen(tmp_path, number) for number in range(6)]
    assert found == [(1, None), (2, None), (3, None), (4, "id-0"), (5, "id-0"), (6, "id-0")]
    other = Fault("0.5.9", *list(FAULT.__dict__.values())[1:])
    assert seen(tmp_path, 7, other) == (1, None)
    index = json.loads((tmp_path / "faults.json").read_text())
    assert index["faults"][FAULT.key]["count"] == 6
    assert index["faults"][FAULT.key]["fault"]["who"] == "scheduler tp=1"
    assert read_faults(tmp_path) == index["faults"]
    assert (tmp_path / "faults.json").stat().st_mode & 0o777 == 0o600


def test_without_the_lock_an_incident_is_kept_in_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "LOCK_SECS", 0.02)
    for number in range(4):
        seen(tmp_path, number)
    lock = FolderLock(tmp_path)
    lock.acquire()
    assert seen(tmp_path, 4) is None
    lock.release()
    assert seen(tmp_path, 5) == (5, "id-0")
    assert count_fault(tmp_path / "absent", FAULT, "id", "name", 3) is None


@pytest.mark.parametrize(
    "content",
    ["{", "[]", *(f'{{"schema_version": {rest}}}' for rest in ("9", '1, "faults": []', '1, "faults": {"KEY": 5}'))],
)
def test_an_index_that_cannot_be_read_is_begun_anew(tmp_path: Path, content: str) -> None:
    (tmp_path / "faults.json").write_text(content.replace("KEY", FAULT.key))
    assert seen(tmp_path, 0) == (1, None)
    assert seen(tmp_path, 1) == (2, None)


def test_the_index_does_not_grow_without_end(tmp_path: Path) -> None:
    tmp_path.joinpath("x").mkdir()
    for number in range(220):
        count_fault(tmp_path, Fault("0", "exception", "scheduler", f"Error{number}", ()), "id", "x", 3)
    index = json.loads((tmp_path / "faults.json").read_text())["faults"]
    assert len(index) == 200
    assert {entry["fault"]["what"] for entry in index.values()} == {f"Error{number}" for number in range(20, 220)}


def test_a_large_batch_makes_no_earlier_suspect_forgotten(tmp_path: Path) -> None:
    others = {f"r{number}": f"ordinary {number}" for number in range(fingerprint.MAX_SUSPECTS)}
    for batch in ({"first": "poison"}, others):
        count_fault(tmp_path, FAULT, "id", "name", 0, suspects=batch)
    found = count_fault(tmp_path, FAULT, "id", "name", 0, suspects={"again": "poison"})
    assert found.seen == {"again": 1}


def test_servers_at_the_same_time_count_each_crash_once(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from sglang_crashkit.incident import fingerprint
from sglang_crashkit.incident.fingerprint import Fault, count_fault
fingerprint.LOCK_SECS = 30.0
incidents = Path(sys.argv[1])
fault = Fault("0.5.23", "exception", "scheduler", "ValueError", ())
for number in range(25):
    name = f"{sys.argv[2]}-{number}"
    (incidents / name).mkdir()
    print((count_fault(incidents, fault, name, name, 3) or fault).count)
"""
    processes = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path), str(n)], stdout=subprocess.PIPE, text=True)
        for n in range(4)
    ]
    counts = [int(line) for process in processes for line in process.communicate(timeout=LONG)[0].split()]
    assert sorted(counts) == list(range(1, 101))
    (entry,) = json.loads((tmp_path / "faults.json").read_text())["faults"].values()
    assert (entry["count"], len(entry["full"])) == (100, 3)


LOOP = ["spin (model.py:7)", "forward (model.py:3)", "run_batch (scheduler.py:2)", "event_loop (scheduler.py:1)"]


def hung(doing: list[str], *, kind: str = "hang", first: int | None = 8, **more: Any) -> dict[str, Any]:
    """Return an incident of two ranks, of which one hangs, or both where none is named."""
    rank = {"role": "scheduler", "doing": doing, **more}
    waiting = {"role": "scheduler", "doing": doing if first is None else ["wait (y.py:1)"]}
    processes = [{"pid": 8, "rank": {"tp": 0}, **rank}, {"pid": 9, "rank": {"tp": 1}, **waiting}]
    failure = {"pid": first, "title": "x"} if first is not None else None
    return {"verdict": {"kind": kind, "first_failure": failure}, "processes": processes, "server": {}}


@pytest.mark.parametrize(
    "doing",
    [
        LOOP,
        ["spin (model.py:8)", *LOOP[1:]],
        ["helper (model.py:30)", "spin (model.py:8)", *LOOP[1:3]],
        ["spin (model.py:8)"],
        ["two (b.py:1)", *LOOP[:3]],
        [],
    ],
)
def test_a_hang_is_the_same_whatever_line_it_is_on(doing: list[str]) -> None:
    assert same_fault(hung(LOOP), hung(doing))
    assert same_fault(hung(doing), hung(LOOP))
    assert same_fault(hung(LOOP, first=None), hung(doing, first=None))


@pytest.mark.parametrize(
    "other",
    [
        hung(["elsewhere (model.py:7)", "compute (model.py:3)", *LOOP[2:]]),
        hung(["spin (other.py:7)", "forward (other.py:3)", *LOOP[2:]]),
        hung(["x (a.py:1)", "y (a.py:1)", "z (a.py:1)", "main (scheduler.py:9)"]),
        hung(LOOP, kind="exception"),
        hung(LOOP, role="detokenizer"),
        hung(LOOP, state={"State": "T (stopped)"}),
        {"verdict": {"kind": "hang"}, "processes": []},
        {},
    ],
)
def test_another_hang_is_another_fault(other: dict[str, Any]) -> None:
    assert not same_fault(hung(LOOP), other)
    assert not same_fault(other, hung(LOOP))


def test_of_what_raised_the_line_counts() -> None:
    raised, later = hung(LOOP, kind="exception"), hung(["spin (model.py:8)", *LOOP[1:]], kind="exception")
    assert same_fault(raised, raised)
    assert not same_fault(raised, later)
