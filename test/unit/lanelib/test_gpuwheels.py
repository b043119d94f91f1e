from __future__ import annotations

import re
import zipfile

import pytest

from lanelib import gpuwheels
from lanelib.errors import LaneError
from lanelib.gpuwheels import fetch_wheels, gpu_releases, requirements, torch_version
from lanelib.paths import PYPROJECT


@pytest.fixture
def recipes(tmp_path, monkeypatch):
    """Make a release 1.2.3 that needs three packages, and a folder of wheels in place of a package index."""
    folder = tmp_path / "recipes"
    folder.mkdir()
    (folder / "1.2.3.gpu").write_text("# packages\nsglang-kernel\nTyping.Extras\n# tools\npytest\n".lower())
    (folder / "1.2.3.lock").write_text("sglang-kernel==4.5\ntyping.extras==2\ntorch==9.1\npytest==7\n")
    (folder / "tools.lock").write_text("pytest==8.0\nruff==1\n")
    monkeypatch.setattr(gpuwheels, "RECIPES", folder)
    monkeypatch.setattr(gpuwheels, "TOOLS_LOCK", folder / "tools.lock")
    monkeypatch.setattr(gpuwheels, "lock_path", lambda release: folder / f"{release}.lock")
    index = tmp_path / "index"
    index.mkdir()
    for name, version in (("sglang_kernel", "4.5"), ("typing_extras", "2"), ("pytest", "7"), ("pytest", "8.0")):
        write_wheel(index, name, version)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return folder


def write_wheel(folder, name, version):
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        for generation in ("sm90", "sm100") if name == "sglang_kernel" else ():
            archive.writestr(f"sgl_kernel/{generation}/common_ops.abi3.so", generation)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


def test_versions_are_those_of_the_release_and_else_of_the_tools(recipes):
    assert requirements("1.2.3") == ["sglang-kernel==4.5", "typing.extras==2", "pytest==7"]
    (recipes / "1.2.3.lock").write_text("sglang-kernel==4.5\ntyping.extras==2\n")
    assert requirements("1.2.3")[-1] == "pytest==8.0"


def test_a_package_without_a_locked_version_is_named(recipes):
    (recipes / "1.2.3.gpu").write_text("sglang-kernel\nunheard-of\n")

    with pytest.raises(LaneError, match=r"1\.2\.3\.lock does not lock unheard-of"):
        requirements("1.2.3")


def test_a_release_without_a_list_is_named(recipes):
    with pytest.raises(LaneError, match=r"SGLang 1\.2\.4 needs on a GPU") as caught:
        requirements("1.2.4")
    assert caught.value.next_step == "name one of: 1.2.3"


def test_wheels_are_fetched_and_the_kernels_stripped(recipes, tmp_path):
    found = fetch_wheels("1.2.3", tmp_path / "wheels", (3, 12), "sm90")

    names = ["pytest-7-py3-none-any.whl", "sglang_kernel-4.5-py3-none-any.whl", "typing_extras-2-py3-none-any.whl"]
    assert [path.name for path in found] == names
    with zipfile.ZipFile(found[1]) as archive:
        assert [name for name in archive.namelist() if name.endswith(".so")] == ["sgl_kernel/sm90/common_ops.abi3.so"]


def test_what_is_there_is_not_fetched_again(recipes, tmp_path, monkeypatch):
    fetch_wheels("1.2.3", tmp_path / "wheels", (3, 12), "sm90")
    monkeypatch.setattr(gpuwheels, "run_command", None)

    assert len(fetch_wheels("1.2.3", tmp_path / "wheels", (3, 12), "sm90")) == 3


def test_what_is_wanted_in_another_version_is_replaced(recipes, tmp_path):
    fetch_wheels("1.2.3", tmp_path / "wheels", (3, 12), "sm90")
    lock = (recipes / "1.2.3.lock").read_text()
    (recipes / "1.2.3.lock").write_text(lock.replace("pytest==7", "pytest==8.0"))

    found = fetch_wheels("1.2.3", tmp_path / "wheels", (3, 12), "sm90")

    assert [path.name for path in found if path.name.startswith("pytest")] == ["pytest-8.0-py3-none-any.whl"]


def test_what_cannot_be_fetched_is_named(recipes, tmp_path):
    (recipes / "1.2.3.lock").write_text("sglang-kernel==4.6\ntyping.extras==2\n")

    with pytest.raises(LaneError, match=r"sglang-kernel==4\.6"):
        fetch_wheels("1.2.3", tmp_path / "wheels", (3, 12), "sm90")


@pytest.mark.parametrize("release", gpu_releases())
def test_the_lists_of_this_checkout_are_locked_whole_and_leave_torch_to_the_machine(release):
    names = {re.split("==", line)[0] for line in requirements(release)}

    assert {"sglang", "sglang-kernel", "flashinfer-python", "py-spy", "pytest"} <= names
    assert not {name for name in names if name in ("torch", "triton") or name.startswith(("nvidia-cu", "nvidia-nccl"))}
    assert re.fullmatch(r"\d+\.\d+\.\d+", torch_version(release))
    # The kit is not installed there but shown, so that its own dependencies are named one by one.
    block = PYPROJECT.read_text().partition("\ndependencies = [")[2].partition("]")[0]
    own = {name.lower() for name in re.findall(r'"([\w-]+)', block)}
    assert own
    assert own <= names
