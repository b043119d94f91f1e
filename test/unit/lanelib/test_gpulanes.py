from __future__ import annotations

import re
import sys
from importlib import metadata
from pathlib import Path

import pytest

from lanelib import gpulanes
from lanelib.gpulanes import ensure_gpu_lane, gpu_releases
from lanelib.lanes import Lane
from lanelib.paths import PYPROJECT, RECIPES, ROOT

RELEASE = "0.5.12.post1"
PACKAGES = "lib/python3.12/site-packages"


@pytest.fixture
def packages(tmp_path, monkeypatch) -> Path:
    """Packages that were carried in, a machine with their torch, and what stands in for its venv and the lane."""
    folder = tmp_path / "packages"
    (folder / "sglang" / "srt").mkdir(parents=True)
    (folder / "bin").mkdir()
    (folder / "bin" / "py-spy").write_text("a program")

    def run(argv, **_options):
        if "venv" in argv:
            (Path(argv[-1]) / "bin").mkdir(parents=True)
            (Path(argv[-1]) / PACKAGES).mkdir(parents=True)

    monkeypatch.setattr(gpulanes, "LANES", tmp_path / "lanes")
    monkeypatch.setattr(gpulanes, "run_command", run)
    monkeypatch.setattr(metadata, "version", lambda name: "2.11.0+cu130")
    for step in ("write_model", "patch"):
        monkeypatch.setattr(Lane, step, lambda lane, step=step: (lane.root / step).touch())
    return folder


def test_a_lane_is_made_of_carried_packages_before_the_machines(packages, monkeypatch):
    monkeypatch.setattr(sys, "path", ["/checkout/scripts", "/opt/torch/site-packages", "/usr/lib/dist-packages"])

    lane = ensure_gpu_lane(RELEASE, packages)

    own = lane.root / PACKAGES
    assert (lane.root / "bin" / "py-spy").read_text() == "a program"
    assert (own / "sglang" / "srt").is_dir()
    assert (own / "lane.pth").read_text().splitlines() == [
        str(ROOT / "python"),
        "import site; site.addsitedir('/opt/torch/site-packages')",
        "import site; site.addsitedir('/usr/lib/dist-packages')",
    ]
    assert (lane.root / "write_model").exists()
    assert (lane.root / "patch").exists()
    # What was carried may serve again.
    assert (packages / "bin" / "py-spy").exists()


def pins_in(path: Path) -> dict[str, str]:
    return dict(re.findall(r"^([\w.-]+)==([^\s;]+)$", path.read_text(), re.MULTILINE))


@pytest.mark.parametrize("release", gpu_releases())
def test_carried_packages_are_those_of_the_locks_without_torch(release):
    carried = pins_in(RECIPES / f"{release}.gpu")
    locked = pins_in(RECIPES / "tools.lock") | pins_in(RECIPES / f"{release}.lock")

    assert carried == {name: locked[name] for name in carried}
    assert {"sglang", "sglang-kernel", "flashinfer-python", "ninja", "py-spy", "pytest"} <= carried.keys()
    assert not [name for name in carried if name in ("torch", "triton") or name.startswith(("nvidia-cu", "nvidia-nc"))]
    # The kit is not installed there but shown, so that its own dependencies are named one by one.
    block = PYPROJECT.read_text().partition("\ndependencies = [")[2].partition("]")[0]
    own = {name.lower() for name in re.findall(r'"([\w-]+)', block)}
    assert own
    assert own <= carried.keys()
