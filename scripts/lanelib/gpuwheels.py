"""The wheels that a lane on a GPU needs beside the machine's own torch: named, fetched, stripped."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from lanelib.commands import run_command, say
from lanelib.errors import LaneError
from lanelib.kernelwheel import Generation, strip_kernels
from lanelib.paths import RECIPES
from lanelib.resolve import check_release, lock_path
from lanelib.tools import LOCK as TOOLS_LOCK

DOWNLOAD_TIMEOUT_S = 1800
#: A wheel says the oldest C library that it runs with; pip takes each of these for another platform.
_GLIBC_MINORS = range(5, 40)
_OLDER_PLATFORMS = ("manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64")
_KERNELS = "sglang_kernel-*.whl"


def names_path(release: str) -> Path:
    """Return where the names of the packages of `release` on a GPU are kept, whether or not they are."""
    return RECIPES / f"{release}.gpu"


def gpu_releases() -> list[str]:
    """Return the releases that can be made on a GPU."""
    return sorted(path.name.removesuffix(".gpu") for path in RECIPES.glob("*.gpu"))


def requirements(release: str) -> list[str]:
    """Return what to install for `release` beside torch, as ``NAME==VERSION``.

    Raises:
        LaneError: the release is not known here, or its lock does not name a package.
    """
    path = names_path(check_release(release))
    if not path.is_file():
        raise LaneError(
            f"it is not known what SGLang {release} needs on a GPU",
            next_step=f"name one of: {', '.join(gpu_releases())}",
        )
    lines = [line.strip() for line in path.read_text().splitlines()]
    versions = _versions_in(TOOLS_LOCK) | _versions_in(lock_path(release))
    names = [line for line in lines if line and not line.startswith("#")]
    missing = [name for name in names if name not in versions]
    if missing:
        raise LaneError(f"{lock_path(release).name} does not lock {', '.join(missing)}", next_step=f"edit {path}")
    return [f"{name}=={versions[name]}" for name in names]


def torch_version(release: str) -> str:
    """Return the version of torch that `release` is built for."""
    return _versions_in(lock_path(release))["torch"]


def fetch_wheels(release: str, folder: Path, python: tuple[int, int], generation: Generation) -> list[Path]:
    """Fetch what `requirements` names from the package index into `folder`, and strip the kernels.

    Args:
        release: SGLang's version.
        folder: for the wheels; what is there already is not fetched again, and what is not wanted any more is removed.
        python: the version of Python that they are for.
        generation: of the GPU that they are for.

    Raises:
        LaneError: pip is missing, or one could not be fetched.
    """
    folder.mkdir(parents=True, exist_ok=True)
    wanted = requirements(release)
    for path in folder.glob("*.whl"):
        if _requirement_of(path) not in {_canonical(line) for line in wanted}:
            path.unlink()
    present = {_requirement_of(path) for path in folder.glob("*.whl")}
    missing = [line for line in wanted if _canonical(line) not in present]
    if missing:
        say(f"fetching {len(missing)} wheels of SGLang {release} for Python {python[0]}.{python[1]}")
        platforms = [f"manylinux_2_{minor}_x86_64" for minor in reversed(_GLIBC_MINORS)]
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += ["--only-binary=:all:", "--implementation", "cp", "--python-version", f"{python[0]}.{python[1]}"]
        for platform in (*platforms, *_OLDER_PLATFORMS):
            command += ["--platform", platform]
        run_command([*command, "--dest", str(folder), *missing], timeout_s=DOWNLOAD_TIMEOUT_S)
    for wheel in folder.glob(_KERNELS):
        saved = strip_kernels(wheel, generation)
        if saved > 1 << 20:
            say(f"{wheel.name}: {saved / 1e6:.0f} MB of kernels left out that this GPU does not load")
    return sorted(folder.glob("*.whl"))


def _versions_in(lock: Path) -> dict[str, str]:
    rows = re.findall(r"^([\w.-]+)==([^\s;]+)", lock.read_text(), re.MULTILINE)
    return {name.lower(): version for name, version in rows}


def _canonical(requirement: str) -> str:
    name, _, version = requirement.partition("==")
    return f"{re.sub(r'[-_.]+', '-', name).lower()}=={version}"


def _requirement_of(wheel: Path) -> str:
    name, version, *_tags = wheel.name.split("-")
    return _canonical(f"{name}=={version}")
