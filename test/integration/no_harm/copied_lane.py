"""A copy of a lane, whose packages a test may replace; and a real pip that works on it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
from collections.abc import Iterator

from integration.scenario import run_kit
from lanelib.lanes import Lane, ensure_lane
from lanelib.paths import LANES
from lanelib.tools import tool


@contextlib.contextmanager
def copied_lane(release: str) -> Iterator[Lane]:
    """Make a copy of hard links, which pip unlinks and never writes to, and remove it at the end."""
    original = ensure_lane(release)
    root = LANES / f".{release}-copy-{os.getpid()}"
    try:
        subprocess.run(["cp", "-al", original.root, root], check=True, timeout=300)
        yield dataclasses.replace(original, root=root)
    finally:
        subprocess.run(["rm", "-rf", root], check=True, timeout=300)


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
