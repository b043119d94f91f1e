"""Make, or find, the virtual environment in which one SGLang release serves on a GPU, on the machine's own torch.

Torch with CUDA's libraries is gigabytes, and where there is a GPU it mostly is installed. So the lane is a virtual
environment that sees what the machine's python sees, behind its own packages. It is told so by a ``.pth`` file: where
the machine's python is one of a virtual environment itself, ``--system-site-packages`` would show the packages of the
python below that one only.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from lanelib.commands import run_command, say
from lanelib.cudadevice import Device
from lanelib.errors import LaneError
from lanelib.gpuwheels import fetch_wheels, names_path, requirements, torch_version
from lanelib.kernelwheel import generation_of
from lanelib.lanes import MODEL_WRITER, Lane
from lanelib.locking import exclusive
from lanelib.paths import KIT_VERSION_FILE, LANES, PATCHES, ROOT, hash_files
from lanelib.resolve import lock_path

#: The tiny model is too narrow for the kernels that a GPU has for the models people serve.
_SHAPE = json.dumps({"hidden_size": 256, "intermediate_size": 512, "head_dim": 64})
#: Arguments of a server in such a lane: what else it would load is not installed.
GPU_ARGS = (
    *("--attention-backend", "triton", "--grammar-backend", "none", "--disable-piecewise-cuda-graph"),
    *("--json-model-override-args", _SHAPE),
)
INSTALL_TIMEOUT_S = 900
TORCH_TIMEOUT_S = 3600
#: Which packages the python sees, and its torch, without importing it.
_PROBE = """
import importlib.metadata, json, sys
try:
    torch = importlib.metadata.version("torch")
except importlib.metadata.PackageNotFoundError:
    torch = ""
