from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from sglang_crashkit.analysis.suspects import MAX_SUSPECTS, Asked, control_of, suspects_of
from sglang_crashkit.model import ALONE, IN_SEVERAL, ONLY
from sglang_crashkit.model.incident import (
    Exit,
    Failure,
    Incident,
    InStep,
    JournaledRequests,
    LastSteps,
    ProcessReport,
    ServerInfo,
    Trigger,
    Verdict,
)
from sglang_crashkit.model.step import Step, StepRequest

WAITED = "it had not been answered, and was in no step yet"
RECEIVED = f"{WAITED}; the rank had received it last"
IN_STEP, ALONE_AT = "it was in the step", "it was the only request of the step in which the rank failed"
ONLY_NEW = "it had not been answered, and was the only one in no step yet when the rank failed at taking in such"


def step(number: int, *rids: str, ended: bool = True) -> Step:
    requests = tuple(StepRequest(rid, 1, 1) for rid in rids)
    return Step(number, 0.5, 1.0 if ended else None, "forward_begun", "extend", requests, 0, 0)


def incident(
    *rids: str,
    last: list[Step] | None = None,
    size: int | None = None,
    message: str = "",
    kind: str = "killed",
) -> Incident:
    made = Incident("id", kind, Trigger("x", "t", 7, "x"), ServerInfo(1, "0.5.23", "0.1", "h"))
    rank = ProcessReport(7, "sglang::scheduler_TP0", "scheduler", {})
    in_step = (
        InStep(9, "extend", "forward_begun", 0.1, len(rids) if size is None else size, list(rids)) if rids else None
    )
    rank.steps = LastSteps([*(last or []), *([step(9, *rids, ended=False)] if rids else [])], in_step)
    # By the journals; another one has only its name.
    rank.steps.checks = frozenset({"HEALTH_CHECK_1"})
    made.processes = [rank]
    made.verdict = Verdict("exception", Failure(7, rank.title), "established", "It raised.")
    if message:
        made.note(1.0, "exception", pid=7, message=message)
    return made


def told(made: Incident, seen: dict[str, int] | None = None) -> list[tuple[str, str]]:
    return [(suspect.rid, suspect.level) for suspect in suspects_of(made, seen)[0]]


@pytest.mark.parametrize(
    ("made", "seen", "expected"),
    [
        (incident("a"), {}, [("a", "supported")]),
        (incident("a", "b"), {}, [("a", "unknown"), ("b", "unknown")]),
        (incident("a", "b", last=[step(8, "a")]), {}, [("b", "unknown"), ("a", "unknown")]),
        (incident("a", "b"), {"b": 1}, [("b", "supported"), ("a", "unknown")]),
        (
            incident("request-1", "request-2", message="bad request-2"),
            {},
            [("request-2", "supported"), ("request-1", "unknown")],
        ),
        # The whole id, not the beginning or the end of another one's.
        (
            incident("ordinary-1", "ordinary-12", "my-ordinary-12", message="ValueError: bad request 'ordinary-12'."),
            {},
            [("ordinary-12", "supported"), ("ordinary-1", "unknown"), ("my-ordinary-12", "unknown")],
        ),
        # An id that may stand in any text names no one.
        (incident("1", "2", message="index 2"), {}, [("1", "unknown"), ("2", "unknown")]),
        # Results of the step before are processed while this one is computed.
        (incident("b", last=[step(8, "a", ended=False)]), {}, [("b", "unknown"), ("a", "unknown")]),
        (incident("HEALTH_CHECK_1", "a"), {}, [("a", "supported")]),
        (incident("HEALTH_CHECK_1"), {}, []),
        (incident("HEALTH_CHECK_2"), {}, [("HEALTH_CHECK_2", "supported")]),
        # A check when nothing runs finds what they left.
        (incident(last=[step(7, "z"), step(8, "a", "HEALTH_CHECK_1"), step(9)]), {}, [("a", "unknown")]),
        (incident(last=[step(8, "a", "b")]), {"b": 1}, [("b", "supported"), ("a", "unknown")]),
        (incident(last=[step(8, "HEALTH_CHECK_1")]), {}, []),
        (incident(), {}, []),
        (incident("a", kind="peer_lost"), {}, []),
        # More than are named.
        (incident("a", size=300), {}, [("a", "unknown")]),
    ],
)
def test_the_requests_of_the_fatal_step_are_ranked(
    made: Incident, seen: dict[str, int], expected: list[tuple[str, str]]
) -> None:
    assert told(made, seen) == expected


