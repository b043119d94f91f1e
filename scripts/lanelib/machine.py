"""What the machine must bring: a python, a C compiler, disk space, Debian libraries."""

from __future__ import annotations

import ctypes
import os
import shlex
import shutil
import sys
from pathlib import Path

from lanelib.commands import clean_environment, run_command, say
from lanelib.errors import LaneError

#: The locks were resolved for this python.
LANE_PYTHON = (3, 11)
#: An SGLang release with torch and CUDA's libraries, unpacked.
LANE_BYTES = 10 * 10**9
#: Shared libraries of the KV transfer engine, and the Debian package of each.
PD_LIBRARIES = {
    "libibverbs.so.1": "libibverbs1",
    "librdmacm.so.1": "librdmacm1",
    "libnuma.so.1": "libnuma1",
    "liburing.so.2": "liburing2",
}
#: Loaded by libibverbs at run time, so that no soname shows whether it is there.
PD_PACKAGES = [*PD_LIBRARIES.values(), "ibverbs-providers"]
PROBE = "import ensurepip, sys, venv; print(*sys.version_info[:2], sys.executable)"


def find_python() -> Path:
    """Return a Python 3.11 that can make virtual environments.

    Raises:
        LaneError: there is none.
    """
    name = f"python{LANE_PYTHON[0]}.{LANE_PYTHON[1]}"
    candidates = [sys.executable] if sys.version_info[:2] == LANE_PYTHON else []
    found = shutil.which(name)
    candidates += [found] if found else []
    for candidate in candidates:
        try:
            answer = run_command([candidate, "-c", PROBE], timeout_s=30)
        except LaneError:
            # A shim without a python behind it, or a python without venv: the next one may do.
            continue
        # Asked, not assumed: what PATH finds may be a wrapper script.
        major, minor, executable = answer.strip().splitlines()[-1].split(" ", 2)
        if (int(major), int(minor)) == LANE_PYTHON:
            return Path(executable)
    if candidates:
        raise LaneError(
            f"{candidates[-1]} cannot make virtual environments (no venv or ensurepip)",
            next_step=f"apt-get install {name}-venv",
        )
    raise LaneError(
        f"{name} is not on PATH; the lanes are locked for it",
        next_step=f"apt-get install {name} {name}-venv, or put one on PATH",
    )


def find_compiler() -> list[str]:
    """Return the C compiler's command: ``$CC``, or the first of cc, gcc and clang.

    Raises:
        LaneError: there is none.
    """
    chosen = shlex.split(os.environ.get("CC", ""))
    if chosen:
        if shutil.which(chosen[0]) is None:
            raise LaneError(f"the C compiler {chosen[0]} that CC names is not on PATH", next_step="unset CC")
        return chosen
    for name in ("cc", "gcc", "clang"):
        if shutil.which(name):
            return [name]
    raise LaneError(
        "no C compiler (cc, gcc or clang) on PATH; the driver stub needs one",
        next_step="apt-get install gcc libc6-dev",
    )


def require_disk(path: Path, needed: int = LANE_BYTES) -> None:
    """Check that `needed` bytes are free where `path` is or will be.

    Raises:
        LaneError: they are not.
    """
    existing = path
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise LaneError(
            f"{free / 1e9:.1f} GB are free at {existing}, and up to {needed / 1e9:.0f} GB are needed",
            next_step="free some space there, for example a lane no longer needed, and repeat",
        )


def missing_libraries() -> list[str]:
    """Return the Debian packages whose library the dynamic loader does not find."""
    missing = []
    for soname, package in PD_LIBRARIES.items():
        try:
            ctypes.CDLL(soname)
        except OSError:
            missing.append(package)
    return missing


def require_libraries() -> None:
    """Check the libraries that prefill/decode disaggregation needs.

    Raises:
        LaneError: one is missing.
    """
    missing = missing_libraries()
    if missing:
        raise LaneError(
            f"prefill/decode needs system libraries that are not installed: {', '.join(missing)}",
            next_step=f"apt-get install {' '.join(PD_PACKAGES)}",
        )


def install_libraries() -> None:
    """Install the Debian packages that prefill/decode disaggregation needs, as root.

    Raises:
        LaneError: not root, or apt-get failed.
    """
    if not missing_libraries():
        return
    if os.geteuid() != 0:
        raise LaneError(
            "installing system packages needs root",
            next_step=f"sudo apt-get install {' '.join(PD_PACKAGES)}",
        )
    env = clean_environment() | {"DEBIAN_FRONTEND": "noninteractive"}
    say(f"installing {' '.join(PD_PACKAGES)}")
    run_command(["apt-get", "update", "-qq"], timeout_s=300, env=env)
    install = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *PD_PACKAGES]
    run_command(install, timeout_s=600, env=env)
    require_libraries()
