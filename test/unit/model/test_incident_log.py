"""The log of an incident: what was written of it by then can be read, wherever its writer was cut off."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from incident_schema import assert_fits
from sglang_crashkit.model.incident import Incident
from sglang_crashkit.model.incident_log import IncidentLog, reduce
from unit.support.stored import DATA

REAL = [json.loads(path.read_text()) for path in sorted(DATA.glob("*.json"))]


def growing(document: dict[str, Any], orders: list[float]) -> list[Incident]:
    """Return an incident as it grows: its processes, events and parts come in some order, and change on the way."""
    whole = Incident.of(document)
    states = []
    for place, order in enumerate(sorted(orders)):
        state = Incident.of(document)
        state.processes = state.processes[: int(order * len(state.processes)) + 1]
        state.timeline = state.timeline[: int(order * len(state.timeline))]
        for process in state.processes:
            process.evidence = process.evidence[: int(order * len(process.evidence))]
            process.exit = process.exit if order > 0.5 else None
        state.verdict = whole.verdict if place % 2 else None
        state.remarks = [f"remark {place}"] if place else []
        states.append(state)
    return [*states, whole]


@given(
    st.sampled_from(REAL),
    st.lists(st.floats(0.0, 1.0), min_size=1, max_size=5),
    st.integers(0, 5),
    st.floats(0.0, 1.0, exclude_max=True),
)
def test_a_log_that_is_cut_off_tells_what_was_known(
    document: dict[str, Any], orders: list[float], cut: int, torn: float
) -> None:
    log, lines, states = IncidentLog(), list[str](), growing(document, orders)
    ends = []
    for state in states:
        lines += log.lines(state)
        log.keep()
        ends.append(len(lines))
    place = min(cut, len(states) - 1)
    told = [line.encode() for line in lines[: ends[place]]]
    assert reduce(told).to_json() == states[place].to_json() | {"complete": False}
    # The next line, which did not come to its end.
    more = lines[ends[place] :][:1]
    assert reduce([*told, *(line[: int(torn * len(line))].encode() for line in more)]) == reduce(told)
    assert_fits(json.loads(json.dumps(reduce(told).to_json())))


def test_nothing_new_is_no_line() -> None:
    log, incident = IncidentLog(), Incident.of(REAL[0])
    lines = log.lines(incident)
    # They could not be written.
    assert log.lines(incident) == lines != []
    log.keep()
    assert log.lines(incident) == []


@pytest.mark.parametrize("line", [b"", b"{", b"[1]", b'{"a": 1, "b": 2}', b'"x"', b"\xff", b'{"processes": 5}'])
def test_what_is_no_line_costs_no_other(line: bytes) -> None:
    lines = [told.encode() for told in IncidentLog().lines(Incident.of(REAL[0]))]
    assert reduce([*lines[:3], line, *lines[3:]]) == reduce(lines)