def test_each_suspect_has_its_reasons() -> None:
    ((suspect,), _left_out) = suspects_of(incident("a", last=[step(8, "b")]), {"a": 2})
    assert suspect.reasons == [
        "a request like it was suspected in 2 earlier incidents of the same fault",
        "it was the only request of the step that was not finished",
        "it was in none of the 1 steps before",
    ]


@pytest.mark.parametrize(
    ("made", "listed", "left_out"),
    [
        (incident(*map(str, range(100))), MAX_SUSPECTS, 100 - MAX_SUSPECTS),
        (incident("a", "b", size=15), 2, 13),
        (incident("a", last=[replace(step(8, *"bcdefghi", ended=False), size=15)]), 9, 7),
        # Two decodes of the same large batch.
        (incident("a", size=100, last=[replace(step(8, "a", ended=False), size=100)]), 1, 99),
    ],
)
def test_of_many_a_few_are_named_and_the_others_counted(made: Incident, listed: int, left_out: int) -> None:
    found, more = suspects_of(made)
    assert (len(found), more) == (listed, left_out)


LAUNCHED = step(8, "b", "c", ended=False)


# While the step was launched, or its results were processed.
@pytest.mark.parametrize("phase", ["forward_begun", "forward_done"])
@pytest.mark.parametrize(
    ("message", "signal", "expected"),
    [
        ("RuntimeError: k not in range", None, [("a", "supported", ALONE_AT)]),
        ("torch.OutOfMemoryError: CUDA out of memory.", None, [("a", "supported", ALONE_AT)]),
        ("", "SIGSEGV", [("a", "supported", ALONE_AT)]),
        # A kernel of the step before may have failed; a watchdog's thread, or a GPU that hangs.
        ("RuntimeError: CUDA error: an illegal memory access", None, None),
        ("torch.AcceleratorError: device-side assert", None, None),
        ("", "SIGABRT", None),
        ("", None, None),
    ],
)
def test_of_two_unfinished_steps_the_one_at_hand_counts(
    message: str, signal: str | None, phase: str, expected: list[tuple[str, str, str]] | None
) -> None:
    made = incident("a", last=[LAUNCHED], message=message)
    (rank,) = made.processes
    rank.steps.in_step.phase = phase
    rank.exit = Exit(None, signal, "signal", "", "") if signal else None
    found = [(one.rid, one.level, one.reasons[0]) for one in suspects_of(made)[0]]
    assert found == (expected or [(rid, "unknown", IN_SEVERAL) for rid in "abc"])


def test_the_older_step_counts_where_its_results_were_read() -> None:
    made = incident("a", message="IndexError: x")
    made.processes[0].steps.last.append(replace(step(10, "b", "c", ended=False), phase="forward_begun"))
    assert told(made) == [("a", "supported")]
    # Before the next one is made: where the scheduler does not overlap them.
    made.processes[0].steps.last[-1] = replace(step(10, ended=False), phase="received")
    assert told(made) == [("a", "unknown")]
    made.processes[0].steps.in_step.phase = "forward_done"
    assert told(made) == [("a", "supported")]


@pytest.mark.parametrize(
    ("end", "state", "raised", "level"),
    [
        (Exit(None, "SIGKILL", "signal", "", ""), "", "", "unknown"),
        (Exit(None, "SIGTERM", "signal", "", ""), "", "", "unknown"),
        (None, "T (stopped)", "", "unknown"),
        (None, "t (tracing stop)", "", "unknown"),
        (None, "S (sleeping)", "", "unknown"),
        # A request may be long enough for that.
        (Exit(None, "SIGKILL", "oom_kill", "", ""), "", "", "supported"),
        # So ends one that raised.
        (Exit(None, "SIGKILL", "signal", "", ""), "", "ValueError: x", "supported"),
        (Exit(None, "SIGSEGV", "signal", "", ""), "", "", "supported"),
        (None, "R (running)", "", "supported"),
    ],
)
def test_what_somebody_else_did_is_no_request_s_doing(end: Exit | None, state: str, raised: str, level: str) -> None:
    made = incident("a", message=raised)
    made.processes[0].exit, made.processes[0].state = end, {"State": state, "wchan": "do_freezer_trap"}
    made.requests.journal = JournaledRequests("requests/requests.jsonl", unfinished=1)
    assert told(made, {"a": 1}) == [("a", "supported" if level == "supported" else "unknown")]
    assert ALONE in suspects_of(made)[0][0].reasons or level == "unknown"


