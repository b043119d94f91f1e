"""A request that is suspected again and again is known again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sglang_crashkit.analysis.suspects import ONLY, suspects_of
from sglang_crashkit.handler.collectors.repeats import count_repeat
from sglang_crashkit.incident.folder import REQUESTS, IncidentFolder
from sglang_crashkit.incident.quarantine import FILE, read_entries
from sglang_crashkit.model.incident import Exit, Incident, JournaledRequests
from unit.analysis.test_suspects import incident, step
from unit.stored import NOON

REQUEST = {"text": "a secret", "sampling_params": {"top_k": 5}, "return_logprob": True}


def line_of(rid: str | None, fields: dict[str, Any]) -> str:
    """Return the line of a request as its incident has it."""
    return json.dumps({"rid": rid, "state": "unfinished", **fields}) + "\n"


def finish(crash_folder: Path, lines: dict[str, dict[str, Any]]) -> Incident:
    """Finish an incident with these requests in the step."""
    made = incident(*lines)
    made.suspects, _left_out = suspects_of(made)
    folder = IncidentFolder(crash_folder / "host" / "incidents", "killed", "00000009", NOON)
    folder.write_text(REQUESTS, "".join(line_of(rid, line) for rid, line in lines.items()))
    count_repeat(made, folder, keep=0)
    folder.publish()
    return made


@pytest.mark.parametrize(("others", "first"), [(3, "odd"), (1, "0")])
def test_the_one_that_asks_for_what_no_other_does_is_first(tmp_path: Path, others: int, first: str) -> None:
    plain = {"text": "x", "sampling_params": {"top_k": 5}}
    lines = {str(number): plain for number in range(others)} | {"odd": plain | {"return_logprob": True}}
    suspects = finish(tmp_path, lines).suspects
    assert (suspects[0].rid, suspects[0].level) == (first, "unknown")
    assert ("no other one of the step asks for return_logprob" in suspects[0].reasons) is (others > 1)


def test_a_few_of_many_parameters_are_named(tmp_path: Path) -> None:
    plain = {"text": "x", "sampling_params": {}}
    lines = {str(number): plain for number in range(3)} | {
        "odd": plain | {"sampling_params": dict.fromkeys("abcdef", 1)}
    }
    words = "no other one of the step asks for " + ", ".join(f"sampling_params.{one}" for one in "abcd") + " and 2 more"
    assert words in finish(tmp_path, lines).suspects[0].reasons


def crash(
    crash_folder: Path,
    number: int,
    *rids: str,
    request: dict[str, Any] = REQUEST,
    signal: str | None = None,
    beside: int = 0,
) -> Incident:
    """Finish one more incident of the same fault, with these requests in the step, and others under way beside it."""
    made = incident(*rids)
    made.requests.journal = JournaledRequests(REQUESTS, unfinished=len(rids) + beside)
    made.environment = {"model": "/model"}
    made.processes[0].exit = Exit(None, signal, "signal", "", "") if signal else None
    made.suspects, _left_out = suspects_of(made)
    folder = IncidentFolder(crash_folder / "host" / "incidents", "killed", f"0000000{number}", NOON + number)
    lines = [line_of(rid, request | {"text": f"{request['text']} {place}"}) for place, rid in enumerate(rids)]
    folder.write_text(REQUESTS, "".join(lines))
    count_repeat(made, folder, keep=0)
    folder.publish()
    return made


def test_a_request_that_comes_again_under_another_id_is_known(tmp_path: Path) -> None:
    crash(tmp_path, 1, "first", "innocent")
    again = crash(tmp_path, 2, "second")
    assert again.suspects[0].rid == "second"
    assert "suspected in an earlier incident" in again.suspects[0].reasons[0]
    assert again.fault is not None
    assert (again.fault.count, again.fault.seen) == (2, {"second": 1})
    other = crash(tmp_path, 3, "third", request=REQUEST | {"text": "another"})
    assert other.fault is not None
    assert other.fault.seen == {}


@pytest.mark.parametrize(
    ("end", "suspects"),
    [
        (None, ["late", 'ea"rly']),
        (Exit(None, "SIGKILL", "signal", "", ""), []),
        # By the kernel, for what a request asked for.
        (Exit(None, "SIGKILL", "oom_kill", "", ""), ["late", 'ea"rly']),
    ],
)
def test_between_two_batches_those_are_suspected_that_were_in_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: Exit | None, suspects: list[str]
) -> None:
    monkeypatch.setenv("SGLANG_CRASHKIT_QUARANTINE", "observe")
    made = incident(last=[step(8, "begun")])
    made.processes[0].exit = end
    folder = IncidentFolder(tmp_path / "host" / "incidents", "killed", "00000001", NOON)
    states = {"begun": "unfinished", 'ea"rly': "unfinished", "late": "unfinished", "answered": "finished"}
    lines = [line_of(rid, {"state": state, "text": "x"}) for rid, state in states.items()]
    folder.write_text(REQUESTS, "".join(lines))
    count_repeat(made, folder, 0, {"begun"})
    folder.publish()
    assert [suspect.rid for suspect in made.suspects] == suspects
    assert bool(read_entries(tmp_path)) is bool(suspects)


def late(crash_folder: Path, rids: list[str | None]) -> Incident:
    """Finish an incident of a rank between two batches, with these requests that were not answered."""
    made = incident(last=[step(8, "begun")])
    folder = IncidentFolder(crash_folder / "host" / "incidents", "killed", "00000001", NOON)
    answered = line_of("answered", {"state": "finished", "text": "x"})
    folder.write_text(REQUESTS, "".join(line_of(rid, {"text": f"of {rid}"}) for rid in rids) + answered)
    count_repeat(made, folder, 0, {"begun"})
    folder.publish()
    return made


def test_of_very_many_unanswered_requests_the_newest_are_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_CRASHKIT_QUARANTINE", "observe")
    made = late(tmp_path, [f"r{number}" for number in range(3000)])
    assert [suspect.rid for suspect in made.suspects] == [f"r{number}" for number in range(2999, 2983, -1)]
    # Their lines are found behind all others.
    assert len(read_entries(tmp_path)) == len(made.suspects)


@pytest.mark.parametrize("odd", ["x" * 1025, None])
def test_an_id_that_is_none_or_too_long_is_left_out_and_no_more(tmp_path: Path, odd: str | None) -> None:
    assert [suspect.rid for suspect in late(tmp_path, ["early", odd, "late"]).suspects] == ["late", "early"]


@pytest.mark.parametrize("text", ["{", '{"rid": 1}\n', "[]\n", '{"state": 1}\n'])
def test_requests_that_cannot_be_read_cost_nothing_else(tmp_path: Path, text: str) -> None:
    made = incident("a")
    made.suspects, _left_out = suspects_of(made)
    folder = IncidentFolder(tmp_path / "host" / "incidents", "killed", "00000001", NOON)
    folder.write_text(REQUESTS, text)
    count_repeat(made, folder, keep=0)
    folder.publish()
    assert made.fault is not None
    assert [suspect.rid for suspect in made.suspects] == ["a"]


@pytest.mark.parametrize(
    ("signal", "beside", "levels"),
    [(None, 0, {"proven"}), ("SIGSEGV", 0, {"proven"}), ("SIGSEGV", 39, {"suspected"}), ("SIGKILL", 0, set())],
)
def test_the_only_request_of_a_second_fatal_step_is_proven(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signal: str | None, beside: int, levels: set[str]
) -> None:
    monkeypatch.setenv("SGLANG_CRASHKIT_QUARANTINE", "observe")
    crash(tmp_path, 1, "first", signal=signal, beside=beside)
    assert {entry.level for entry in read_entries(tmp_path)} == ({"suspected"} if levels else set())
    crash(tmp_path, 2, "second", signal=signal, beside=beside)
    entries = read_entries(tmp_path)
    assert {entry.level for entry in entries} == levels
    assert all(entry.counts_for("/model", "0.5.23") for entry in entries)


@pytest.mark.parametrize(("unfinished", "listed"), [(1, "proven"), (2, "suspected")])
def test_what_was_in_no_step_is_proven_where_nothing_else_was_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unfinished: int, listed: str
) -> None:
    monkeypatch.setenv("SGLANG_CRASHKIT_QUARANTINE", "refuse")
    for number in (1, 2):
        made = incident(last=[step(8, "begun")])
        made.requests.journal = JournaledRequests(REQUESTS, unfinished=unfinished)
        folder = IncidentFolder(tmp_path / "host" / "incidents", "killed", f"0000000{number}", NOON + number)
        folder.write_text(REQUESTS, line_of("a", REQUEST))
        count_repeat(made, folder, keep=0)
        folder.publish()
        assert [one.rid for one in made.suspects] == ["a"]
        assert (ONLY in made.suspects[0].reasons) is (unfinished == 1)
    assert [entry.level for entry in read_entries(tmp_path)] == [listed]


def test_what_was_in_a_rank_that_somebody_stopped_is_not_in_quarantine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_CRASHKIT_QUARANTINE", "refuse")
    made = incident("a")
    made.processes[0].state = {"State": "T (stopped)"}
    folder = IncidentFolder(tmp_path / "host" / "incidents", "hang", "00000001", NOON)
    folder.write_text(REQUESTS, line_of("a", REQUEST))
    count_repeat(made, folder, keep=0)
    assert made.fault is not None
    assert read_entries(tmp_path) == []


def test_one_of_several_is_a_suspect_and_without_a_quarantine_none_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crash(tmp_path, 1, "a", "b")
    assert read_entries(tmp_path) == []
    monkeypatch.setenv("SGLANG_CRASHKIT_QUARANTINE", "refuse")
    for number in (2, 3):
        crash(tmp_path, number, "a", "b")
    assert [entry.level for entry in read_entries(tmp_path)] == ["suspected"] * 2


def test_a_quarantine_that_cannot_be_written_costs_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_CRASHKIT_QUARANTINE", "refuse")
    (tmp_path / FILE).mkdir(parents=True)
    made = crash(tmp_path, 1, "a")
    assert made.fault is not None
