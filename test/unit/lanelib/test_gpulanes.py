from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lanelib import gpulanes
from lanelib.cudadevice import Device
from lanelib.errors import LaneError
from lanelib.gpulanes import Machine, ensure_gpu_lane, look_at
from lanelib.paths import ROOT

H200 = Device("NVIDIA H200", (9, 0), (13, 0))
PACKAGES = "lib/python3.12/site-packages"


class FakeInstaller:
    """Stands in for the machine's python, its pip and the lane's python: makes the files they would."""

    def __init__(self) -> None:
        self.commands: list[list[str]] = []

    def run(self, argv, **_options) -> str:
        words = [str(word) for word in argv]
        self.commands.append(words)
        if "venv" in words:
            python = Path(words[-1]) / "bin" / "python"
            python.parent.mkdir(parents=True)
            python.touch()
            (Path(words[-1]) / PACKAGES).mkdir(parents=True)
        return ""

    @property
    def steps(self) -> list[str]:
        names = ("venv", "install", "model.py", "apply")
        return [next(name for name in names if any(word.endswith(name) for word in words)) for words in self.commands]


@pytest.fixture
def installer(tmp_path, monkeypatch):
    fake = FakeInstaller()
    monkeypatch.setattr(gpulanes, "LANES", tmp_path / "lanes")
    monkeypatch.setattr(gpulanes, "run_command", fake.run)
    monkeypatch.setattr(gpulanes, "look_at", lambda python: machine_with("2.11.0+cu130"))
    return fake


def machine_with(torch: str) -> Machine:
    return Machine(Path("/opt/torch/bin/python3"), (3, 12), torch, ("/opt/torch/packages", "/usr/dist-packages"))


@pytest.fixture
def wheels(tmp_path):
    folder = tmp_path / "wheels"
    folder.mkdir()
    (folder / "sglang-0.5.12.post1-cp312-cp312-manylinux_2_34_x86_64.whl").touch()
    return folder


def test_a_lane_is_installed_from_a_folder_without_the_index(installer, wheels):
    lane = ensure_gpu_lane("0.5.12.post1", H200, wheels)

    assert installer.steps == ["venv", "install", "model.py", "apply"]
    (install,) = [words for words in installer.commands if "install" in words]
    assert {"--no-index", "--no-deps", str(wheels), "sglang==0.5.12.post1"} <= set(install)
    assert not any(word.startswith("torch==") for word in install)
    assert lane.serve_env()["SGLANG_USE_CPU_ENGINE"] == "0"


def test_the_machines_packages_come_behind_the_lanes_own_and_the_kit_is_this_checkouts(installer, wheels):
    lane = ensure_gpu_lane("0.5.12.post1", H200, wheels)

    folder = lane.root / PACKAGES
    files = sorted(path.name for path in folder.glob("*.pth"))
    assert files == ["sglang-crashkit.pth", "zzz-machine.pth"]
    assert (folder / files[0]).read_text() == f"{ROOT / 'python'}\n"
    lines = [f"import site; site.addsitedir({site!r})" for site in machine_with("").sites]
    assert (folder / files[1]).read_text().splitlines() == lines


def test_a_lane_is_found_again_and_made_anew_where_what_it_was_made_of_changed(installer, wheels, monkeypatch):
    ensure_gpu_lane("0.5.12.post1", H200, wheels)
    installer.commands.clear()

    # Whoever comes after the maker need not know where the wheels were.
    ensure_gpu_lane("0.5.12.post1", H200)
    assert installer.commands == []

    monkeypatch.setattr(gpulanes, "look_at", lambda python: machine_with("2.11.0+cu126"))
    ensure_gpu_lane("0.5.12.post1", H200, wheels)
    assert installer.steps == ["venv", "install", "model.py", "apply"]


@pytest.mark.parametrize("torch", ["", "2.12.0+cu130"])
def test_another_torch_is_refused_where_none_can_be_fetched(installer, wheels, monkeypatch, torch):
    monkeypatch.setattr(gpulanes, "look_at", lambda python: machine_with(torch))

    with pytest.raises(LaneError, match=r"needs 2\.11\.0"):
        ensure_gpu_lane("0.5.12.post1", H200, wheels)
    assert installer.commands == []


def test_torch_is_fetched_where_the_machine_has_another(installer, monkeypatch, tmp_path):
    fetched = []
    monkeypatch.setattr(gpulanes, "look_at", lambda python: machine_with("2.12.0"))
    monkeypatch.setattr(gpulanes, "fetch_wheels", lambda *arguments: fetched.append(arguments))

    lane = ensure_gpu_lane("0.5.12.post1", H200)

    assert installer.steps == ["venv", "install", "install", "model.py", "apply"]
    assert installer.commands[1][-2:] == ["torch", "torchvision"]
    assert fetched == [("0.5.12.post1", tmp_path / "lanes" / "gpu-wheels-0.5.12.post1", (3, 12), "sm90")]
    assert (lane.root / PACKAGES / "zzz-machine.pth").read_text() == ""


def test_a_python_tells_its_version_and_where_its_packages_are():
    machine = look_at(Path(sys.executable))

    assert (machine.version, machine.torch) == (sys.version_info[:2], "")
    assert str(Path(pytest.__file__).parents[1]) in machine.sites
    assert not machine.has_torch("2.11.0")


def test_a_build_for_any_cuda_is_the_same_torch():
    assert machine_with("2.11.0+cu130").has_torch("2.11.0")
    assert not machine_with("2.11.0+cu130").has_torch("2.11.1")
