"""Documents of another form than any kit writes: a piece that does not fit costs that piece and nothing else."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_crashkit.model import lenient
from sglang_crashkit.model.incident import Incident, Suspect

REAL: Any = json.loads((Path(__file__).parent.parent / "incident/data/killed.json").read_text())


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
            place[path[-1]] = value
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
