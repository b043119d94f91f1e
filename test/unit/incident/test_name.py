from __future__ import annotations

import random

import pytest

from sglang_crashkit.incident.name import IncidentName, is_finished, parse_name


def test_a_name_begins_with_the_time_so_that_it_sorts() -> None:
    name = IncidentName(1_700_000_000.25, "failed_start", "0123abcd")
    assert str(name) == "20231114T221320.250Z-failed_start-0123abcd"
    assert parse_name(str(name)) == name
    assert parse_name(f".partial-{name}") == name


def test_every_time_is_told_to_the_millisecond() -> None:
    chance = random.Random(1)
    for _ in range(1000):
        seconds = chance.uniform(0, 4e9)
        found = parse_name(str(IncidentName(seconds, "killed", "0123abcd")))
        assert found is not None
        assert 0 <= seconds - found.seconds < 0.00101


@pytest.mark.parametrize(
    "name",
    [
        "",
        "x",
        "faults.json",
        ".spool-1-2",
        "20231114T221320.250Z-killed-0123abc",
        "20239914T221320.250Z-killed-0123abcd",
    ],
)
def test_other_names_are_none(name: str) -> None:
    assert parse_name(name) is None
    assert not is_finished(name)


def test_a_mark_tells_what_is_not_finished() -> None:
    name = str(IncidentName(1.0, "killed", "0123abcd"))
    assert is_finished(name)
    assert not is_finished(f".partial-{name}")
    assert not is_finished(f".removing-{name}")