def between(
    *batch: str,
    received: tuple[str, ...] = (),
    role: str = "scheduler",
    unfinished: int = 1,
    takes_in: bool = False,
    **journal: Any,
) -> Incident:
    """An incident of a rank that failed after it had received requests, and before it began a step with them."""
    made = incident(*batch, message="ValueError: x" if takes_in else "")
    (rank,) = made.processes
    rank.role = role
    rank.doing = ["from_schedule_batch (sglang/x.py:1)", "prepare_for_extend (sglang/y.py:2)"] if takes_in else []
    made.processes[0].steps.last.append(replace(step(10, *received, ended=False), phase="received"))
    if received and not batch:
        made.processes[0].steps.in_step = InStep(10, "", "received", 0.1, len(received), list(received))
    made.requests.journal = JournaledRequests("requests/requests.jsonl", unfinished=unfinished, **journal)
    return made


@pytest.mark.parametrize(
    ("made", "unanswered", "expected"),
    [
        (between(received=("a",)), ["a"], [("a", "supported", ONLY)]),
        # Others run between two steps, or may.
        (between(received=("a",), unfinished=2), ["a"], [("a", "unknown", RECEIVED)]),
        (between(received=("a",), left_out=1), ["a"], [("a", "unknown", RECEIVED)]),
        (between(received=("a",), reason="one was dropped"), ["a"], [("a", "unknown", RECEIVED)]),
        # Where the rank took in new ones, those that run are not it.
        (between(unfinished=2, takes_in=True), ["a"], [("a", "supported", ONLY_NEW)]),
        (
            between("r", received=("a",), unfinished=2, takes_in=True),
            ["a"],
            [("a", "supported", ONLY_NEW), ("r", "unknown", IN_SEVERAL)],
        ),
        (between(unfinished=3, takes_in=True), ["b", "a"], [("b", "unknown", WAITED), ("a", "unknown", WAITED)]),
        (between(unfinished=2, takes_in=True, left_out=1), ["a"], [("a", "unknown", WAITED)]),
        (between(received=("a", "b")), ["b", "a"], [("a", "unknown", RECEIVED), ("b", "unknown", RECEIVED)]),
        # It was aborted, and is in its step still.
        (between("a", received=("b",)), ["b"], [("b", "unknown", RECEIVED), ("a", "unknown", IN_SEVERAL)]),
        # One whose grammar is not there yet was received rounds ago.
        (between(), ["a"], [("a", "supported", ONLY)]),
        (between("a", unfinished=2), ["b"], [("b", "unknown", WAITED), ("a", "unknown", IN_STEP)]),
        (between(unfinished=2), ["b", "a"], [("b", "unknown", WAITED), ("a", "unknown", WAITED)]),
        # In a step it is one of that.
        (incident("a"), ["b"], [("a", "supported", ALONE)]),
        # The main process, or the detokenizer.
        (between(role="server"), ["a"], [("a", "unknown", "it had not been answered")]),
    ],
)
def test_outside_of_a_step_those_count_that_were_in_none(
    made: Incident, unanswered: list[str], expected: list[tuple[str, str, str]]
) -> None:
    found, left_out = suspects_of(made, unanswered=unanswered)
    assert [(one.rid, one.level, one.reasons[0]) for one in found] == expected
    assert left_out == 0


SEGFAULT, OUT_OF_MEMORY = Exit(None, "SIGSEGV", "signal", "", ""), Exit(None, "SIGKILL", "oom_kill", "", "")
#: By whether another thread failed, which faulthandler tells where it can, and how many were under way.
BESIDE = [
    (SEGFAULT, False, 2, [("a", "unknown", IN_STEP), ("b", "unknown", WAITED)]),
    # The scheduler's own.
    (SEGFAULT, True, 2, [("a", "supported", ALONE)]),
    (SEGFAULT, None, 2, [("a", "supported", ALONE)]),
    # One that waits may have taken the memory.
    (OUT_OF_MEMORY, None, 2, [("a", "unknown", IN_STEP), ("b", "unknown", WAITED)]),
]


@pytest.mark.parametrize(("end", "in_main", "unfinished", "expected"), BESIDE)
def test_those_that_wait_count_where_no_step_need_be(
    end: Exit | None, in_main: bool | None, unfinished: int, expected: list[tuple[str, str, str]]
) -> None:
    made = incident("a")
    (rank,) = made.processes
    rank.exit, rank.hit_in_main = end, in_main
    made.requests.journal = JournaledRequests("requests/requests.jsonl", unfinished=unfinished)
    found = [(one.rid, one.level, one.reasons[0]) for one in suspects_of(made, unanswered=["b"])[0]]
    assert found == expected


