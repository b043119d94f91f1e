"""The command that ``sglang-crashkit wheel`` prints, run by a real pip on a whole environment of the newest release."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from integration.no_harm.lane_pip import pip, status_of
from lanelib.lanes import Lane, copied, ensure_lane
from sglang_crashkit import __version__
from sglang_crashkit.installer.patches import PatchTree, find_patch_root, load_lock
from sglang_crashkit.installer.wheel import build_kit_wheel, build_patched_wheel, find_wheel, install_command

pytestmark = [pytest.mark.live, pytest.mark.matrix, pytest.mark.wheels, pytest.mark.timeout(1200)]

RELEASE = "0.5.23"


@pytest.fixture(scope="module")
def upstream() -> Path:
    return find_wheel(RELEASE, load_lock().releases[RELEASE].wheels, download=True)


@pytest.fixture(scope="module")
def lane() -> Iterator[Lane]:
    with copied(ensure_lane(RELEASE)) as lane:
        yield lane


@pytest.mark.parametrize("upstream_before", [True, False], ids=["over-upstream", "without"])
def test_the_wheel_takes_the_place_of_upstreams(
    upstream_before: bool, lane: Lane, upstream: Path, tmp_path: Path
) -> None:
    pip(lane, "uninstall", "--yes", "sglang", "sglang-crashkit")
    if upstream_before:
        pip(lane, "install", "--no-index", "--no-deps", upstream)
        assert status_of(lane)["state"] == "pristine"
    build_patched_wheel(upstream, tmp_path, PatchTree.load(find_patch_root()), load_lock())
    build_kit_wheel(tmp_path)
    install, _separator, status = install_command(tmp_path, RELEASE).partition(" && ")
    assert status == "sglang-crashkit status"
    pip(lane, *shlex.split(install)[1:])
    answer = status_of(lane)
    assert (answer["state"], answer["patched_by"], answer["next"]) == ("patched", "wheel", None)
    assert answer["sglang_version"] == f"{RELEASE}+crashkit.{__version__}"
    assert answer["kit_version_there"] == __version__
