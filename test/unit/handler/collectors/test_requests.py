"""Journals beside a stand-in server: held in memory, read for an incident, gone with the server."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_crashkit.handler.collectors.received import HeldMemory, RequestJournals, StepRecords
from sglang_crashkit.handler.collectors.requests import export_requests
from sglang_crashkit.handler.processes import ProcessTree, TrackedProcess
from sglang_crashkit.incident.folder import REQUESTS
from sglang_crashkit.incident.retention import NoRoomError
from sglang_crashkit.memory import journal
from sglang_crashkit.memory.journal import KEPT_SECS, JournalWriter
from sglang_crashkit.model.incident import JournaledRequests
from unit.support.server_driver import Server
from unit.support.tracked import begin_incident, tracked
from unit.support.waiting import descriptors, wait_until

Start = Callable[..., Server]


def rings(server: Server) -> list[str]:
    """Return the journals that the crash handler holds."""
    paths = descriptors(server.handler.pid).values()
    return [path for path in paths if path.startswith("/memfd:sglang-crashkit-journal")]


def told(server: Server) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Wait for the end; return what the incident says of the requests, and the requests."""
    stored = server.wait_for_the_end()
    requests = stored.document["requests"]
    path = stored.path / requests["journal"]["path"]
    assert path.stat().st_mode & 0o077 == path.parent.stat().st_mode & 0o077 == 0
    return requests, [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("saves", [pytest.param(False, marks=pytest.mark.story), True])
def test_a_killed_server_leaves_its_requests_in_the_incident(start_server: Start, saves: bool) -> None:
    server = start_server(journals=True, dump_secs=60)
    server.ask("ask first one two three")
    server.ask("ask second hello")
    server.ask("answer first")
    wait_until(lambda: len(rings(server)) == 1, "the handler has the journal")
    if saves:
        server.kill("scheduler_TP1")
        assert server.line() == "sigquit"
    server.process.kill()
    requests, lines = told(server)
    assert (requests["source"], requests["finished"], requests["unfinished"]) == ("journal", 1, 1)
    assert (requests["path"], requests["reason"]) == (None, "the server did not report its requests")
    kept = [{name: line[name] for name in ("rid", "state", "text", "pid")} for line in lines]
    assert kept == [
        {"rid": "second", "state": "unfinished", "text": "hello", "pid": server.pid},
        {"rid": "first", "state": "finished", "text": "one two three", "pid": server.pid},
    ]


def test_what_the_server_saved_counts_beside_the_journal(start_server: Start) -> None:
    server = start_server(journals=True)
    server.ask("ask only hello")
    server.kill("scheduler_TP1")
    requests, lines = told(server)
    assert (requests["source"], requests["finished"], requests["unfinished"]) == ("pickle", 3, 1)
    assert [line["rid"] for line in lines] == ["only"]


@pytest.mark.parametrize(("steps", "suspect"), [(True, "begun"), (False, "only")])
def test_a_rank_in_no_step_has_those_suspected_that_wait(start_server: Start, steps: bool, suspect: str) -> None:
    server = start_server(journals=True)
    server.ask("ask only hello")
    for name in ("scheduler_TP0", "scheduler_TP1") if steps else ():
        assert server.ask(f"tell {name} step 1 begun") == "in a step"
    server.kill("scheduler_TP1", signal.SIGSEGV)
    (told,) = server.wait_for_the_end().document["suspects"]
    assert (told["rid"], told["level"]) == (suspect, "supported")


def worker(pid: int, exited_at: float | None = None) -> TrackedProcess:
    return tracked(pid, "sglang::tokenizer_worker", exited_at=exited_at)


def pass_on(journals: RequestJournals, sender: TrackedProcess, number: int = 0) -> None:
    """Have a process pass on a journal, of a request that is called as the process is, and its number."""
    writer = ring()
    writer.begin({"rid": f"{sender.pid}-{number}"})
    journals.follow(sender, writer.fd)
    writer.close()


def test_workers_and_engines_that_come_and_go_do_not_make_it_grow(tmp_path: Path) -> None:
    tree, journals, living = ProcessTree(os.getpid()), RequestJournals(), worker(1)
    run = begin_incident(tree, tmp_path)
    before = len(descriptors())
    for number in range(3):
        pass_on(journals, living, number)
    for pid in range(10, 60):
        pass_on(journals, worker(pid, exited_at=1.0))
        assert len(descriptors()) <= before + 3 + 4
    journals.take(run, math.inf)
    own = [f"1-{number}" for number in range(3)]
    assert sorted(line["rid"] for line in lines(run.folder.path)) == [*own, "56-0", "57-0", "58-0", "59-0"]
    assert run.incident.requests.journal.reason == "the journals of 46 processes that had ended before were dropped"
    for number in range(20):
        pass_on(journals, living, number)
    assert len(descriptors()) <= before + 4 + 4
    journals.take(run, math.inf)
    own = [f"1-{number}" for number in range(16, 20)]
    assert sorted(line["rid"] for line in lines(run.folder.path)) == [*own, "56-0", "57-0", "58-0", "59-0"]
    journals.close()
    assert len(descriptors()) <= before
    run.discard()
    tree.close()


@pytest.mark.parametrize("kind", [RequestJournals, StepRecords])
def test_what_is_no_journal_or_record_is_not_held(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: type[HeldMemory]
) -> None:
    memory, before = kind(), len(descriptors())
    memory.follow(worker(7), None)
    for descriptor in (os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT), os.memfd_create("sglang-crashkit-steps")):
        memory.follow(worker(7), descriptor, [1])
        os.close(descriptor)
    assert (len(descriptors()), memory.held) == (before, {})
    assert caplog.text.count(f"passed on no {memory.what}") == 3


