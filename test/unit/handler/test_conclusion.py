"""What an incident concludes: where ranks diverged, whom it suspects, and the cause."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sglang_crashkit.analysis.suspects import suspects_of
from sglang_crashkit.handler import conclusion
from sglang_crashkit.handler.collectors import received
from sglang_crashkit.handler.collectors.received import divergence_of
from sglang_crashkit.handler.conclusion import count_repeat, name_suspects
from sglang_crashkit.incident.fingerprint import incident_with_core
from sglang_crashkit.incident.folder import REQUESTS, IncidentFolder, NullFolder, new_id
from sglang_crashkit.incident.judging import explain
from sglang_crashkit.judge import verdict
from sglang_crashkit.model import ABORTED, ALONE
from sglang_crashkit.model.incident import (
    Divergence,
    Evidence,
    Exit,
    Failure,
    Incident,
    JournaledRequests,
    ProcessReport,
    ServerInfo,
    Trigger,
    Verdict,
    iso_time,
)
from sglang_crashkit.model.step import Step, StepRequest
from sglang_crashkit.view.markdown import format_summary
from unit.analysis.test_suspects import incident, step
from unit.support.stored import NOON

REQUEST = {"text": "a secret", "sampling_params": {"top_k": 5}, "return_logprob": True}


def line_of(rid: str | None, fields: dict[str, Any]) -> str:
    """Return the line of a request as its incident has it."""
    return json.dumps({"rid": rid, "state": "unfinished", **fields}) + "\n"


def keep(made: Incident, crash_folder: Path, lines: str, number: int = 1, begun: Collection[str] = ()) -> Incident:
    """Count the fault of an incident that has these lines of requests, and publish it."""
    made.suspects, _left_out = suspects_of(made)
    folder = IncidentFolder(crash_folder / "host" / "incidents", "killed", f"{number:08}", NOON + number)
    folder.write_text(REQUESTS, lines)
    count_repeat(made, folder, 0, begun)
    folder.publish()
    return made


def finish(crash_folder: Path, lines: dict[str, dict[str, Any]]) -> Incident:
    """Finish an incident with these requests in the step."""
    return keep(incident(*lines), crash_folder, "".join(line_of(rid, line) for rid, line in lines.items()))


PLAIN = {"text": "x", "sampling_params": {"top_k": 5}}


#: Of two no one stands out, nor where not all are read in time.
@pytest.mark.parametrize(("others", "secs", "first"), [(3, 60.0, "odd"), (1, 60.0, "0"), (3, -1.0, "0")])
def test_a_request_with_a_unique_parameter_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, others: int, secs: float, first: str
) -> None:
    monkeypatch.setattr(conclusion, "LOOK_SECS", secs)
    lines = {str(number): PLAIN for number in range(others)} | {"odd": PLAIN | {"return_logprob": True}}
    suspects = finish(tmp_path, lines).suspects
    assert (suspects[0].rid, suspects[0].level) == (first, "unknown")
    assert ("no other one of the step asks for return_logprob" in suspects[0].reasons) is (first == "odd")


def test_a_judgement_that_fails_leaves_the_suspects_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_given: Any) -> Any:
        raise KeyError("steps")

    monkeypatch.setattr(conclusion, "suspects_of", fail)
    made = finish(tmp_path, {"a": REQUEST, "b": REQUEST})
    assert [one.rid for one in made.suspects] == ["a", "b"]
    assert made.fault is not None


@pytest.mark.parametrize(
    ("event", "aborted_secs", "is_before"),
    [
        (("exception", 7, {"message": "x"}), 20, True),
        (("no_progress", 7, {"silent_secs": 30.0}), 20, True),
        # Its client did not wait for the end of the hang.
        (("no_progress", 7, {"silent_secs": 60.0}), 20, False),
        # Others hang with the first.
        (("no_progress", 8, {"silent_secs": 60.0}), 20, False),
        (("process_exited", 7, {}), 59, True),
        # It ends with the server.
        (("process_exited", 7, {}), 61, False),
    ],
)
def test_a_suspect_says_that_it_was_aborted_before(
    tmp_path: Path, event: tuple[str, int, dict[str, Any]], aborted_secs: float, is_before: bool
) -> None:
    made = incident("0")
    made.note(NOON + 60, event[0], pid=event[1], **event[2])
    if event[0] == "process_exited":
        made.note(NOON + 1, "teardown", pid=1)
    keep(made, tmp_path, line_of("0", {"text": "x", "aborted": iso_time(NOON + aborted_secs)}))
    assert made.suspects[0].reasons == [ALONE, *([ABORTED] if is_before else [])]


LOST = "RuntimeError: [/pytorch/gloo/transport/tcp/pair.cc:538] Connection closed by peer [10.0.0.2]:31107"
KILLED = Exit(None, "SIGKILL", "signal", "its memory cgroup counts no OOM kill", "t")
OUT_OF_MEMORY = Exit(None, "SIGKILL", "oom_kill", "memory.events counts 1 OOM kill more", "t")
DIVERGED = Divergence("decision", "established", "The ranks went different ways at step 9.", step=9)


@pytest.mark.parametrize(
    ("kind", "message", "end", "divergence"),
    [
        ("lost_peer", LOST, None, None),
        ("signal", "", KILLED, None),
        ("oom_kill", "", OUT_OF_MEMORY, None),
        ("exception", "RuntimeError: shapes differ", None, DIVERGED),
        ("thread_died", "", None, None),
    ],
)
def test_what_came_from_elsewhere_is_no_requests_doing(
    kind: str, message: str, end: Exit | None, divergence: Divergence | None
) -> None:
    made = incident("only-one", message=message)
    name_suspects(made)
    assert made.suspects, "an exception of its own may be of a request"
    made.processes[0].exit, made.divergence = end, divergence
    made.verdict = Verdict(kind, Failure(7, "sglang::scheduler_TP0"), "supported", "It failed.")
    name_suspects(made, {} if kind == "oom_kill" else {"only-one": 1})
    assert (made.suspects, made.suspects_left_out) == ([], 0)


def test_one_that_was_there_each_time_of_an_oom_kill_is_named() -> None:
    made = incident("again", "new")
    made.processes[0].exit = OUT_OF_MEMORY
    made.verdict = Verdict("oom_kill", Failure(7, "sglang::scheduler_TP0"), "established", "It was killed.")
    name_suspects(made, {"again": 1})
    assert [one.rid for one in made.suspects] == ["again"]


def crash(crash_folder: Path, number: int, *rids: str, request: dict[str, Any] = REQUEST) -> Incident:
    """Finish one more incident of the same fault, with these requests in the step."""
    made = incident(*rids)
    made.requests.journal = JournaledRequests(REQUESTS, unfinished=len(rids))
    made.environment = {"model": "/model"}
    lines = [line_of(rid, request | {"text": f"{request['text']} {place}"}) for place, rid in enumerate(rids)]
    return keep(made, crash_folder, "".join(lines), number)


def test_a_request_that_comes_again_under_another_id_is_known(tmp_path: Path) -> None:
    crash(tmp_path, 1, "first", "innocent")
    again = crash(tmp_path, 2, "second")
    assert again.suspects[0].rid == "second"
    assert "suspected in an earlier incident" in again.suspects[0].reasons[0]
    assert (again.fault.count, again.fault.seen) == (2, {"second": 1})
    other = crash(tmp_path, 3, "third", request=REQUEST | {"text": "another"})
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
    tmp_path: Path, end: Exit | None, suspects: list[str]
) -> None:
    made = incident(last=[step(8, "begun")])
    made.processes[0].exit = end
    states = {"begun": "unfinished", 'ea"rly': "unfinished", "late": "unfinished", "answered": "finished"}
    lines = [line_of(rid, {"state": state, "text": "x"}) for rid, state in states.items()]
    keep(made, tmp_path, "".join(lines), begun={"begun"})
    assert [suspect.rid for suspect in made.suspects] == suspects


def late(crash_folder: Path, rids: list[str | None]) -> Incident:
    """Finish an incident of a rank between two batches, with these requests that were not answered."""
    made = incident(last=[step(8, "begun")])
    answered = line_of("answered", {"state": "finished", "text": "x"})
    lines = "".join(line_of(rid, {"text": f"of {rid}"}) for rid in rids) + answered
    return keep(made, crash_folder, lines, begun={"begun"})


def test_of_very_many_unanswered_requests_the_newest_are_chosen(tmp_path: Path) -> None:
    made = late(tmp_path, [f"r{number}" for number in range(3000)])
    assert [suspect.rid for suspect in made.suspects] == [f"r{number}" for number in range(2999, 2983, -1)]


@pytest.mark.parametrize("odd", ["x" * 1025, None])
def test_an_id_that_is_none_or_too_long_is_skipped(tmp_path: Path, odd: str | None) -> None:
    assert [suspect.rid for suspect in late(tmp_path, ["early", odd, "late"]).suspects] == ["late", "early"]


@pytest.mark.parametrize("text", ["{", '{"rid": 1}\n', "[]\n", '{"state": 1}\n'])
def test_requests_that_cannot_be_read_cost_nothing_else(tmp_path: Path, text: str) -> None:
    made = keep(incident("a"), tmp_path, text)
    assert made.fault is not None
    assert [suspect.rid for suspect in made.suspects] == ["a"]


def of_ranks(kind: str = "hang", ranks: int = 2) -> Incident:
    reports = [ProcessReport(10 + n, f"sglang::scheduler_TP{n}", "scheduler", {"tp": n}) for n in range(ranks)]
    reports.append(ProcessReport(9, "sglang::detokenizer", "detokenizer", {}))
    return Incident("id", kind, Trigger("no_progress", "t", 10, ""), ServerInfo(1, "0", "0", "h"), reports)


def step_of(number: int, rid: str) -> Step:
    requests = (StepRequest(rid, 1, 5),)
    return Step(number, float(number), number + 0.5, "processed", "decode", requests, 1, 1, agreed_hash=hash(rid))


ALIKE = [step_of(1, "a"), step_of(2, "a")]


@pytest.mark.parametrize(
    ("kind", "steps", "expected"),
    [
        ("hang", {10: ALIKE, 11: ALIKE}, "No divergence in the last 2 steps of TP0-1."),
        ("hang", {10: ALIKE, 11: [step_of(1, "a"), step_of(2, "b")]}, "; 3.0 s before the hang was noticed."),
        ("killed", {10: ALIKE, 11: [step_of(1, "a"), step_of(2, "b")]}, "; 3.0 s before the incident."),
        # Who was read first has not ended for that.
        ("hang", {10: ALIKE, 11: [*ALIKE, step_of(3, "a")]}, "No divergence in the last 2 steps of TP0-1."),
        ("hang", {10: ALIKE}, "Whether the ranks diverged is unknown: of TP1 there are no steps."),
    ],
)
def test_an_incident_tells_where_the_ranks_diverged(
    tmp_path: Path, kind: str, steps: dict[int, list[Step]], expected: str
) -> None:
    (tmp_path / "ranks").mkdir()
    for pid, its in steps.items():
        text = "".join(json.dumps(one.to_json()) + "\n" for one in its)
        (tmp_path / f"ranks/scheduler_TP{pid - 10}-{pid}.steps.jsonl").write_text(text)
    in_memory = {pid: [replace(one, requests=()) for one in its] for pid, its in steps.items()}
    found = divergence_of(of_ranks(kind), in_memory, tmp_path, 5.0, 4.5)
    assert found.statement.endswith(expected)
    assert (found.request == "b") == ("before" in expected)
    assert found.pids == ((10, 11) if "before" in expected else ())


@pytest.mark.parametrize(("ranks", "steps"), [(2, {}), (2, {10: [], 11: []}), (1, {10: ALIKE})])
def test_it_tells_nothing_where_there_is_nothing_to_compare(ranks: int, steps: dict[int, list[Step]]) -> None:
    assert divergence_of(of_ranks(ranks=ranks), steps, Path(), 5.0, 5.0) is None


def test_what_breaks_in_it_costs_nothing_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_args: Any) -> None:
        raise RuntimeError

    monkeypatch.setattr(received, "find_divergence", fail)
    assert divergence_of(of_ranks(), {10: ALIKE}, Path(), 5.0, 5.0) is None
    assert "cannot be compared" in caplog.text


RECORD = {
    "message": "RuntimeError: selected index k out of range\nof many lines",
    "traceback": ["forward (sglang/srt/layers/sampler.py:1)", "get_top_logprobs_raw (sglang/srt/layers/logprob.py:2)"],
}


def write_record(folder: Path, record: str) -> None:
    (folder / "ranks").mkdir()
    (folder / "ranks" / "r.exception.json").write_text(record)


def make_incident(kind: str = "exception") -> Incident:
    rank = ProcessReport(8, "sglang::scheduler", "scheduler", {})
    rank.evidence = [Evidence("exception", "captured", "ranks/r.exception.json")]
    incident = Incident("0", kind, Trigger(kind, "t", 8, rank.title), ServerInfo(7, "0.5.12", "0", "h"), [rank])
    incident.verdict = Verdict(kind, Failure(8, rank.title), "established", "It failed.", ["It failed."])
    incident.note(1.0, "exception", pid=8, message="RuntimeError: selected index k")
    return incident


@pytest.mark.parametrize("record", ["{torn", None])
def test_a_rank_record_that_is_not_whole_is_passed_over(tmp_path: Path, record: str | None) -> None:
    if record is not None:
        write_record(tmp_path, record)
    found = explain(make_incident(), tmp_path)
    assert (found.kind, found.known_issues) == ("exception", [])


def test_the_log_of_the_first_failure_is_read(tmp_path: Path) -> None:
    incident = make_incident("exit_status")
    incident.timeline.clear()
    incident.processes[0].exit = Exit(1, None, "exit_status", "no exception", "t")
    incident.processes[0].evidence = [Evidence("log", "captured", "x.log")]  # type: ignore[arg-type]
    without = explain(incident, tmp_path)
    (tmp_path / "x.log").write_text("2026-01-01T00:00:00Z ERROR uvicorn.error: [Errno 98] x\n")
    found = explain(incident, tmp_path)
    assert (without.kind, found.kind) == ("exited", "startup_port")


def test_a_broken_rule_book_does_not_cost_the_incident(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(verdict, "judge", None)
    incident = make_incident()
    incident.cause = explain(incident, tmp_path)
    assert incident.cause is None
    assert "the cause of incident 0 was not looked for" in caplog.text
    assert "## Cause" not in format_summary(incident.shown())


def test_the_summary_says_the_cause_and_what_to_do(tmp_path: Path) -> None:
    write_record(tmp_path, json.dumps(RECORD))
    incident = make_incident()
    incident.cause = explain(incident, tmp_path)
    assert [one.issue for one in incident.cause.known_issues] == [40076]
    text = format_summary(incident.shown())
    cause = text[text.index("## Cause") : text.index("## Processes")]
    assert "(poison_request, supported)" in cause
    assert "- next: find it in requests/requests.jsonl" in cause
    assert "- a restart helps: unknown" in cause
    assert "- known upstream: sgl-project/sglang #40076" in cause


def test_an_idle_handler_has_loaded_neither_rules_nor_yaml() -> None:
    names = "('yaml', 'sglang_crashkit.judge')"
    code = f"import sys, sglang_crashkit.handler.server\nprint([one for one in sys.modules if one.startswith({names})])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


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
        spare = count_repeat(incident, folder, 2)
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
    count_repeat(incident, first, 3)
    # The first one had none.
    assert incident_with_core(repeated, second, keep=3) is None
    incident.processes[1].evidence.append(Evidence("cuda_core", "captured", path="../../core.cuda.1.9"))
    count_repeat(incident, first, 3)
    assert incident_with_core(repeated, second, keep=3) == first.id
    assert incident_with_core(repeated, second, keep=0) is None
    assert incident_with_core(repeated, NullFolder("full"), keep=3) is None
    repeated.processes[0].exit = Exit(None, "SIGBUS", "signal", "", "t")
    assert incident_with_core(repeated, second, keep=3) is None
    # WHEN it has made room for others
    repeated.processes[0].exit = incident.processes[0].exit
    first.discard()
    assert incident_with_core(repeated, second, keep=3) is None
