"""Where request journals lie: one folder a server, one ring for each process of it that takes requests in.

::

    <host folder>/journal/<server's pid>-<its start time>/<pid>-<start time>.ring

The folder is locked (flock(2)) by the server's crash handler, and each ring by its writer, as long as they live: what
nobody holds was left behind.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from pathlib import Path

from sglang_crashkit.core import procfs

_FOLDER = "journal"
_NAME = re.compile(r"(\d+)-(\d+)")
_RING = re.compile(r"(\d+)-(\d+)(?:-\d+)?\.ring")
_MOUNTS = Path("/proc/self/mountinfo")
#: File systems whose mapped pages keep their blocks and are written without another machine's help. Elsewhere a store
#: may wait for a server that is gone (NFS, Lustre, FUSE) or end in SIGBUS on a full disk (copy on write).
_SAFE_TO_MAP = frozenset({"ext2", "ext3", "ext4", "xfs", "f2fs", "tmpfs", "overlay"})


def journal_folder(host_folder: Path, pid: int, start_ticks: int) -> Path:
    """Return the folder of the journals of the server `pid` that started at `start_ticks`."""
    return host_folder / _FOLDER / f"{pid}-{start_ticks}"


def new_ring(folder: Path) -> Path:
    """Return a path for a ring of this process that is not taken."""
    stat = procfs.read_stat(os.getpid())
    name = f"{os.getpid()}-{stat.start_ticks if stat else 0}"
    path, number = folder / f"{name}.ring", 1
    while path.exists():
        path, number = folder / f"{name}-{number}.ring", number + 1
    return path


def rings_in(folder: Path) -> list[Path]:
    """Return the rings in a server's folder, links left out; empty where it cannot be read."""
    try:
        return sorted(p for p in folder.iterdir() if _RING.fullmatch(p.name) and p.is_file() and not p.is_symlink())
    except OSError:
        return []


def writer_of(ring: Path) -> int:
    """Return the pid of the process that wrote a ring, by its name."""
    match = _RING.fullmatch(ring.name)
    return int(match[1]) if match else 0


def is_writer_gone(ring: Path) -> bool:
    """Say whether the process that wrote a ring, by its name, is there no more."""
    match = _RING.fullmatch(ring.name)
    if match is None:
        return False
    stat = procfs.read_stat(int(match[1]))
    # What a process forked holds its lock for longer than it lives.
    return stat is None or stat.state in "ZX" or int(match[2]) not in (0, stat.start_ticks)


def is_safe_to_map(folder: Path) -> bool:
    """Say whether storing into a mapped file in `folder`, which is there, neither blocks for long nor kills."""
    try:
        device = folder.stat().st_dev
        lines = _MOUNTS.read_text().splitlines()
    except OSError:
        return False
    wanted = f"{os.major(device)}:{os.minor(device)}"
    # man proc_pid_mountinfo: field 3 is the device, and the type follows the separator.
    return any(line.split()[2] == wanted and line.partition(" - ")[2].split()[0] in _SAFE_TO_MAP for line in lines)


def lock(path: Path) -> int | None:
    """Return a descriptor that holds the lock of a folder or a ring; None where another holds it or it is gone."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def unlock(descriptor: int | None) -> None:
    """Give a lock back."""
    if descriptor is not None:
        os.close(descriptor)


def left_behind(host_folder: Path) -> list[Path]:
    """Return the folders whose server, crash handler and writers are all gone."""
    try:
        folders = sorted(path for path in (host_folder / _FOLDER).iterdir() if _NAME.fullmatch(path.name))
    except OSError:
        return []
    return [folder for folder in folders if not _is_in_use(folder)]


def remove(folder: Path) -> None:
    """Remove a server's folder, the rings in it and, where it was the last, the folder of them all.

    What cannot be removed, or is no ring, stays.
    """
    for ring in rings_in(folder):
        with contextlib.suppress(OSError):
            ring.unlink()
    with contextlib.suppress(OSError):
        folder.rmdir()
        folder.parent.rmdir()


def _is_in_use(folder: Path) -> bool:
    pid, start_ticks = map(int, folder.name.split("-"))
    stat = procfs.read_stat(pid)
    if stat is not None and stat.start_ticks == start_ticks and stat.state != "Z":
        return True
    for path in [folder, *rings_in(folder)]:
        descriptor = lock(path)
        if descriptor is None:
            return True
        unlock(descriptor)
    return False
