"""The real-server tests' own demands on an incident: each gap in one is seen."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from integration.crashes.whole import assert_before_the_end, assert_whole
from integration.scenario import Member, Sent, Wreck
from lanelib.procs import Process

MAIN, HELPER = "python -m sglang.launch_server", "python -c multiprocessing.resource_tracker"
DEAD, RANK, WORKER = "sglang::scheduler_TP1", "sglang::scheduler_TP0", "sglang::detokenizer"
TITLES = {10: MAIN, 11: HELPER, 12: DEAD, 13: RANK, 14: WORKER}
ROLES = {10: "server", 11: "helper", 12: "scheduler", 13: "scheduler", 14: "detokenizer"}
SENT = [Sent("one", "the first prompt"), Sent("two", "the second prompt")]
KILLED = ("signal", "SIGKILL")
UNTOLD = {"kind": "stack", "status": "skipped", "path": None, "reason": "it was dead before its stacks could be taken"}


def end(cause: str, signal: str | None = "SIGKILL", code: int | None = None) -> dict[str, Any]:
    return {"cause": cause, "signal": signal, "code": code}


@pytest.fixture
def left(tmp_path: Path) -> Wreck:
    """What is left of a server that lost a rank, with nothing missing."""
    (tmp_path / "stack").write_text("a stack")
    (tmp_path / "requests.jsonl").write_text(
        "".join(json.dumps({"rid": s.rid, "text": s.text, "state": "unfinished"}) + "\n" for s in SENT)
    )
    (tmp_path / "dump.pkl").write_bytes(pickle.dumps([(sent.rid, sent.text) for sent in SENT]))
    stack = {"kind": "stack", "status": "captured", "path": "stack", "reason": None}
    processes = [
        {"pid": pid, "title": title, "role": ROLES[pid], "exit": None, "evidence": [dict(stack)]}
        for pid, title in TITLES.items()
    ]
    processes[2] |= {"exit": end(*KILLED), "evidence": [{"kind": "exit", "status": "captured", "path": None}, UNTOLD]}
    moments = ("stacks_captured", "requests_saved", "incident_finished", "process_exited", "server_exited")
    timeline = [{"event": event, "time": f"2026-01-01T00:00:0{at}.0Z"} for at, event in enumerate(moments)]
    timeline[1]["path"] = str(tmp_path / "dump.pkl")
    journal = {"path": "requests.jsonl"}
    requests = {"unfinished": 2, "path": timeline[1]["path"], "reason": None, "source": "pickle", "journal": journal}
    incident = {"complete": True, "processes": processes, "requests": requests, "timeline": timeline}
    members = [Member(Process(pid, 1, 10, 10, "S"), title) for pid, title in TITLES.items()]
    pids = {title: pid for pid, title in TITLES.items()}
    return Wreck(tmp_path, [(tmp_path, incident)], members, pids, SENT, 82, [], "", 1.0)


def is_refused(left: Wreck) -> bool:
    try:
        assert_whole(left, {DEAD: KILLED})
    except AssertionError:
        return True
    return False


def test_an_incident_that_misses_nothing_passes(left: Wreck) -> None:
    assert_whole(left, {DEAD: KILLED})
    assert_before_the_end(left.incident)


@pytest.mark.parametrize("title", TITLES.values())
def test_each_process_that_the_server_had_must_be_there(left: Wreck, title: str) -> None:
    del left.incident["processes"][list(TITLES.values()).index(title)]
    assert is_refused(left)


def test_a_compiler_that_was_there_before_may_be_gone(left: Wreck) -> None:
    left.members.append(Member(Process(15, 1, 13, 10, "S"), "cc1plus"))
    left.members.append(Member(Process(16, 1, 13, 10, "S"), RANK, is_fork=True))
    assert not is_refused(left)
    exit_piece = {"kind": "exit", "status": "failed", "path": None}
    compiler = {"pid": 17, "title": "cc1plus", "role": "helper", "exit": end("unknown", None), "evidence": [exit_piece]}
    left.incident["processes"].append(compiler)
    assert not is_refused(left)


@pytest.mark.parametrize("title", [MAIN, HELPER, RANK, WORKER])
def test_all_but_the_killed_process_must_have_a_stack(left: Wreck, title: str) -> None:
    left.report(title)["evidence"] = [UNTOLD]
    assert is_refused(left)


def test_a_rank_ended_by_its_parent_must_leave_a_sign(left: Wreck) -> None:
    process = left.report(RANK)
    process |= {"exit": end("parent_ended"), "last_sign": None}
    process["evidence"] = [UNTOLD, {"kind": "exit", "status": "captured", "path": None}]
    assert is_refused(left)
    process["last_sign"] = {"doing": "batch 7, of 2 requests"}
    assert not is_refused(left)


@pytest.mark.parametrize(("title", "is_refused_then"), [(HELPER, False), (WORKER, True)])
def test_a_slow_tool_excuses_a_helper_only(left: Wreck, title: str, is_refused_then: bool) -> None:
    piece = left.report(title)["evidence"][0]
    piece |= {"status": "failed", "path": None, "reason": "py-spy did not end within 0.75 s"}
    assert is_refused(left) is is_refused_then


def test_an_exception_record_stands_for_a_readable_stack(left: Wreck) -> None:
    piece = left.report(RANK)["evidence"][0]
    piece["kind"] = "exception"
    assert not is_refused(left)
    (left.folder / "stack").write_text("")
    assert is_refused(left)


@pytest.mark.parametrize(
    ("title", "found", "is_right"),
    [
        (DEAD, None, False),
        (DEAD, end("unknown", None), False),
        (DEAD, end("oom_kill"), False),
        (DEAD, end("signal", "SIGSEGV"), False),
        (RANK, end("unknown", None), False),
        (RANK, end("signal"), False),
        (RANK, end("exit_status", None, 1), False),
        (RANK, end("exception", None, 1), False),
        (RANK, end("signal", "SIGQUIT"), False),
        (RANK, end("parent_ended"), True),
        (HELPER, end("exit_status", None, 0), True),
        (MAIN, end("exit_status", None, 0), False),
        (MAIN, end("exit_status", None, 82), True),
    ],
)
def test_each_end_must_be_the_faults_or_a_consequence(
    left: Wreck, title: str, found: dict[str, Any] | None, is_right: bool
) -> None:
    process = left.report(title)
    process["exit"] = found
    process["evidence"].append({"kind": "exit", "status": "captured", "path": None})
    assert is_refused(left) is not is_right


@pytest.mark.parametrize("change", [{"unfinished": 3}, {"path": None}, {"journal": {"path": "other.jsonl"}}])
def test_what_is_told_of_the_requests_must_be_true(left: Wreck, change: dict[str, Any]) -> None:
    (left.folder / "other.jsonl").write_text(json.dumps({"rid": "one", "text": "", "state": "unfinished"}) + "\n")
    left.incident["requests"] |= change
    assert is_refused(left)


def test_the_servers_own_file_must_hold_each_request(left: Wreck) -> None:
    (left.folder / "dump.pkl").write_bytes(pickle.dumps([("one", "the first prompt"), ("two", "another prompt")]))
    assert is_refused(left)


@pytest.mark.parametrize("event", ["process_exited", "server_exited"])
def test_evidence_that_came_after_an_end_is_late(left: Wreck, event: str) -> None:
    (entry,) = [entry for entry in left.incident["timeline"] if entry["event"] == event]
    entry["time"] = "2026-01-01T00:00:01.5Z"
    with pytest.raises(AssertionError):
        assert_before_the_end(left.incident)