sites = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
print(json.dumps({"torch": torch, "sites": sites, "python": sys.version_info[:2]}))
"""
_STAMP = "crashkit-lane.json"


@dataclass(frozen=True)
class Machine:
    """The python that a lane is made with.

    Attributes:
        python: its executable.
        version: major and minor number.
        torch: the version of its torch, empty where it has none.
        sites: the folders of the packages that it sees.
    """

    python: Path
    version: tuple[int, int]
    torch: str
    sites: tuple[str, ...]

    def has_torch(self, version: str) -> bool:
        """Say whether its torch is of this version, whatever CUDA it was built for."""
        return self.torch.partition("+")[0] == version


class GpuLane(Lane):
    """One SGLang release that can serve on a GPU."""

    def serve_env(self) -> dict[str, str]:
        """Return the environment in which its python serves on a GPU, without network."""
        path = os.pathsep.join([str(self.root / "bin"), os.environ.get("PATH", os.defpath)])
        caches = {
            "TRITON_CACHE_DIR": "triton",
            "TVM_FFI_CACHE_DIR": "tvm-ffi",
            "FLASHINFER_WORKSPACE_BASE": "flashinfer",
            "CUDA_CACHE_PATH": "driver",
        }
        env = super().serve_env() | {"SGLANG_USE_CPU_ENGINE": "0", "PATH": path}
        return env | {name: str(self.root / "cache" / folder) for name, folder in caches.items()}


def look_at(python: Path) -> Machine:
    """Return what there is of a python.

    Raises:
        LaneError: it cannot be run.
    """
    facts = json.loads(run_command([python, "-P", "-c", _PROBE], timeout_s=60).strip().splitlines()[-1])
    major, minor = facts["python"]
    return Machine(python, (major, minor), facts["torch"], tuple(facts["sites"]))


def found_gpu_lane(release: str, root: Path) -> Lane:
    """Return the lane of `release` that was made at `root`.

    Raises:
        LaneError: there is none.
    """
    lane = GpuLane(release, False, root, None)
    if not _read_stamp(root):
        raise LaneError(f"{root} is no lane on a GPU", next_step="scripts/gpu_lane makes one and runs the tests")
    return lane


def ensure_gpu_lane(release: str, device: Device, wheels: Path | None = None, python: Path | None = None) -> Lane:
    """Make, or find, the lane of `release` on this machine's GPU.

    Args:
        release: SGLang's version.
        device: the GPU.
        wheels: a folder with the wheels to install; fetched from the package index by default.
        python: which python to make it with; by default the running one.

    Raises:
        LaneError: something is missing, or an installation failed.
    """
    root = LANES / f"gpu-{release}"
    lane = GpuLane(release, False, root, None)
    # Not resolved: the link in a virtual environment is what makes it one.
    machine = look_at(python or Path(sys.executable))
    with exclusive(LANES / f".{root.name}.lock"):
        stamp = _stamp(release, machine)
        if _read_stamp(root) != stamp or not lane.python.exists():
            _Maker(lane, machine).make(device, wheels)
            fresh = root / f"{_STAMP}.new"
            fresh.write_text(stamp)
            fresh.replace(root / _STAMP)
    return lane


def _stamp(release: str, machine: Machine) -> str:
    files = [lock_path(release), names_path(release), MODEL_WRITER, KIT_VERSION_FILE]
    files += [path for path in PATCHES.rglob("*") if path.is_file()]
    # Wherever its wheels came from, the lock says which they were.
    facts = {"files": hash_files(files), "python": str(machine.python), "torch": machine.torch}
    return json.dumps(facts, indent=1)


def _read_stamp(root: Path) -> str:
    try:
        return (root / _STAMP).read_text()
    except OSError:
        return ""


class _Maker:
    """Makes one lane anew."""

    def __init__(self, lane: Lane, machine: Machine) -> None:
        self.lane = lane
        self.machine = machine

    def make(self, device: Device, wheels: Path | None) -> None:
        root, release = self.lane.root, self.lane.release
        shutil.rmtree(root, ignore_errors=True)
        wanted = torch_version(release)
        is_bare = not self.machine.has_torch(wanted)
        if is_bare and wheels is not None:
            raise LaneError(
                f"the torch of {self.machine.python} is {self.machine.torch or 'missing'}, and SGLang {release} needs"
                f" {wanted}",
                next_step="run this script with a python that has it, or without --wheels where there is network",
            )
        if wheels is None:
            wheels = LANES / f"gpu-wheels-{release}"
            fetch_wheels(release, wheels, self.machine.version, generation_of(device.compute_capability))
        say(f"{root.name}: making {root} on {self.machine.python} with torch {self.machine.torch or wanted}")
        # Without pip, which the machine's own stands in for: not every python can make one with it.
        run_command([self.machine.python, "-m", "venv", "--without-pip", root], timeout_s=120)
        if is_bare:
            self._install(["--constraint", lock_path(release), "torch", "torchvision"], TORCH_TIMEOUT_S)
        offline = ["--no-index", "--no-deps", "--find-links", wheels]
        self._install([*offline, *requirements(release)], INSTALL_TIMEOUT_S)
        self._show_machine([] if is_bare else self.machine.sites)
        self._write_model()
        run_command([self.lane.python, "-m", "sglang_crashkit", "apply"], timeout_s=300, env=self.lane.serve_env())

    def _install(self, arguments: list[str | Path], timeout_s: float) -> None:
        pip = [self.machine.python, "-m", "pip", "--python", self.lane.python, "--disable-pip-version-check"]
        install = [*pip, "install", "--quiet", "--no-compile", "--ignore-installed", *arguments]
        run_command(install, timeout_s=timeout_s)

    def _show_machine(self, sites: tuple[str, ...] | list[str]) -> None:
        """Show the lane the kit of this checkout, and behind all else the machine's packages."""
        (own,) = self.lane.root.glob("lib/python3*/site-packages")
        (own / "sglang-crashkit.pth").write_text(f"{ROOT / 'python'}\n")
        lines = [f"import site; site.addsitedir({site!r})\n" for site in sites]
        # The last one by name, so that nothing of the machine's comes before the lane's own.
        (own / "zzz-machine.pth").write_text("".join(lines))

    def _write_model(self) -> None:
        # -P: the modules beside the writer must not shadow those of the lane.
        command = [self.lane.python, "-P", MODEL_WRITER, self.lane.model_dir]
        run_command(command, timeout_s=300, env=self.lane.serve_env())
