"""Remove what servers left whose crash handler was ended with them, as with process 1 of a container: it tells nothing.

Whoever may be at work holds a lock on its folder. A record that nobody took in is no empty folder, and stays.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from sglang_crashkit.incident.recovery import SPOOL
from sglang_crashkit.kernel import procfs
from sglang_crashkit.kernel.folder_lock import FolderLock
from sglang_crashkit.kernel.identity_key import own_namespace

#: A folder without an owner may be one that its owner is about to lock, for this long, in seconds.
_AGE_SECS = 10.0
_MOST = 1000


def remove_empty_spools(incidents: Path) -> None:
    """Remove the spools below `incidents` that are empty and that no crash handler uses."""
    for folder in _free_folders(incidents, SPOOL):
        if _is_of_a_dead_server(folder.name.removeprefix(SPOOL)) is not False:
            with contextlib.suppress(OSError):
                folder.rmdir()


def remove_runtime_folders(run: Path) -> None:
    """Remove the runtime folders below `run` of servers of this PID namespace that are gone with their handlers.

    A server that lives on without its handler still has its sockets there.
    """
    for folder in _free_folders(run, ""):
        if _is_of_a_dead_server(folder.name):
            shutil.rmtree(folder, ignore_errors=True)


def _free_folders(parent: Path, prefix: str) -> Iterator[Path]:
    """Yield this user's folders in `parent` that nobody has locked, locked."""
    try:
        names = [entry.name for entry in os.scandir(parent) if entry.name.startswith(prefix)]
    except OSError:
        return
    for name in names[:_MOST]:
        lock = FolderLock(parent / name)
        with contextlib.suppress(OSError):
            status = (parent / name).lstat()
            is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
            if not is_own or time.time() - status.st_mtime < _AGE_SECS:
                continue
            try:
                if lock.acquire() == "held":
                    yield parent / name
            finally:
                lock.release()


def _is_of_a_dead_server(key: str) -> bool | None:
    """Say whether the server with this key is gone; None where that cannot be seen from here."""
    numbers = key.split("-")
    if len(numbers) != 3 or not all(number.isascii() and number.isdigit() for number in numbers):
        return None
    pid, start_ticks, namespace = map(int, numbers)
    if namespace != own_namespace():
        return None
    found = procfs.read_stat(pid)
    return found is None or found.start_ticks != start_ticks or found.state in "ZX"
