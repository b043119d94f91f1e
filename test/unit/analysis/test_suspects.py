from __future__ import annotations

from typing import Any

import pytest

from sglang_crashkit.analysis.suspects import MAX_SUSPECTS, ONLY, suspects_of
from sglang_crashkit.model.incident import (
    Failure,
    Incident,
    InStep,
    LastSteps,
    ProcessReport,
    ServerInfo,
    Trigger,
    Verdict,
)

WAITED = "it had not been answered, and was in no step yet"
RECEIVED = f"{WAITED}; the rank had received it last"


def step(number: int, *rids: str, ended: bool = True) -> dict[str, Any]:
    return {"number": number, "ended": 1.0 if ended else None, "requests": [{"rid": rid} for rid in rids]}


def incident(
    *rids: str,
    last: list[dict[str, Any]] | None = None,
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
    made.processes = [rank]
    made.verdict = Verdict("exception", Failure(7, rank.title), "established", "It raised.")
    if message:
        made.note(1.0, "exception", pid=7, message=message)
    return made


def told(made: Incident, seen: dict[str, int] | None = None) -> list[tuple[str, str]]:
    return [(suspect.rid, suspect.level) for suspect in suspects_of(made, seen)]


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
        # An id that may stand in any text names nobody.
        (incident("1", "2", message="index 2"), {}, [("1", "unknown"), ("2", "unknown")]),
        # Results of the step before are processed while this one is computed.
        (incident("b", last=[step(8, "a", ended=False)]), {}, [("b", "unknown"), ("a", "unknown")]),
        (incident("HEALTH_CHECK_1", "a"), {}, [("a", "supported")]),
        (incident("HEALTH_CHECK_1"), {}, []),
        (incident(last=[step(8, "a")]), {}, []),
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
    (suspect,) = suspects_of(incident("a", last=[step(8, "b")]), {"a": 2})
    assert suspect.reasons == [
        "a request like it was suspected in 2 earlier incidents of the same fault",
        "it was the only request of the step that was not finished",
        "it was in none of the 1 steps before",
    ]


def test_what_is_not_listed_of_a_large_batch_is_no_first_time() -> None:
    (suspect,) = suspects_of(incident("a", last=[step(8, "b") | {"size": 9}]))
    assert suspect.reasons == ["it was the only request of the step that was not finished"]


def test_no_more_than_a_few_are_named() -> None:
    assert len(suspects_of(incident(*map(str, range(100))))) == MAX_SUSPECTS


def test_between_two_batches_nobody_is_known_to_be_alone() -> None:
    made = incident("a")
    assert made.processes[0].steps is not None
    made.processes[0].steps.last.append({"number": 10, "ended": None, "phase": "received", "requests": []})
    assert told(made) == [("a", "unknown")]


def between(*batch: str, received: tuple[str, ...] = (), role: str = "scheduler") -> Incident:
    """An incident of a rank that failed after it had received requests, and before it began a step with them."""
    made = incident(*batch)
    (rank,) = made.processes
    rank.role = role
    assert rank.steps is not None
    rank.steps.last.append(step(10, *received, ended=False) | {"phase": "received"})
    if received and not batch:
        rank.steps.in_step = InStep(10, "", "received", 0.1, len(received), list(received))
    return made


@pytest.mark.parametrize(
    ("made", "unanswered", "expected"),
    [
        (between(received=("a",)), ["a"], [("a", "supported", ONLY)]),
        (between(received=("a", "b")), ["b", "a"], [("a", "unknown", RECEIVED), ("b", "unknown", RECEIVED)]),
        (between("a", received=("b",)), ["b"], [("b", "unknown", RECEIVED), ("a", "unknown", "it was in the step")]),
        # One whose grammar is not there yet was received rounds ago.
        (between(), ["a"], [("a", "supported", ONLY)]),
        (between("a"), ["b"], [("b", "unknown", WAITED), ("a", "unknown", "it was in the step")]),
        (between(), ["b", "a"], [("b", "unknown", WAITED), ("a", "unknown", WAITED)]),
        # In a step it is one of that.
        (incident("a"), ["b"], [("a", "supported", "it was the only request of the step that was not finished")]),
        # The main process, or the detokenizer.
        (between(role="server"), ["a"], [("a", "unknown", "it had not been answered")]),
    ],
)
def test_outside_of_a_step_those_count_that_were_in_none(
    made: Incident, unanswered: list[str], expected: list[tuple[str, str, str]]
) -> None:
    found = suspects_of(made, unanswered=unanswered)
    assert [(one.rid, one.level, one.reasons[0]) for one in found] == expected


def test_without_steps_or_a_first_failure_nobody_is_suspected() -> None:
    made = incident("a")
    made.processes[0].steps = None
    assert suspects_of(made) == []
    assert [one.rid for one in suspects_of(made, unanswered=["a"])] == ["a"]
    made.verdict = None
    assert suspects_of(made, unanswered=["a"]) == []
