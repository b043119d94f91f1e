from __future__ import annotations

import re

import pytest

from lanelib import lanes
from lanelib.commands import LaneError
from lanelib.paths import RECIPES

LOCKS = sorted(RECIPES.glob("*.lock"))
PIN = re.compile(r"[a-z0-9][a-z0-9._-]*==[\w.+!]+( ; [\w.' <>=!]+)?")


@pytest.mark.parametrize("path", LOCKS, ids=lambda path: path.name)
def test_a_lock_holds_exact_versions_and_no_addresses(path):
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]

    assert [line for line in lines if not PIN.fullmatch(line)] == []


@pytest.mark.parametrize("release", ["0.5.9", "0.5.12.post1", "0.5.23"])
def test_a_lane_lock_names_its_release_and_the_extras(release):
    lines = lanes.lock_path(release).read_text().splitlines()

    assert f"sglang=={release}" in lines
    assert {line.split("==")[0] for line in lines} >= {*lanes.EXTRAS, "psutil", "py-spy", "setproctitle"}


@pytest.mark.parametrize("text", ["", "latest", "0.5", "../0.5.9", "0.5.9 ", "v0.5.9"])
def test_check_release_refuses_what_is_no_release(text):
    with pytest.raises(LaneError, match="is not an SGLang release") as caught:
        lanes.check_release(text)

    assert caught.value.exit_code == 2