@pytest.mark.parametrize(("end", "in_main"), [(SEGFAULT, False), (OUT_OF_MEMORY, None)])
@pytest.mark.parametrize(("lost", "level"), [(0, "supported"), (1, "unknown")])
def test_a_request_is_alone_where_no_other_was_under_way(
    end: Exit, in_main: bool | None, lost: int, level: str
) -> None:
    made = incident("a")
    made.processes[0].exit, made.processes[0].hit_in_main = end, in_main
    made.requests.journal = JournaledRequests("requests/requests.jsonl", unfinished=1, lost=lost)
    assert told(made) == [("a", level)]


def test_those_that_were_answered_count_only_where_nobody_waits() -> None:
    made = incident(last=[replace(step(8, "a"), size=3)])
    found, left_out = suspects_of(made)
    assert [(one.rid, one.reasons) for one in found] == [("a", ["it was in the last step, and no step was unfinished"])]
    assert left_out == 2
    assert [one.rid for one in suspects_of(made, unanswered=["b"])[0]] == ["b"]
    # No request ended an idle one, whatever did.
    made.processes[0].exit = Exit(None, "SIGTERM", "signal", "", "")
    assert suspects_of(made) == ([], 0)
    made.processes[0].exit, made.verdict = None, Verdict("hang", Failure(7, "x"), "supported", "It hangs.")
    assert suspects_of(made) == ([], 0)


def test_without_steps_or_a_first_failure_nobody_is_suspected() -> None:
    made = incident("a")
    made.processes[0].steps = None
    assert suspects_of(made) == ([], 0)
    assert [one.rid for one in suspects_of(made, unanswered=["a"])[0]] == ["a"]
    made.verdict = None
    assert suspects_of(made, unanswered=["a"]) == ([], 0)


def asks(*names: str, content: str = "") -> Asked:
    return Asked(content, frozenset(names))


ORDINARY = {f"r{number}": asks("top_k") for number in range(90)}


@pytest.mark.parametrize(
    ("odd", "reason"),
    [
        ({"odd": asks("min_new_tokens", "top_k")}, "no other one of the step asks for min_new_tokens"),
        # The same request, sent again, or answered several times.
        (dict.fromkeys(("odd", "again"), asks("n", "top_k", content="x")), "no other one of the step asks for n"),
        # Two that ask for the same are not unusual.
        ({"odd": asks("n", "top_k", content="x"), "again": asks("n", "top_k", content="y")}, ""),
    ],
)
def test_of_a_large_batch_the_unusual_one_is_first(odd: dict[str, Asked], reason: str) -> None:
    asked = ORDINARY | odd
    made = incident(*list(asked)[:64], size=len(asked))
    made.processes[0].steps.rids = {9: list(asked)}
    found, left_out = suspects_of(made, None, asked)
    assert (len(found), left_out) == (MAX_SUSPECTS, len(asked) - MAX_SUSPECTS)
    told = {one.rid: " ".join(one.reasons) for one in found}
    assert {rid for rid in told if reason and reason in told[rid]} == (odd.keys() if reason else set())
    assert (next(iter(told)) in odd) is bool(reason)


@pytest.mark.parametrize("unanswered", [0, 20_000])
def test_judging_a_large_batch_takes_no_square_of_it(unanswered: int) -> None:
    rids = [f"r{number}" for number in range(20_000)]
    asked = {rid: asks(rid, "top_k") for rid in rids}
    made = between(*rids) if unanswered else incident("r0", size=len(rids))
    made.processes[0].steps.last.insert(0, step(8))
    made.processes[0].steps.rids = {9: rids}
    began = time.process_time()
    found, left_out = suspects_of(made, None, asked, [f"w{number}" for number in range(unanswered)])
    assert time.process_time() - began < 4.0
    assert len(found) + left_out == len(rids) + unanswered


def test_of_a_large_batch_the_new_one_is_known() -> None:
    rids = [f"r{number}" for number in range(100)]
    made = incident(*rids[:64], size=100, last=[replace(step(8, *rids[:8]), size=99)])
    made.processes[0].steps.rids = {8: rids[:99], 9: rids}
    assert suspects_of(made)[0][0].rid == "r99"
    # The incident itself has the first few.
    (told,) = made.to_json()["processes"]
    assert (len(told["steps"]["in_step"]["rids"]), "rids" in told["steps"]) == (64, False)


