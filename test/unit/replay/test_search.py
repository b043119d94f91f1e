from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_crashkit.replay.search import isolate, minimize, needed


class Fault:
    """Fails on groups that a rule names, and counts the servers that it takes."""

    def __init__(self, fails: Callable[[set[int]], bool]) -> None:
        self._fails = fails
        self.starts = 0
        self._is_alive = False

    def first_failing(self, groups: Sequence[Sequence[int]]) -> int | None:
        for number, group in enumerate(groups):
            self.starts += not self._is_alive
            self._is_alive = not self._fails(set(group))
            if not self._is_alive:
                return number
        return None


@pytest.mark.parametrize(
    ("guilty", "suspects", "starts"),
    [({137}, [], 2), ({0}, [], 2), ({199}, [], 2), ({137}, [5, 137], 1), ({137}, [5, 6], 2)],
)
def test_one_guilty_of_two_hundred_costs_a_start_or_two(guilty: set[int], suspects: list[int], starts: int) -> None:
    fault = Fault(lambda group: guilty <= group)
    assert isolate(range(200), suspects, fault.first_failing) == sorted(guilty)
    assert fault.starts == starts


def test_two_that_must_come_together_are_found() -> None:
    fault = Fault(lambda group: {3, 150} <= group)
    assert isolate(range(200), [], fault.first_failing) == [3, 150]


def test_what_never_fails_is_not_found() -> None:
    fault = Fault(lambda _group: False)
    assert isolate(range(20), [4], fault.first_failing) is None
    assert needed(range(5), fault.first_failing) is None
    assert fault.starts == 1


@given(st.sets(st.integers(0, 19), max_size=4))
def test_what_is_needed_is_exactly_what_it_takes(guilty: set[int]) -> None:
    fault = Fault(lambda group: guilty <= group)
    found = needed(range(20), fault.first_failing)
    assert found is not None
    assert set(found) == guilty
    assert fault.starts <= len(guilty) + 1


@given(st.sets(st.integers(0, 30), min_size=1, max_size=5))
def test_a_minimal_part_loses_its_fault_with_any_of_it(guilty: set[int]) -> None:
    fault = Fault(lambda group: guilty <= group)
    assert set(minimize(range(31), fault.first_failing)) == guilty
    assert set(isolate(range(31), [], fault.first_failing) or ()) == guilty


def test_load_alone_is_kept_as_large_as_it_must_be() -> None:
    fault = Fault(lambda group: len(group) >= 6)
    found = isolate(range(40), [], fault.first_failing)
    assert found is not None
    assert len(found) == 6
