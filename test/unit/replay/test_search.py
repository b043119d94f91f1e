from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_crashkit.replay.search import isolate, lowest, minimize, needed, shortest


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


@given(st.integers(0, 20_000), st.integers(1, 4), st.integers(0, 20_000))
def test_the_shortest_run_is_found_in_few_failures(before: int, size: int, after: int) -> None:
    failures = 0

    def first_failing(runs: Sequence[str]) -> int | None:
        nonlocal failures
        at = next((place for place, run in enumerate(runs) if "x" * size in run), None)
        failures += at is not None
        return at

    assert shortest("a" * before + "x" * size + "a" * after, first_failing) == "x" * size
    assert failures <= 10


def test_load_alone_is_kept_as_large_as_it_must_be() -> None:
    fault = Fault(lambda group: len(group) >= 6)
    found = isolate(range(40), [], fault.first_failing)
    assert found is not None
    assert len(found) == 6


@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_the_lowest_number_that_fails_is_found_in_few_starts(threshold: int, more: int) -> None:
    starts = 0

    def first_failing(numbers: Sequence[int]) -> int | None:
        nonlocal starts
        assert list(numbers) == sorted(numbers)
        at = next((place for place, number in enumerate(numbers) if number >= threshold), None)
        starts += at is not None
        return at

    assert lowest(threshold + more, first_failing) == threshold
    assert starts <= 6


@pytest.mark.parametrize(("value", "at_least", "expected"), [(4, 1, 1), (1, 1, 1), (0, 0, 0), (-5, 0, -5)])
def test_what_always_fails_is_reduced_to_nothing(value: int, at_least: int, expected: int) -> None:
    assert lowest(value, lambda numbers: 0 if numbers else None, at_least) == expected


@pytest.mark.parametrize("value", [7, 10**12])
def test_what_fails_by_itself_alone_is_kept(value: int) -> None:
    assert lowest(value, lambda _numbers: None) == value
