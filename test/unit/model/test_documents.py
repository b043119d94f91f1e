"""Documents of another form than any kit writes: refused with one reason, or read without what does not fit."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_crashkit.model import lenient
from sglang_crashkit.model.incident import Incident, Suspect
from sglang_crashkit.model.sample import Frame, Sample, Thread
from sglang_crashkit.model.snapshot import NodeSnapshot, Problem, from_json, parse
from sglang_crashkit.model.step import Step, StepRequest
from unit.support.stored import changed, golden

LOOP = Frame("event_loop_normal", "sglang/srt/managers/scheduler.py", 1200)
MAIN = Frame("run_scheduler_process", "sglang/srt/managers/scheduler.py", 3000)
FUTEX = Frame("__futex_abstimed_wait_common", "libc.so.6", 0)
THREAD = Thread("MainThread", 10, active=True, owns_gil=False, frames=(LOOP, MAIN))
RANK = Sample(
    host="n1",
    pid=10,
    start_ticks=77,
    title="sglang::scheduler_TP0",
    role="scheduler",
    ranks={"tp": 0},
    time=5.5,
    server=9,
    rendezvous="10.0.0.1:5000",
    side="decode",
    state="S",
    wchan="futex_wait_queue",
    tracer=3,
    cpu_secs=1.25,
    threads=(THREAD, replace(THREAD, name="", native_id=None, active=False, owns_gil=True)),
    native=(replace(THREAD, frames=(FUTEX, LOOP, MAIN)),),
    kernels=("flash_fwd_kernel",),
)
NODE = NodeSnapshot("n1", 5.0, (RANK, replace(RANK, pid=11)), (Problem("pid 12", "it ended", "look again"),))


def test_a_snapshot_survives_its_json() -> None:
    text = json.dumps(NODE.to_json())
    assert parse(text) == NODE
    assert parse(text.encode()) == NODE


def test_a_newer_snapshot_is_refused_with_both_versions() -> None:
    with pytest.raises(ValueError, match="schema_version 2, this kit reads up to 1"):
        from_json({**NODE.to_json(), "schema_version": 2})


def other(path: str, value: object) -> Any:
    """Return the snapshot with another value at a path."""
    return changed(NODE.to_json(), path, value)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({}, "missing required field `schema_version`"),
        (other("frames.0", ["f", "x.py"]), "Expected `array` of length 3, got 2"),
        (other("processes", {}), "Expected `array`, got `object`"),
        (other("processes.0.pid", True), "Expected `int`, got `bool`"),
        (other("processes.0.cpu_secs", 10**400), "Number out of range"),
        (other("processes.0.cpu_secs", float("inf")), "not JSON compliant"),
        (other("processes.0.side", "router"), "Invalid enum value 'router'"),
        (other("processes.0.threads.0.4", 2), "there are numbers from 0 to 2 in a table of 2"),
        (other("processes.0.threads.0.1", "10"), "Expected `int | null`, got `str`"),
        (other("processes.0.threads.0", ["x"]), "Expected `array` of length 5, got 1"),
        (other("stacks.0", [-1]), "there are numbers from -1 to -1 in a table of 3"),
    ],
)
def test_what_is_no_snapshot_is_refused_with_one_reason(document: Any, message: str) -> None:
    with pytest.raises(ValueError, match=r"^not a snapshot: ") as caught:
        from_json(document)
    assert message in str(caught.value)


@pytest.mark.parametrize("text", ["", "Error", b"\xff\xfe\x00", "[" * 100_000])
def test_what_is_no_json_is_refused(text: str | bytes) -> None:
    with pytest.raises(ValueError, match=r"^not a snapshot: "):
        parse(text)


def test_text_that_no_file_takes_is_escaped() -> None:
    node = parse(json.dumps(other("processes.0.title", "\ud800")))
    assert node.processes[0].title == "\\ud800"
    node = parse(json.dumps(other("processes.0.threads.0.0", "\ud800")))
    assert node.processes[0].threads[0].name == "\\ud800"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
)


PLACES_IN_NODE = [*NODE.to_json(), *(f"processes.0.{name}" for name in NODE.to_json()["processes"][0])]


@given(st.sampled_from(PLACES_IN_NODE), JSON)
def test_any_value_in_any_place_is_read_or_refused(place: str, value: Any) -> None:
    with contextlib.suppress(ValueError):
        from_json(other(place, value))


STEP = Step(
    7,
    1.5,
    None,
    "forward_begun",
    "mixed",
    (StepRequest("ü\n", 3, 9),),
    1,
    3,
    decisions={"abort": 2},
)


@pytest.mark.parametrize("step", [STEP, replace(STEP, ended=2.0, agreed_hash=3, requests=(), decisions={})])
def test_a_step_is_read_as_it_was_written(step: Step) -> None:
    assert Step.from_json(json.loads(json.dumps(step.to_json()))) == step


@pytest.mark.parametrize("changes", [{"number": "7"}, {"ended": float("inf")}, {"requests": [1]}, {"phase": 1}])
def test_what_is_no_step_is_an_error(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="not a step"):
        Step.from_json(json.loads(json.dumps(STEP.to_json())) | changes)


# -- a document that is read in part


REAL: Any = golden("killed")


def places_in(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    for name, one in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places_in(one, (*path, name))


PLACES = [path for path in places_in(REAL) if path]
#: Values of every type that JSON has.
ANYTHING = st.sampled_from([None, True, 3, 2.5, 1 << 80, "x", "\udcff", [], [3, {}], {}, {"pid": []}])


@given(st.lists(st.tuples(st.sampled_from(PLACES), ANYTHING), max_size=8))
def test_a_document_with_any_values_is_read_and_written(changes: list[tuple[tuple[Any, ...], Any]]) -> None:
    document = copy.deepcopy(REAL)
    for path, value in changes:
        place = document
        try:
            for name in path[:-1]:
                place = place[name]
            place[path[-1]] = copy.deepcopy(value)  # the drawn one would be put into itself
        except (LookupError, TypeError):
            continue
    again = Incident.of(json.loads(json.dumps(Incident.of(document).to_json())))
    assert again == Incident.of(document).shown()


@pytest.mark.parametrize("value", [None, 3, "x", []])
def test_what_is_no_document_is_an_empty_incident(value: object) -> None:
    assert Incident.of(value) == Incident.of({})


def test_a_piece_that_does_not_fit_costs_that_piece_alone() -> None:
    suspects = [{"rid": 7, "level": "certain", "reasons": [1, "it was alone"]}, 3, {"level": "unknown"}]
    assert lenient.read(suspects, list[Suspect]) == [
        Suspect("7", "certain", ["it was alone"]),  # type: ignore[arg-type]
        Suspect("", "unknown", []),
    ]


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 10**400, -(10**30)])
def test_a_number_that_nothing_can_be_done_with_is_passed_over(value: float) -> None:
    document = REAL | {"server": REAL["server"] | {"pid": value}, "environment": {"uptime_secs": value}}
    found = Incident.of(document)
    assert (found.server.pid, found.surroundings.uptime_secs) == (0, None)
