"""A real pip that works on a copy of a lane, whose packages a test may replace."""

from __future__ import annotations

import json
import os
import subprocess

from integration.scenario import run_kit
from lanelib.lanes import Lane
from lanelib.tools import tool


def pip(lane: Lane, *arguments: object) -> str:
    """Run pip on the lane, which has none of its own; return what it prints."""
    argv = [tool("python"), "-m", "pip", "--python", lane.python, "--disable-pip-version-check", *arguments]
    # To compile 3,000 files takes minutes beside other tests, and the copy is soon gone.
    env = os.environ | {"PIP_NO_COMPILE": "1"}
    done = subprocess.run(
        [str(part) for part in argv], check=False, capture_output=True, text=True, timeout=600, env=env
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def status_of(lane: Lane) -> dict[str, object]:
    """Return what the kit that runs this test says of the lane."""
    return dict(json.loads(run_kit("status", "--python", lane.python, "--json").stdout))
