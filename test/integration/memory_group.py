"""A memory cgroup of a test's own, of version 1 or 2, so that the kernel's OOM killer really comes."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from unit.support.waiting import wait_until

_V1 = Path("/sys/fs/cgroup/memory")
_V2 = Path("/sys/fs/cgroup")


class NoMemoryGroupError(Exception):
    """This machine lets no one make a memory cgroup; the message says why."""


@dataclass(frozen=True)
class MemoryGroup:
    """A memory cgroup."""

    path: Path  # its folder
    limit: Path  # the file that holds its limit in bytes
    usage: Path  # the file that holds its use in bytes

    def add(self, pid: int) -> None:
        """Move a process into it; what that process starts from now on is born in it."""
        (self.path / "cgroup.procs").write_text(str(pid))

    def leave_room(self, room_bytes: int) -> None:
        """Set the limit so that no more than `room_bytes` can be taken beyond what cannot be given back."""
        for _ in range(50):
            try:
                self.limit.write_text(str(int(self.usage.read_text()) + room_bytes))
            except OSError:
                # Other memory was taken in between, or pages are being given back.
                time.sleep(0.05)
            else:
                return
        raise NoMemoryGroupError(f"{self.limit} takes no limit")


@contextlib.contextmanager
def memory_group(name: str) -> Iterator[MemoryGroup]:
    """Make a memory cgroup and remove it at the end, when its processes are gone.

    Raises:
        NoMemoryGroupError: there is no such file system, or it is read-only.
    """
    is_v1 = (_V1 / "memory.limit_in_bytes").exists()
    path = (_V1 if is_v1 else _V2) / f"{name}-{os.getpid()}"
    limit, usage = ("memory.limit_in_bytes", "memory.usage_in_bytes") if is_v1 else ("memory.max", "memory.current")
    try:
        path.mkdir()
    except OSError as error:
        raise NoMemoryGroupError(f"no memory cgroup can be made at {path}: {error.strerror}") from error
    try:
        if not (path / limit).exists():
            raise NoMemoryGroupError(f"{path} has no memory controller")
        yield MemoryGroup(path, path / limit, path / usage)
    finally:

        def is_removed() -> bool:
            with contextlib.suppress(OSError):
                path.rmdir()
            return not path.exists()

        wait_until(is_removed, f"{path} has no process any more", 10)