SEARCH = ["search (re/__init__.py:176)", "_check_str_based_finish (sglang/srt/managers/schedule_batch.py:1940)"]
LOGPROBS = ["get_top_logprobs (sglang/srt/layers/logits_processor.py:900)", "forward (model.py:1)"]


@pytest.mark.parametrize(
    ("frames", "message", "asked", "level", "told"),
    [
        (
            SEARCH,
            "",
            {"a": (), "b": ("sampling_params.stop_regex",)},
            "supported",
            "it alone asks for stop_regex, which the rank was at (_check_str_based_finish)",
        ),
        # Somebody else asks for that, too.
        (SEARCH, "", dict.fromkeys("ab", ("sampling_params.stop_regex",)), "unknown", "in the step"),
        (["forward (model.py:1)"], "", {"a": (), "b": ("return_logprob",)}, "unknown", "in the step"),
        # A kernel of before is reported anywhere.
        (LOGPROBS, "CUDA error: an illegal access", {"a": (), "b": ("return_logprob",)}, "unknown", "in the step"),
        # Far out in the stack.
        ([*["f (x.py:1)"] * 8, *SEARCH], "", {"a": (), "b": ("sampling_params.stop",)}, "unknown", "in the step"),
    ],
)
def test_asking_alone_for_what_failed_is_suspicious(
    frames: list[str], message: str, asked: dict[str, tuple[str, ...]], level: str, told: str
) -> None:
    made = incident("a", "b", message=message)
    made.processes[0].doing = frames
    found = {one.rid: one for one in suspects_of(made, None, {rid: asks(*asked[rid]) for rid in asked})[0]}
    assert (found["b"].level, found["a"].level) == (level, "unknown")
    assert told in " ".join(found["b"].reasons)


#: What the frames of a rank tell of requests.
FRAMES: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "request_frames.yaml").read_text())


@pytest.mark.parametrize(("parameter", "frame", "is_about"), FRAMES["parameters"])
def test_what_each_batch_passes_through_is_about_no_parameter(parameter: str, frame: str, is_about: bool) -> None:
    made = incident("a", "b")
    made.processes[0].doing = [frame, "event_loop_overlap (sglang/srt/managers/scheduler.py:1)"]
    found = {one.rid: one.level for one in suspects_of(made, None, {"a": asks(), "b": asks(parameter)})[0]}
    assert found == {"a": "unknown", "b": "supported" if is_about else "unknown"}


# -- control requests

UPDATE = [
    "load_model (sglang/srt/model_loader/loader.py:9)",
    "update_weights_from_disk (sglang/srt/managers/weight_updater.py:80)",
    "__call__ (sglang/utils.py:499)",
    "process_input_requests (sglang/srt/managers/scheduler.py:2257)",
]


@pytest.mark.parametrize(("frames", "expected"), FRAMES["control"])
def test_frames_tell_what_control_request_is_handled(frames: list[str], expected: str | None) -> None:
    rank = ProcessReport(7, "sglang::scheduler", "scheduler", {}, doing=frames, control="noted")
    # What is not to be seen, the record tells.
    assert control_of(rank) == ("noted" if expected is None else expected)


@pytest.mark.parametrize(
    ("raised", "expected"),
    # The other exception came from elsewhere in that round.
    [(UPDATE, "update_weights_from_disk"), (["forward (model.py:1)"], "")],
)
def test_what_it_raised_through_tells_more_than_the_record(raised: list[str], expected: str) -> None:
    rank = ProcessReport(7, "sglang::scheduler", "scheduler", {}, raised_through=raised, control="flush_cache")
    assert control_of(rank) == expected


ONLY_RECEIVED = replace(step(9, "new", ended=False), phase="received")


@pytest.mark.parametrize(
    ("frames", "last", "message", "expected"),
    [
        (UPDATE, [ONLY_RECEIVED], "ValueError: no such weights", []),
        ([], [replace(ONLY_RECEIVED, requests=())], "", []),
        # It may have been taking in the other one.
        ([], [ONLY_RECEIVED], "", ["new", "waits"]),
        (UPDATE, [ONLY_RECEIVED], "torch.AcceleratorError: CUDA error: an illegal memory access", ["waits", "new"]),
    ],
)
def test_at_a_control_request_no_other_is_suspected(
    frames: list[str], last: list[dict[str, Any]], message: str, expected: list[str]
) -> None:
    made = incident(last=last, message=message)
    rank = made.processes[0]
    rank.control, rank.raised_through = "update_weights_from_disk", frames
    assert sorted(one.rid for one in suspects_of(made, unanswered=["waits"])[0]) == sorted(expected)
