"""Make, or find, the virtual environment of one SGLang release.

A lane is made in steps: versions, collector, model, kit. Each step leaves a stamp of its inputs, so that
only a step whose inputs changed, or that was interrupted, runs again.

The versions are those of the lane's lock, or resolved as on the day of the release. SGLang's compiled kernels link
against ``libcuda.so.1`` even when they serve on a CPU; a machine without the driver gets a stub of it.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import shlex
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

from lanelib import model
from lanelib.commands import LaneError, clean_environment, exclusive, run_command, say
from lanelib.paths import KIT_VERSION_FILE, LANES, PATCHES, PYPROJECT, RECIPES, ROOT, hash_files, write_whole
from lanelib.tools import tool

MODEL_WRITER = Path(model.__file__)
#: SGLang's model class that serves the tiny model.
ARCHITECTURE = "llama"
MODELS = "lib/python3*/site-packages/sglang/srt/models/[a-z]*.py"
#: Seconds for a cold download of a release.
INSTALL_TIMEOUT_S = 3600
#: An SGLang release with torch and CUDA's libraries, unpacked.
LANE_BYTES = 10 * 10**9
STAMPS = "crashkit-lane.json"
#: Collect garbage seldom: a server's process makes millions of objects as it imports, of which none is garbage, and
#: the search for garbage takes a sixth of the CPU time of its start.
SELDOM_COLLECTED = "import gc; gc.set_threshold(100_000, 20, 20)\n"
RELEASE = re.compile(r"\d+\.\d+\.\d+(\.post\d+|rc\d+)?")
#: The locks were resolved for this python.
LANE_PYTHON = "3.11"
#: What prefill/decode disaggregation and Ray need beside SGLang.
EXTRAS = ("mooncake-transfer-engine-non-cuda", "ray", "sglang-router")
#: Packages of the same release are uploaded within this time of each other.
SETTLING = timedelta(days=1)
HEADER = """\
# SGLang {release} on a CPU: every version of its lane, for Python {python} on Linux x86_64.
# Written by: scripts/lane {release} --lock
"""
SOURCE = RECIPES / "libcuda_stub.c"
SONAME = "libcuda.so.1"
STUB = LANES / "stub"
MARKER = "crashkit_is_a_stub"
COMPILER_STEP = "apt-get install gcc libc6-dev, or set CC to a C compiler that works"


@dataclass(frozen=True)
class Lane:
    """One SGLang release that can serve, in the virtual environment `root`.

    Unless it is pristine, the kit is installed and has patched SGLang. `stub_dir` is the driver stub's folder, or None
    where a real driver is installed.
    """

    release: str
    pristine: bool
    root: Path
    stub_dir: Path | None

    @property
    def name(self) -> str:
        """The name of the lane, which no other lane has."""
        return f"{self.release}-pristine" if self.pristine else self.release

    @property
    def python(self) -> Path:
        """The lane's python."""
        return self.root / "bin" / "python"

    @property
    def model_dir(self) -> Path:
        """The folder of the tiny model, which the lane's own transformers wrote."""
        return self.root / "tiny-model"

    def knows_option(self, option: str) -> bool:
        """Say whether its SGLang has the server argument `option`, such as ``--tp-size``."""
        field = option.removeprefix("--").replace("-", "_")
        return self._source_says(f"{field}:", "server_args.py", "arg_groups/**/*.py")

    def binds_replicas_alike(self) -> bool:
        """Say whether ``SGLANG_CPU_OMP_THREADS_BIND`` names the cores of `tp` ranks, also with several replicas."""
        complaint = "SGLANG_CPU_OMP_THREADS_BIND setting must be aligned with TP size"
        return self._source_says(complaint, "model_executor/model_runner.py", "utils/numa_utils.py")

    def _source_says(self, text: str, *patterns: str) -> bool:
        """Say whether `text` is in SGLang's source, without importing SGLang, which takes seconds."""
        (srt,) = self.root.glob("lib/python3*/site-packages/sglang/srt")
        return any(text in path.read_text() for pattern in patterns for path in srt.glob(pattern))

    def serve_env(self) -> dict[str, str]:
        """Return the environment in which the lane's python serves on a CPU, without network."""
        env = clean_environment()
        env |= {
            "SGLANG_USE_CPU_ENGINE": "1",
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "PYTHONUNBUFFERED": "1",
            # Compiling takes a fifth of a start's CPU time, and leaves hundreds of megabytes in the temporary folder.
            "TORCHDYNAMO_DISABLE": "1",
            # Otherwise each scheduler imports all models of SGLang, which takes a quarter of its start's CPU time.
            "SGLANG_DISABLED_MODEL_ARCHS": ",".join(self._other_models()),
            # A server and its router talk to each other on this machine only.
            **dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1,localhost"),
        }
        if self.stub_dir is not None:
            outer = env.get("LD_LIBRARY_PATH")
            env["LD_LIBRARY_PATH"] = f"{self.stub_dir}:{outer}" if outer else str(self.stub_dir)
        return env

    def _other_models(self) -> list[str]:
        return sorted({path.stem for path in self.root.glob(MODELS)} - {ARCHITECTURE})

    def write_model(self) -> None:
        """Write the tiny model with the lane's own transformers."""
        say(f"{self.root.name}: writing the tiny model")
        shutil.rmtree(self.model_dir, ignore_errors=True)
        # -P: the modules beside the writer must not shadow those of the lane.
        run_command([self.python, "-P", MODEL_WRITER, self.model_dir], timeout_s=300, env=self.serve_env())

    def patch(self) -> None:
        """Let the kit patch the lane's SGLang."""
        say(f"{self.root.name}: patching SGLang")
        run_command([self.python, "-m", "sglang_crashkit", "apply"], timeout_s=300, env=self.serve_env())

    def make(self) -> None:
        """Bring the lane's folder up to date, step by step."""
        lock = versions_of(self.release)
        self._step("versions", lambda: hash_files([lock], relative_to=lock.parent), lambda: self._install(lock))
        self._step("collector", lambda: SELDOM_COLLECTED, self._write_collector)
        self._step("model", lambda: hash_files([MODEL_WRITER]), self.write_model)
        if not self.pristine:
            self._step("kit", self._kit_stamp, self._install_kit)

    def _kit_stamp(self) -> str:
        patches = [path for path in PATCHES.rglob("*") if path.is_file()]
        # The kit's manifest of what it patched is part of the stamp: somebody may have reverted the lane by hand.
        state = self.root.glob("lib/python3*/site-packages/sglang-*.dist-info/sglang-crashkit.json")
        return hash_files([*patches, KIT_VERSION_FILE, PYPROJECT, *state])

    def _step(self, name: str, stamp: Callable[[], str], make: Callable[[], None]) -> None:
        path = self.root / STAMPS
        if _read_stamps(path).get(name) != stamp() or not self.python.exists():
            make()
            write_whole(path, json.dumps(_read_stamps(path) | {name: stamp()}, indent=1))

    def _install(self, lock: Path) -> None:
        uv, root = tool("uv"), self.root
        shutil.rmtree(root, ignore_errors=True)
        cache = Path(run_command([uv, "cache", "dir"], timeout_s=30).strip())
        for folder in (LANES, next(path for path in (cache, *cache.parents) if path.exists())):
            free = shutil.disk_usage(folder).free
            if free < LANE_BYTES:
                raise LaneError(
                    f"{free / 1e9:.1f} GB are free at {folder}, and up to {LANE_BYTES / 1e9:.0f} GB are needed",
                    next_step="free some space there, for example a lane that is not needed, and repeat",
                )
        say(f"{root.name}: installing SGLang {self.release} (minutes when nothing is cached)")
        run_command([uv, "venv", "--quiet", "--no-python-downloads", "--python", LANE_PYTHON, root], timeout_s=120)
        # Hard links to uv's cache, so that a second lane of 9 GB takes seconds and little space.
        run_command([uv, "pip", "sync", "--python", self.python, lock], timeout_s=INSTALL_TIMEOUT_S, quiet=False)

    def _write_collector(self) -> None:
        packages = self.root / "lib" / f"python{LANE_PYTHON}" / "site-packages"
        packages.mkdir(parents=True, exist_ok=True)
        write_whole(packages / "crashkit-lane.pth", SELDOM_COLLECTED)

    def _install_kit(self) -> None:
        say(f"{self.name}: installing the kit")
        uv = [tool("uv"), "pip", "install", "--quiet", "--python", self.python]
        run_command([*uv, "--no-deps", "-e", ROOT], timeout_s=300)
        self.patch()


