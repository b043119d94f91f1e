"""A request of SGLang's own class is recognised again by what the journal has of it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from integration.scenario import RELEASES
from lanelib.lanes import ensure_lane

pytestmark = [pytest.mark.live, pytest.mark.matrix, pytest.mark.timeout(600)]

LONG = 300.0


@pytest.mark.parametrize("release", RELEASES)
def test_each_that_comes_again_is_recognised(release: str) -> None:
    lane = ensure_lane(release)
    done = subprocess.run(
        [lane.python, Path(__file__).with_name("same_request.py")],
        env=os.environ | lane.serve_env(),
        capture_output=True,
        text=True,
        check=False,
        timeout=LONG,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout.split()[-1]) > 1000
