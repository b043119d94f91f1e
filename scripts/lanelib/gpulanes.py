"""The lane of one SGLang release on a GPU.

With network it is the lane of ``scripts/lane``, whose lock names torch with CUDA's libraries. Without network, it is
made of packages that were copied there, and uses the machine's own torch; see ``scripts/gpu_lane``.
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
#: The reason for which a test is skipped where there is no GPU.
NO_DEVICE = "no CUDA device"
_NAME_BYTES = 256
#: A wider model than the tiny one, which is too narrow for the GPU kernels of the usual models.
_SHAPE = json.dumps({"hidden_size": 256, "intermediate_size": 512, "head_dim": 64})
#: Arguments of a server in such a lane: the other backends are not among the copied packages.
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
    """Return the first GPU; None where there is no driver, or the driver has no GPU.

    It calls the driver's API (``cuInit`` and so on), because torch takes seconds and gigabytes to import.
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
        # There is no library, or a stub without these functions.
        return None
    return Device(name.value.decode(errors="replace"), (number.value // 1000, number.value % 1000 // 10), count)


def require_device(without: str) -> Device:
    """Return the first GPU; raises LaneError on a machine without a GPU, with `without` as the next step."""
    if (device := find_device()) is None:
        raise LaneError(f"there is {NO_DEVICE} on this machine", next_step=without)
    return device


def gpu_releases() -> list[str]:
    """Return the releases that can be made from copied packages: those with a list of packages in ``test/lanes``."""
    return sorted(path.name.removesuffix(".gpu") for path in RECIPES.glob("*.gpu"))


def ensure_gpu_lane(release: str, packages: Path | None = None) -> Lane:
    """Make the lane of `release` on this machine's GPU.

    It is made from `packages`, a folder of packages without torch that are installed for the running python; without
    that, it is installed from the package index.
    """
    if packages is None:
        return ensure_lane(release)
    _require_torch(release)
    lane = Lane(release, False, LANES / f"gpu-{release}", None)
    with exclusive(LANES / f".gpu-{release}.lock"):
        say(f"making {lane.root} of {packages}, on {sys.executable}")
        shutil.rmtree(lane.root, ignore_errors=True)
        # Without pip, because not every python can install it.
        run_command([sys.executable, "-m", "venv", "--without-pip", lane.root], timeout_s=120)
        (own,) = lane.root.glob("lib/python3*/site-packages")
        shutil.copytree(packages, own, dirs_exist_ok=True)
        for program in (own / "bin").glob("*"):
            program.replace(lane.root / "bin" / program.name)
        # Add the kit of this checkout, then the packages of the running python. Where that is a virtual environment's,
        # --system-site-packages would add the packages of its base python instead.
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
    # The build of torch for any version of CUDA will do.
    if f"torch=={found.partition('+')[0]}" != wanted:
        raise LaneError(
            f"the torch of {sys.executable} is {found}, and SGLang {release} needs {wanted}",
            next_step="run this script with a python that has it, or without --packages where there is network",
        )