def ensure_lane(release: str, pristine: bool = False) -> Lane:
    """Make, or find, the lane of `release`, such as ``0.5.23``; with `pristine` without the kit."""
    check_release(release)
    supported = json.loads((PATCHES / "releases.lock.json").read_text())["releases"]
    if not pristine and release not in supported:
        raise LaneError(
            f"the kit has no patches for SGLang {release}; it has for {', '.join(supported)}",
            next_step=f"scripts/lane {release} --pristine, or scripts/port_release {release}",
        )
    if not has_driver():
        find_compiler()
    root = LANES / Lane(release, pristine, LANES, None).name
    with exclusive(LANES / f".{root.name}.lock"):
        lane = Lane(release, pristine, root, ensure_stub())
        lane.make()
        return lane


def _read_stamps(path: Path) -> dict[str, str]:
    return dict(json.loads(path.read_text())) if path.is_file() else {}


def lock_path(release: str) -> Path:
    """Return the path of the lock of `release`, which need not exist."""
    return RECIPES / f"{release}.lock"


def check_release(release: str) -> None:
    """Check that `release` looks like a release of SGLang; raises LaneError."""
    if not RELEASE.fullmatch(release):
        step = f"name one of: {', '.join(locked_releases())}"
        raise LaneError(f"{release!r} is not an SGLang release such as 0.5.23", next_step=step, exit_code=2)