def test_without_a_crash_folder_there_is_no_journal(start_server: Start) -> None:
    for options in ({"crash_folder": None}, {"environ": {"SGLANG_CRASHKIT_JOURNAL": "false"}}):
        server = start_server(journals=True, **options)  # type: ignore[arg-type]
        server.ask("ask only hello")
        server.settle()
        assert rings(server) == []


def ring() -> JournalWriter:
    return JournalWriter(2**20)


@pytest.fixture
def writer() -> JournalWriter:
    return ring()


def export(
    rings: Sequence[tuple[int, int]],
    folder: Path,
    secs: float = 30.0,
    charge: Callable[[int], None] = lambda _growth: None,
    seconds: float | None = None,
) -> JournaledRequests:
    return export_requests(rings, folder, secs, charge, time.time() if seconds is None else seconds, {})


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / REQUESTS).read_text().splitlines()]


def test_the_unfinished_requests_of_all_processes_come_first(tmp_path: Path) -> None:
    writers = {}
    for pid in (7, 8):
        writer = writers[pid] = ring()
        done = writer.begin({"rid": f"done-{pid}"})
        writer.begin({"rid": f"under-way-{pid}"}, input_ids=[1, 2])
        dropped = writer.begin({"rid": f"dropped-{pid}"})
        writer.end(done, finished=True)
        writer.end(dropped, finished=False)
    told = export([(pid, writer.fd) for pid, writer in writers.items()], tmp_path)
    assert (told.path, told.finished, told.unfinished, told.reason) == (REQUESTS, 2, 2, None)
    found = lines(tmp_path)
    assert [(line["rid"], line["pid"], line["state"]) for line in found[:2]] == [
        ("under-way-7", 7, "unfinished"),
        ("under-way-8", 8, "unfinished"),
    ]
    assert {(line["rid"], line["state"]) for line in found[2:]} == {
        (f"{rid}-{pid}", state) for rid, state in (("done", "finished"), ("dropped", "dropped")) for pid in (7, 8)
    }
    assert found[0]["input_ids"] == [1, 2]
    assert found[0]["arrived"].endswith("Z")


def test_what_was_given_up_says_so(tmp_path: Path, writer: JournalWriter) -> None:
    for rid in ("under way", "ended", "answered"):
        number = writer.begin({"rid": rid})
        if rid != "answered":
            writer.abort(number)
        if rid != "under way":
            writer.end(number, finished=True)
    export([(7, writer.fd)], tmp_path, 30)
    assert {(line["rid"], line["state"], "aborted" in line) for line in lines(tmp_path)} == {
        ("under way", "unfinished", True),
        ("ended", "dropped", True),
        ("answered", "finished", False),
    }


#: As the server makes them, by release.
CHECK = {"kind": "GenerateReqInput", "sampling_params": {"max_new_tokens": 1, "temperature": 0.0}, "log_metrics": False}
PAIRED = CHECK | {"bootstrap_host": "2.2.2.2", "bootstrap_room": 0}
FILLED = CHECK | {"return_logprob": False, "logprob_start_len": -1, "top_logprobs_num": 0}
EMBEDDING = CHECK | {"kind": "EmbeddingReqInput", "sampling_params": {"max_new_tokens": 0, "temperature": 0.0}}
WITHHELD = CHECK | {"omitted": {"input_ids": "withheld by SGLANG_CRASHKIT_PROMPTS=none: list of 1"}}


