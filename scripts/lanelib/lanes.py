"""Make, or find, the virtual environment of one SGLang release.

A lane is made in steps: versions, model, kit. Each leaves a stamp of what it was made from, so that
a change redoes what it must, an interrupted step is redone, and with no change nothing is run.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lanelib import model
from lanelib.commands import clean_environment, run_command, say
from lanelib.errors import LaneError
from lanelib.locking import exclusive
from lanelib.machine import find_compiler, find_python, require_disk
from lanelib.paths import KIT_VERSION_FILE, LANES, PATCHES, PYPROJECT, ROOT, hash_files
from lanelib.resolve import check_release, versions_of
from lanelib.stub import ensure_stub, has_driver
from lanelib.tools import tool

MODEL_WRITER = Path(model.__file__)
#: Seconds for a cold download of a release.
INSTALL_TIMEOUT_S = 3600
NO_PROXY = "127.0.0.1,localhost"


@dataclass(frozen=True)
class Lane:
    """One SGLang release that can serve on a CPU.

    Attributes:
        release: SGLang's version.
        pristine: without the kit; otherwise the kit is installed and has patched SGLang.
        root: the virtual environment.
        stub_dir: the driver stub's folder, or None where a real driver is installed.
    """

    release: str
    pristine: bool
    root: Path
    stub_dir: Path | None

    @property
    def name(self) -> str:
        """What tells it from every other lane."""
        return lane_name(self.release, pristine=self.pristine)

    @property
    def python(self) -> Path:
        """Its python."""
        return self.root / "bin" / "python"

    @property
    def model_dir(self) -> Path:
        """The tiny model, written with its own transformers."""
        return self.root / "tiny-model"

    def knows_option(self, option: str) -> bool:
        """Say whether its SGLang has the server argument `option`, such as ``--tp-size``."""
        field = option.removeprefix("--").replace("-", "_")
        return self._source_says(f"{field}:", "server_args.py", "arg_groups/**/*.py")

    def binds_replicas_alike(self) -> bool:
        """Say whether a core is named once for all data-parallel replicas of a rank, not for each."""
        complaint = "SGLANG_CPU_OMP_THREADS_BIND setting must be aligned with TP size"
        return self._source_says(complaint, "model_executor/model_runner.py", "utils/numa_utils.py")

    def _source_says(self, text: str, *patterns: str) -> bool:
        """Say whether `text` is in SGLang's source; importing it to ask takes seconds."""
        (srt,) = self.root.glob("lib/python3*/site-packages/sglang/srt")
        return any(text in path.read_text() for pattern in patterns for path in srt.glob(pattern))

    def serve_env(self) -> dict[str, str]:
        """Return the environment in which its python serves on a CPU, without network."""
        env = clean_environment()
        env |= {
            "SGLANG_USE_CPU_ENGINE": "1",
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "PYTHONUNBUFFERED": "1",
            # To compile takes a fifth of a start's CPU time, and leaves hundreds of megabytes in the temporary folder.
            "TORCHDYNAMO_DISABLE": "1",
            # A server and its router talk to each other on this machine only.
            "NO_PROXY": NO_PROXY,
            "no_proxy": NO_PROXY,
        }
        if self.stub_dir is not None:
            outer = env.get("LD_LIBRARY_PATH")
            env["LD_LIBRARY_PATH"] = f"{self.stub_dir}:{outer}" if outer else str(self.stub_dir)
        return env


def lane_name(release: str, *, pristine: bool) -> str:
    """Return the name of a lane's folder."""
    return f"{release}-pristine" if pristine else release


def ensure_lane(release: str, pristine: bool = False) -> Lane:
    """Make, or find, the lane of `release`.

    Args:
        release: SGLang's version, such as ``0.5.23``.
        pristine: leave SGLang as it was published, without the kit.

    Raises:
        LaneError: something is missing on the machine, or an installation failed.
    """
    check_release(release)
    if not pristine:
        _require_patches(release)
    root = LANES / lane_name(release, pristine=pristine)
    if not has_driver():
        find_compiler()  # before the long download, not after it
    with exclusive(LANES / f".{root.name}.lock"):
        _Maker(release, root, pristine).make()
        return Lane(release, pristine, root, ensure_stub())


