"""A stand-in for the CUDA driver library on a machine that has none.

SGLang's compiled kernels link against ``libcuda.so.1`` even when they serve on a CPU.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

from lanelib.commands import run_command, say
from lanelib.errors import LaneError
from lanelib.locking import exclusive
from lanelib.machine import find_compiler
from lanelib.paths import LANES, RECIPES, hash_files

SOURCE = RECIPES / "libcuda_stub.c"
SONAME = "libcuda.so.1"
STUB = LANES / "stub"
MARKER = "crashkit_is_a_stub"


def has_driver() -> bool:
    """Say whether the dynamic loader finds a real CUDA driver library."""
    try:
        library = ctypes.CDLL(SONAME)
    except OSError:
        return False
    # A lane's own LD_LIBRARY_PATH may be set around this process.
    return not hasattr(library, MARKER)


def ensure_stub() -> Path | None:
    """Compile, or find, the stub.

    Returns:
        The folder to put on ``LD_LIBRARY_PATH``, or None where a real driver is installed.

    Raises:
        LaneError: there is no C compiler, or it failed.
    """
    if has_driver():
        return None
    if not _is_current():
        with exclusive(LANES / ".stub.lock"):
            if not _is_current():
                _compile()
    return STUB


def _stamp() -> Path:
    return STUB / "source-sha256"


def _is_current() -> bool:
    stamp = _stamp()
    if not (stamp.is_file() and (STUB / SONAME).is_file()):
        return False
    return stamp.read_text() == hash_files([SOURCE])


def _compile() -> None:
    compiler = find_compiler()
    STUB.mkdir(parents=True, exist_ok=True)
    say(f"stub: compiling {STUB / SONAME}")
    # A new file, renamed: a running server may have the old one mapped.
    fresh = STUB / f"{SONAME}.new"
    flags = ["-shared", "-fPIC", "-O1", f"-Wl,-soname,{SONAME}"]
    try:
        run_command([*compiler, *flags, "-o", fresh, SOURCE], timeout_s=60)
    except LaneError as error:
        raise LaneError(
            f"the C compiler cannot make the driver stub: {error.message}",
            next_step="apt-get install gcc libc6-dev, or set CC to a C compiler that works",
        ) from error
    fresh.replace(STUB / SONAME)
    _stamp().write_text(hash_files([SOURCE]))
