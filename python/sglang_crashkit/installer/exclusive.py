"""Let one process at a time change an installation."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from sglang_crashkit.errors import CrashkitError

#: In the dist-info folder while a change runs.
LOCK_FILE = ".sglang-crashkit.lock"
#: Seconds to wait for another process; a change takes well under one.
WAIT = 5.0


@contextmanager
def exclusive(dist_info: Path, *, wait: float = WAIT) -> Iterator[None]:
    """Hold the installation's lock.

    The kernel drops the lock of a process that dies, so a lock file alone holds nobody up.

    Args:
        dist_info: SGLang's dist-info folder.
        wait: seconds to wait for another process.

    Raises:
        CrashkitError: another process still has it.
        OSError: the lock file cannot be made.
    """
    file = dist_info / LOCK_FILE
    deadline = time.monotonic() + wait
    descriptor = _try_lock(file)
    while descriptor is None:
        if time.monotonic() > deadline:
            raise CrashkitError(
                f"another sglang-crashkit{_holder(file)} is changing {dist_info.parent}",
                next_step="wait for it to end and run this again",
            )
        time.sleep(0.05)
        descriptor = _try_lock(file)
    try:
        yield
    finally:
        # Removed while it is still held: who opened it meanwhile sees that the name is gone.
        file.unlink(missing_ok=True)
        os.close(descriptor)


def _try_lock(file: Path) -> int | None:
    """Return the descriptor that holds the lock, None while another process has it."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The name may have gone with the process that held the lock until now.
        held = os.fstat(descriptor).st_ino == file.stat().st_ino
    except (BlockingIOError, FileNotFoundError):
        held = False
    except BaseException:
        os.close(descriptor)
        raise
    if not held:
        os.close(descriptor)
        return None
    # The pid is for the other's error only: a full disk shows where it matters.
    with suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())
    return descriptor


def _holder(file: Path) -> str:
    try:
        pid = file.read_text().strip()
    except OSError:
        return ""
    return f" (pid {pid})" if pid else ""
