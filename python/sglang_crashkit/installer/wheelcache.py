"""Find upstream's wheels in the cache, or let pip download them into it.

The cache is ``$XDG_CACHE_HOME/sglang-crashkit/wheels``, by default below ``~/.cache``.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sglang_crashkit.errors import CrashkitError, NothingToDoError, RefusedError
from sglang_crashkit.installer.lockfile import sha256_hex
from sglang_crashkit.installer.process import run_tool

#: Seconds for one download; the largest wheels are about 40 MB.
_DOWNLOAD_TIMEOUT = 900.0


@dataclass(frozen=True)
class WheelName:
    """The parts of a wheel's file name, ``sglang-0.5.23-cp311-cp311-manylinux_2_34_x86_64.whl``."""

    distribution: str
    version: str
    python_tag: str
    abi_tag: str
    platform_tag: str

    @classmethod
    def parse(cls, name: str) -> WheelName:
        """Split the file name `name`.

        Raises:
            RefusedError: it is not a wheel's name, or has a build number.
        """
        parts = name.removesuffix(".whl").split("-")
        if not name.endswith(".whl") or len(parts) != 5:
            raise RefusedError(f"{name} is not named like a wheel of SGLang")
        return cls(*parts)

    @property
    def tags(self) -> str:
        """``cp311-cp311-manylinux_2_34_x86_64``."""
        return f"{self.python_tag}-{self.abi_tag}-{self.platform_tag}"


def cache_folder() -> Path:
    """Return the folder of the cached wheels, which need not exist."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "sglang-crashkit" / "wheels"


def cached_wheels(release: str) -> list[Path]:
    """Return the cached wheels of `release`, by name."""
    return sorted(cache_folder().glob(f"sglang-{release}-*.whl"))


def check_wheel(wheel: Path, known: Mapping[str, str]) -> None:
    """Check `wheel` against the sha256 that `known` has for its file name, if it has one.

    Raises:
        RefusedError: they differ.
    """
    expected = known.get(wheel.name)
    if expected is not None and sha256_hex(wheel.read_bytes()) != expected:
        raise RefusedError(
            f"{wheel} is not upstream's wheel: its sha256 is not the one in the lock",
            next_step=f"rm {wheel}",
        )


def find_wheel(release: str, known: Mapping[str, str], *, download: bool, python_tag: str | None = None) -> Path:
    """Return a wheel of `release`: one that `known` names, else any in the cache.

    Args:
        release: the release.
        known: file name → sha256, from the lock; may be empty.
        download: let pip download it where the cache has none.
        python_tag: ``cp311`` for a wheel that this python can install; None for any.

    Raises:
        NothingToDoError: the cache has none and `download` is false.
        RefusedError: its sha256 is not the one in the lock.
        CrashkitError: the download failed.
    """
    cached = [wheel for wheel in cached_wheels(release) if _fits(wheel.name, python_tag)]
    found = next((wheel for wheel in cached if wheel.name in known), cached[0] if cached else None)
    if found is None:
        if not download:
            suited = "" if python_tag is None else f" for {python_tag}"
            raise NothingToDoError(
                f"no wheel of SGLang {release}{suited} in {cache_folder()}",
                next_step=f"sglang-crashkit wheel {release} --out DIR --download",
            )
        found = _download(release, next((name for name in sorted(known) if _fits(name, python_tag)), None))
    check_wheel(found, known)
    return found


def _fits(name: str, python_tag: str | None) -> bool:
    """Return whether a python with `python_tag` can install the wheel called `name`."""
    wheel = WheelName.parse(name)
    return python_tag is None or wheel.python_tag in (python_tag, "py3") or wheel.abi_tag == "abi3"


def _download(release: str, name: str | None) -> Path:
    """Download the wheel called `name`, or the one that fits pip's own python."""
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".download-") as temporary:
        options = ["--no-deps", "--only-binary=:all:", "--dest", temporary, *_tag_options(name)]
        argv = [*_pip(), "download", "--quiet", "--disable-pip-version-check", *options]
        finished = run_tool([*argv, f"sglang=={release}"], timeout=_DOWNLOAD_TIMEOUT)
        wheels = list(Path(temporary).glob("*.whl"))
        if finished.exit_code != 0 or len(wheels) != 1:
            lines = finished.stderr.strip().splitlines() or ["no output"]
            raise CrashkitError(f"pip could not download sglang=={release}: {lines[-1]}")
        return wheels[0].replace(folder / wheels[0].name)


def _tag_options(name: str | None) -> list[str]:
    """Return pip's options for the wheel called `name`, whatever python pip runs on."""
    if name is None:
        return []
    wheel = WheelName.parse(name)
    options = ["--platform", wheel.platform_tag, "--abi", wheel.abi_tag]
    if wheel.python_tag.startswith("cp"):
        options += ["--implementation", "cp", "--python-version", wheel.python_tag[2:]]
    return options


def _pip() -> list[str]:
    """Return the command line of a pip: this python's own, else that of one on PATH."""
    for python in (sys.executable, shutil.which("python3"), shutil.which("python")):
        if python is None:
            continue
        argv = [python, "-m", "pip"]
        if run_tool([*argv, "--version"], timeout=60).exit_code == 0:
            return argv
    raise CrashkitError(
        f"{sys.executable} has no pip to download with",
        next_step=f"{sys.executable} -m ensurepip",
    )
