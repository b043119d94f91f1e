"""The lane of one SGLang release on a GPU.

With network it is the lane of ``scripts/lane``, whose lock names torch with CUDA's libraries. Without, it is made of
packages that were carried there, and sees the torch of the machine behind them; ``scripts/gpu_lane`` tells how.
"""

from __future__ import annotations

import ctypes
import json
import shutil
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from lanelib.commands import LaneError, exclusive, run_command, say
from lanelib.lanes import Lane, ensure_lane, lock_path
from lanelib.paths import LANES, RECIPES, ROOT

SONAME = "libcuda.so.1"
#: Why a test is skipped without one.
NO_DEVICE = "no CUDA device"
_NAME_BYTES = 256
#: The tiny model is too narrow for the kernels that a GPU has for the models people serve.
_SHAPE = json.dumps({"hidden_size": 256, "intermediate_size": 512, "head_dim": 64})
#: Arguments of a server in such a lane: what else it would load is not carried.
GPU_ARGS = (
    *("--attention-backend", "triton", "--grammar-backend", "none", "--disable-piecewise-cuda-graph"),
    *("--json-model-override-args", _SHAPE),
)


@dataclass(frozen=True)
class Device:
    """The first of `count` GPUs; `cuda` is the latest version of CUDA that the driver knows, such as (13, 0)."""

    name: str
    cuda: tuple[int, int]
    count: int = 1


def find_device() -> Device | None:
    """Return the first GPU; None where there is no driver, or it has none.

    The driver is asked (``cuInit`` and so on, of its API): torch takes seconds and gigabytes to import.
    """
    number, device, name = ctypes.c_int(), ctypes.c_int(), ctypes.create_string_buffer(_NAME_BYTES)
    try:
        driver = ctypes.CDLL(SONAME)
        if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(number)) or not number.value:
            return None
        count = number.value
        if driver.cuDeviceGet(ctypes.byref(device), 0):
            return None
        driver.cuDeviceGetName(name, _NAME_BYTES, device)
        driver.cuDriverGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        # No library, or a stand-in that has not these functions.
        return None
    return Device(name.value.decode(errors="replace"), (number.value // 1000, number.value % 1000 // 10), count)


def require_device(without: str) -> Device:
    """Return the first GPU; without one the command `without` does what can be done without one."""
    if (device := find_device()) is None:
        raise LaneError(f"there is {NO_DEVICE} on this machine", next_step=without)
    return device


def gpu_releases() -> list[str]:
    """Return the releases whose packages can be carried: those with a list of them in ``test/lanes``."""
    return sorted(path.name.removesuffix(".gpu") for path in RECIPES.glob("*.gpu"))


def ensure_gpu_lane(release: str, packages: Path | None = None) -> Lane:
    """Make the lane of `release` on this machine's GPU.

    It is made of `packages`, a folder of installed packages without torch for the running python, or else installed
    from the package index.
    """
    if packages is None:
        return ensure_lane(release)
    _require_torch(release)
    lane = Lane(release, False, LANES / f"gpu-{release}", None)
    with exclusive(LANES / f".gpu-{release}.lock"):
        say(f"making {lane.root} of {packages}, on {sys.executable}")
        shutil.rmtree(lane.root, ignore_errors=True)
        # Without pip, which not every python can install.
        run_command([sys.executable, "-m", "venv", "--without-pip", lane.root], timeout_s=120)
        (own,) = lane.root.glob("lib/python3*/site-packages")
        shutil.copytree(packages, own, dirs_exist_ok=True)
        for program in (own / "bin").glob("*"):
            program.replace(lane.root / "bin" / program.name)
        # The kit of this checkout, then what the running python sees. Where that is one of a virtual environment,
        # --system-site-packages would show the packages of the python below it.
        seen = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
        lines = [str(ROOT / "python"), *(f"import site; site.addsitedir({path!r})" for path in seen)]
        (own / "lane.pth").write_text("".join(f"{line}\n" for line in lines))
        lane.write_model()
        lane.patch()
    return lane


def _require_torch(release: str) -> None:
    wanted = next(line for line in lock_path(release).read_text().splitlines() if line.startswith("torch=="))
    try:
        found = metadata.version("torch")
    except metadata.PackageNotFoundError:
        found = "missing"
    # Whatever CUDA it was built for.
    if f"torch=={found.partition('+')[0]}" != wanted:
        raise LaneError(
            f"the torch of {sys.executable} is {found}, and SGLang {release} needs {wanted}",
            next_step="run this script with a python that has it, or without --packages where there is network",
        )
