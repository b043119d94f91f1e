"""A stand-in for the CUDA driver library on a machine that has none.

SGLang's compiled kernels link against ``libcuda.so.1`` even when they serve on a CPU.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import shutil
from pathlib import Path

from lanelib.commands import exclusive, run_command, say
from lanelib.errors import LaneError
from lanelib.paths import LANES, RECIPES, hash_files, write_whole

SOURCE = RECIPES / "libcuda_stub.c"
SONAME = "libcuda.so.1"
STUB = LANES / "stub"
MARKER = "crashkit_is_a_stub"
COMPILER_STEP = "apt-get install gcc libc6-dev, or set CC to a C compiler that works"


def has_driver() -> bool:
    """Say whether the dynamic loader finds a real CUDA driver library."""
    try:
        library = ctypes.CDLL(SONAME)
    except OSError:
        return False
    # A lane's own LD_LIBRARY_PATH may be set around this process.
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
