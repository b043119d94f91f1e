"""All that is gathered as an incident is finished shares what is left of the incident's time."""

from __future__ import annotations

import pytest

from sglang_crashkit.handler.collectors.deadline import gathering_deadline, secs_before, share_of


@pytest.mark.parametrize(
    ("budget", "now", "deadline"),
    [
        (20.0, 101.0, 107.0),
        (20.0, 117.0, 120.0),
        # Somebody finished it late.
        (20.0, 140.0, 143.0),
        (4.0, 103.0, 104.0),
    ],
)
def test_gathering_ends_with_the_incident(budget: float, now: float, deadline: float) -> None:
    assert gathering_deadline(100.0, budget, now) == deadline


def test_an_incident_that_waited_as_long_as_it_may_gathers_within_its_budget() -> None:
    for budget in (1.0, 5.0, 20.0, 300.0):
        assert gathering_deadline(0.0, budget, secs_before(budget)) <= budget


def test_each_part_leaves_time_for_the_next() -> None:
    deadline, now = 6.0, 0.0
    for _part in range(4):
        now = share_of(deadline, now)
    assert now < deadline
    assert share_of(deadline, 7.0) == 7.0