@pytest.mark.parametrize(
    ("fields", "ids"),
    [(CHECK, [0]), (PAIRED, [0]), (FILLED, [0]), (EMBEDDING, [0]), (WITHHELD, None)],
    ids=["", "pair", "filled", "embed", "no"],
)
def test_health_checks_are_left_out_and_told_apart(
    tmp_path: Path, writer: JournalWriter, fields: dict[str, Any], ids: list[int] | None
) -> None:
    checks = dict[str, bool]()
    writer.end(writer.begin(fields | {"rid": "HEALTH_CHECK_1763780000.5"}, None, ids), finished=True)
    writer.begin(fields | {"rid": "HEALTH_CHECK_0f3c"}, None, ids)
    writer.begin({"rid": "users", "log_metrics": False})
    told = export_requests([(7, writer.fd)], tmp_path, 60, lambda _growth: None, time.time(), checks)
    assert (told.finished, told.unfinished, told.left_out, told.reason) == (0, 1, 0, None)
    assert [line["rid"] for line in lines(tmp_path)] == ["users"]
    assert checks == dict.fromkeys(("HEALTH_CHECK_1763780000.5", "HEALTH_CHECK_0f3c"), True)


@pytest.mark.parametrize(
    ("fields", "text", "ids"),
    [
        ({}, "kill it", None),
        (CHECK, "kill it", None),
        (CHECK, None, [0, 1]),
        (CHECK | {"sampling_params": {"max_new_tokens": 2, "temperature": 0.0}}, None, [0]),
        (CHECK | {"lora_path": "x"}, None, [0]),
        (CHECK | {"omitted": {"image_data": "list of 1"}}, None, None),
    ],
)
def test_a_client_hides_no_request_behind_a_name(
    tmp_path: Path, writer: JournalWriter, fields: dict[str, Any], text: str | None, ids: list[int] | None
) -> None:
    checks = dict[str, bool]()
    writer.begin(CHECK | {"rid": "HEALTH_CHECK_1"}, None, [0])
    writer.end(writer.begin(fields | {"rid": "HEALTH_CHECK_1"}, text, ids), finished=True)
    writer.end(writer.begin(fields | {"rid": "HEALTH_CHECK_2"}, text, ids), finished=True)
    told = export_requests([(7, writer.fd)], tmp_path, 60, lambda _growth: None, time.time(), checks)
    assert (told.finished, told.unfinished) == (2, 0)
    assert sorted(line["rid"] for line in lines(tmp_path)) == ["HEALTH_CHECK_1", "HEALTH_CHECK_2"]
    assert checks == {"HEALTH_CHECK_1": False, "HEALTH_CHECK_2": False}


def test_secrets_below_any_container_are_taken_out(tmp_path: Path, writer: JournalWriter) -> None:
    writer.begin(
        {
            "rid": "a",
            "sampling_params": {"watermark_key": "s3cret", "stop": ["x"], "custom": [{"api_key": "s3cret", "seed": 1}]},
        }
    )
    export([(7, writer.fd)], tmp_path)
    (line,) = lines(tmp_path)
    assert "s3cret" not in json.dumps(line)
    assert line["sampling_params"]["custom"] == [{"api_key": "<redacted>", "seed": 1}]


@pytest.mark.parametrize(
    "odd",
    [
        journal.BEGIN.pack(1, False, 0, 4, 0, 0, 9, 1e300) + b"[{}]",
        journal.BEGIN.pack(1, False, 0, 4, 0, 0, 9, 5.0) + b"[{}]",
        journal.BEGIN.pack(1, False, 3, 2, 0, 9, 9, 5.0) + b"{}123456789",
        journal.BEGIN.pack(1, True, 0, 2, 2**31, 0, 9, 5.0) + b"{}\xff",
        journal.BEGIN.pack(1, False, 0, 11, 0, 0, 9, math.nan) + b'{"rid":"a"}',
        journal.END.pack(2, True, 1, math.inf),
    ],
)
def test_an_odd_record_costs_no_other_request(tmp_path: Path, writer: JournalWriter, odd: bytes) -> None:
    other = ring()
    writer.end(writer.begin({"rid": "own"}), finished=True)
    # A beginning of a request of its own, or another end of that one.
    writer.append(odd)
    other.begin({"rid": "other"})
    told = export([(7, writer.fd), (8, other.fd)], tmp_path)
    assert sorted(line["rid"] for line in lines(tmp_path)) == ["other", "own"]
    assert told.unfinished == 1


