"""A healthy server with the kit beside one without it: what is observed, and the observer's end, cannot be seen."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from integration.no_harm.soak import soak
from lanelib.lanes import ensure_lane

RELEASE = "0.5.23"
#: Of a plain run, and of the matrix; ``benchmarks/soak`` goes on for an hour.
MINUTES = float(os.environ.get("SGLANG_CRASHKIT_TEST_SOAK_MINUTES", "2"))
MANY_MINUTES = max(10.0, MINUTES)
#: Beside other servers two of them take minutes to start.
START_S = 600.0

pytestmark = [pytest.mark.live, pytest.mark.timeout(60 * MANY_MINUTES + START_S + 300)]


@pytest.mark.parametrize(
    "minutes", [pytest.param(MINUTES, id="short"), pytest.param(MANY_MINUTES, marks=pytest.mark.matrix, id="long")]
)
def test_a_healthy_server_does_the_same_without_the_kit(tmp_path: Path, minutes: float) -> None:
    lanes = [ensure_lane(RELEASE, pristine=pristine) for pristine in (False, True)]
    outcome = soak(*lanes, tmp_path, seconds=60 * minutes)
    assert outcome.problems == [], outcome.table
    # It was disturbed in every way.
    assert len(outcome.actions) == 7
    assert {"hang", "snapshot"} <= set(outcome.kinds)