@contextmanager
def copied(lane: Lane) -> Iterator[Lane]:
    """Yield a copy of a lane, by hard links: installing and patching replace a file, and never write in place."""
    with tempfile.TemporaryDirectory(prefix="copy-", dir=LANES) as temporary:
        copy = Path(temporary) / "lane"
        shutil.copytree(lane.root, copy, symlinks=True, copy_function=os.link)
        yield replace(lane, root=copy)


def locked_releases() -> list[str]:
    """Return the releases that have a lock."""
    names = [path.name.removesuffix(".lock") for path in RECIPES.glob("*.lock")]
    releases = [name for name in names if RELEASE.fullmatch(name)]
    return sorted(releases, key=lambda name: [int(number) for number in re.findall(r"\d+", name)])


def versions_of(release: str) -> Path:
    """Return the file of exact versions to install for `release`, resolved if it is not locked."""
    if lock_path(release).is_file():
        return lock_path(release)
    resolved = LANES / "resolved" / f"{release}.lock"
    if not resolved.is_file():
        say(f"{release}: no lock in {RECIPES}; resolving as on the day of the release")
        write_whole(resolved, resolve(release))
        say(f"{release}: once it serves, keep these versions with: scripts/lane {release} --lock")
    return resolved


def write_lock(release: str) -> Path:
    """Keep the versions of `release` as its lock."""
    path = lock_path(release)
    if path.is_file():
        raise LaneError(f"{release} is locked already", next_step=f"delete {path} to resolve anew")
    write_whole(path, versions_of(release).read_text())
    return path


def resolve(release: str) -> str:
    """Return the text of a lock: the versions that `release` depended on when it was published.

    Later versions of its dependencies break an old release.
    """
    compile_ = [tool("uv"), "pip", "compile", "--quiet", "--no-header", "--no-annotate", "--prerelease=allow"]
    compile_ += ["--python-version", LANE_PYTHON]
    wanted = LANES / "resolved" / f"{release}.in"
    write_whole(wanted, "".join(f"{line}\n" for line in (f"sglang=={release}", *EXTRAS)))
    for option in ("constraint", "override"):
        limits = RECIPES / f"{release}.{option}s"
        compile_ += [f"--{option}", limits] if limits.is_file() else []
    try:
        facts = run_command([*compile_, "--no-deps", "--format", "pylock.toml", wanted], timeout_s=120)
    except LaneError as error:
        raise LaneError(
            f"SGLang {release} cannot be found or reached on the package registry: {error.message}",
            next_step="check the release's name and the network, and repeat",
        ) from error
    # The time of upload, where the registry has it.
    entry = facts.partition('name = "sglang"')[2].partition("[[packages]]")[0]
    if match := re.search(r"upload-time = (\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)", entry):
        date = datetime.fromisoformat(match.group(1)).replace(tzinfo=timezone.utc) + SETTLING
        compile_ += ["--exclude-newer", date.strftime("%Y-%m-%dT%H:%M:%SZ")]
    # The kit's own dependencies are part of the lock: the kit itself is installed without dependencies.
    versions = run_command([*compile_, wanted, PYPROJECT], timeout_s=600)
    return HEADER.format(release=release, python=LANE_PYTHON) + versions


def has_driver() -> bool:
    """Say whether the dynamic loader finds a real CUDA driver library."""
    try:
        library = ctypes.CDLL(SONAME)
    except OSError:
        return False
    # The library may be the stub: this process may run with a lane's LD_LIBRARY_PATH.
    return not hasattr(library, MARKER)


def find_compiler() -> list[str]:
    """Return the C compiler's command: ``$CC``, or the first of cc, gcc and clang."""
    commands = [shlex.split(os.environ.get("CC", ""))] if os.environ.get("CC") else [["cc"], ["gcc"], ["clang"]]
    for command in commands:
        if command and shutil.which(command[0]):
            return command
    names = ", ".join(shlex.join(command) for command in commands)
    raise LaneError(f"no C compiler ({names}) on PATH; the driver stub needs one", next_step=COMPILER_STEP)


def ensure_stub() -> Path | None:
    """Compile, or find, the stub; return the folder for ``LD_LIBRARY_PATH``, None where a real driver is installed."""
    if has_driver():
        return None
    library, stamp, wanted = STUB / SONAME, STUB / "source-sha256", hash_files([SOURCE])
    with exclusive(LANES / ".stub.lock"):
        if library.is_file() and stamp.is_file() and stamp.read_text() == wanted:
            return STUB
        say(f"stub: compiling {library}")
        STUB.mkdir(parents=True, exist_ok=True)
        # A new file, renamed: a running server may have the old one mapped.
        fresh = STUB / f"{SONAME}.new"
        flags = ["-shared", "-fPIC", "-O1", f"-Wl,-soname,{SONAME}"]
        try:
            run_command([*find_compiler(), *flags, "-o", fresh, SOURCE], timeout_s=60)
        except LaneError as error:
            raise LaneError(f"cannot make the driver stub: {error.message}", next_step=COMPILER_STEP) from error
        fresh.replace(library)
        write_whole(stamp, wanted)
    return STUB