def _require_patches(release: str) -> None:
    """Check that the kit has patches for `release`, before gigabytes are installed for nothing."""
    supported = json.loads((PATCHES / "releases.lock.json").read_text())["releases"]
    if release not in supported:
        raise LaneError(
            f"the kit has no patches for SGLang {release}; it has for {', '.join(supported)}",
            next_step=f"scripts/lane {release} --pristine, or scripts/port_release {release}",
        )


class _Maker:
    """Brings one lane's folder up to date, step by step."""

    def __init__(self, release: str, root: Path, pristine: bool) -> None:
        self.release = release
        self.root = root
        self.pristine = pristine
        self.python = root / "bin" / "python"

    def make(self) -> None:
        versions = versions_of(self.release)
        self._step(
            "versions",
            lambda: hash_files([versions], relative_to=versions.parent),
            lambda: self._install(versions),
        )
        self._step("model", lambda: hash_files([MODEL_WRITER]), self._write_model)
        if not self.pristine:
            self._step("kit", self._kit_stamp, self._install_kit)

    def _kit_stamp(self) -> str:
        patches = [path for path in PATCHES.rglob("*") if path.is_file()]
        # The kit's own account of what it patched: somebody may have reverted it by hand.
        state = self.root.glob("lib/python3*/site-packages/sglang-*.dist-info/sglang-crashkit.json")
        return hash_files([*patches, KIT_VERSION_FILE, PYPROJECT, *state])

    def _step(self, name: str, stamp: Callable[[], str], make: Callable[[], None]) -> None:
        if self._stamps().get(name) == stamp() and self.python.exists():
            return
        make()
        path = self.root / "crashkit-lane.json"
        fresh = path.with_suffix(".new")
        fresh.write_text(json.dumps(self._stamps() | {name: stamp()}, indent=1))
        fresh.replace(path)

    def _stamps(self) -> dict[str, str]:
        try:
            stamps: dict[str, str] = json.loads((self.root / "crashkit-lane.json").read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            return {}
        return stamps

    def _install(self, versions: Path) -> None:
        base = find_python()
        uv = tool("uv")
        if self.root.exists():
            shutil.rmtree(self.root)
        cache = Path(run_command([uv, "cache", "dir"], timeout_s=30).strip())
        for folder in (self.root, cache):
            require_disk(folder)
        say(f"{self.root.name}: installing SGLang {self.release} (minutes when nothing is cached)")
        run_command([uv, "venv", "--quiet", "--python", base, self.root], timeout_s=120)
        sync = [uv, "pip", "sync", "--python", self.python, versions]
        run_command(sync, timeout_s=INSTALL_TIMEOUT_S, quiet=False)

    def _write_model(self) -> None:
        say(f"{self.root.name}: writing the tiny model")
        lane = Lane(self.release, self.pristine, self.root, ensure_stub())
        fresh = lane.model_dir.with_suffix(".new")
        shutil.rmtree(fresh, ignore_errors=True)
        # -P: the modules beside the writer must not shadow those of the lane.
        command = [self.python, "-P", MODEL_WRITER, fresh]
        run_command(command, timeout_s=300, env=lane.serve_env())
        shutil.rmtree(lane.model_dir, ignore_errors=True)
        fresh.rename(lane.model_dir)

    def _install_kit(self) -> None:
        say(f"{self.root.name}: installing the kit and patching SGLang")
        install = [tool("uv"), "pip", "install", "--quiet", "--python", self.python]
        run_command([*install, "--no-deps", "-e", ROOT], timeout_s=300)
        try:
            run_command([self.python, "-m", "sglang_crashkit", "apply"], timeout_s=120)
        except LaneError as error:
            raise LaneError(
                f"the kit could not patch SGLang {self.release}: {error.message}",
                next_step=f"scripts/lane {self.release} --pristine gives it unpatched",
            ) from error