def test_what_ended_long_before_the_incident_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The worker that wrote the first ring died hours before the other one wrote its last.
    writers = {}
    for pid, hours in ((7, 0), (8, 6)):
        monkeypatch.setattr(journal, "time", SimpleNamespace(time=lambda hours=hours: 1000.0 + 3600 * hours))
        writer = writers[pid] = ring()
        writer.end(writer.begin({"rid": f"done-{pid}"}), finished=True)
        writer.begin({"rid": f"under-way-{pid}"})
    rings, last = [(pid, writer.fd) for pid, writer in writers.items()], 1000.0 + 6 * 3600
    for seconds, kept in (
        (last + KEPT_SECS - 1, ["done-8"]),
        (last + KEPT_SECS + 1, []),
        (1000.0, ["done-7", "done-8"]),
    ):
        told = export(rings, tmp_path, seconds=seconds)
        assert (told.finished, told.unfinished, told.left_out) == (len(kept), 2, 0)
        assert [line["rid"] for line in lines(tmp_path)] == ["under-way-7", "under-way-8", *kept]


def test_what_does_not_fit_in_the_time_is_counted(tmp_path: Path, writer: JournalWriter) -> None:
    for number in range(5):
        writer.begin({"rid": str(number)})
    told = export([(7, writer.fd)], tmp_path, -1)
    assert (told.left_out, told.unfinished, told.path) == (5, 0, REQUESTS)
    assert told.reason == "5 requests are missing: unreadable, no disk space, or not written within -1 s"


def test_without_room_those_in_flight_come_first(tmp_path: Path, writer: JournalWriter) -> None:
    for number in range(5):
        writer.end(writer.begin({"rid": f"done-{number}", "text": "x" * 1000}), finished=True)
    for number in range(3):
        writer.begin({"rid": f"under-way-{number}", "text": "x" * 1000})
    asked: list[int] = []
    taken: list[int] = []

    def charge(growth: int) -> None:
        asked.append(growth)
        if sum(taken) + growth > 5000:
            raise NoRoomError(28, "full")
        taken.append(growth)

    told = export([(7, writer.fd)], tmp_path, charge=charge)
    assert (told.unfinished, told.finished, told.left_out, told.path) == (3, 1, 4, REQUESTS)
    assert (tmp_path / REQUESTS).stat().st_size <= sum(taken)
    assert len(lines(tmp_path)) == 4
    # A helper that is asked may have to look at the whole disk.
    assert len(asked) <= 10


def test_a_deeply_nested_request_does_not_hide_the_others(tmp_path: Path, writer: JournalWriter) -> None:
    deep: list[Any] = []
    for _ in range(900):
        deep = [deep]
    writer.begin({"rid": "deep", "sampling_params": {"custom_params": deep}})
    writer.begin({"rid": "flat"})
    limit = sys.getrecursionlimit()
    # The writer had more room than the reader has; from Python 3.12 on both have what the C stack has.
    sys.setrecursionlimit(600)
    try:
        told = export([(7, writer.fd)], tmp_path)
    finally:
        sys.setrecursionlimit(limit)
    rids = [line["rid"] for line in lines(tmp_path)]
    assert rids[-1] == "flat"
    assert (told.left_out, told.unfinished) == (2 - len(rids), len(rids))


def test_an_unreadable_ring_does_not_hide_the_others(tmp_path: Path, writer: JournalWriter) -> None:
    writer.begin({"rid": "a"})
    off = ring()
    off.invalidate()
    told = export([(8, off.fd), (7, writer.fd)], tmp_path)
    assert told.unfinished == 1
    assert "the journal of process 8 is not a ring" in told.reason


def test_a_folder_that_somebody_prepared_is_not_used(tmp_path: Path, writer: JournalWriter) -> None:
    writer.begin({"rid": "a"})
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "requests").symlink_to(tmp_path / "elsewhere")
    told = export([(7, writer.fd)], tmp_path)
    assert told.path is None
    assert "is not a folder" in told.reason
    assert list((tmp_path / "elsewhere").iterdir()) == []
