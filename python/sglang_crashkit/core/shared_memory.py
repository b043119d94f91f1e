"""POSIX shared memory and semaphores that a killed server leaves in ``/dev/shm``.

Whoever is killed by SIGKILL unlinks nothing, and Python's resource tracker, which would, is killed with the rest. What
counts as a server's own was mapped by one of its processes, has a name that Python, torch, NCCL or SGLang give, and is
mapped by nobody any more. Anything else below ``/dev/shm``, such as a model's weights, is left alone.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path("/dev/shm")  # noqa: S108 - where Linux has it
_MAPPED = re.compile(rb"^\S+ \S+ \S+ \S+ (\d+) +/dev/shm/([^/\n]+)$", re.MULTILINE)
_NAMES = re.compile(
    r"psm_[0-9a-f]+"  # multiprocessing.shared_memory
    r"|sem\.mp-\w+"  # multiprocessing's locks
    r"|torch_\d+_\d+_\d+"
    r"|nccl-\w+"
    r"|sgl_shm_\w+"  # SGLang's, with the creator's pid
    r"|sglang_(loads|host_pool)_[\w.-]+"
    r"|multi_tokenizer_args_\d+"
)


@dataclass(frozen=True)
class Segment:
    """A file of ``/dev/shm``: its name and its inode, because a name may be given again."""

    name: str
    inode: int


def mapped_by(pid: int) -> set[Segment]:
    """Return the segments with a known kind of name that process `pid` maps; none where it cannot be looked into."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_bytes()
    except OSError:
        return set()
    found = {Segment(os.fsdecode(name), int(inode)) for inode, name in _MAPPED.findall(maps)}
    return {segment for segment in found if _NAMES.fullmatch(segment.name)}


def of_server(pid: int) -> set[Segment]:
    """Return the segments that bear the pid of a server's main process and are not mapped all the time."""
    name = f"multi_tokenizer_args_{pid}"
    try:
        return {Segment(name, (FOLDER / name).lstat().st_ino)}
    except OSError:
        return set()


def remove_unused(segments: Iterable[Segment]) -> list[str]:
    """Unlink those of `segments` that are there still, are this user's and are mapped by no process.

    Returns:
        The names of those that were removed.
    """
    wanted = {segment for segment in segments if _is_there(segment)}
    if wanted:
        # One in use, by another server that was given it, say, stays.
        for path in Path("/proc").iterdir():
            if path.name.isdigit():
                wanted -= mapped_by(int(path.name))
    removed = []
    for segment in sorted(wanted, key=lambda segment: segment.name):
        with contextlib.suppress(OSError):
            (FOLDER / segment.name).unlink()
            removed.append(segment.name)
    return removed


def _is_there(segment: Segment) -> bool:
    try:
        stat = (FOLDER / segment.name).lstat()
    except OSError:
        return False
    return stat.st_ino == segment.inode and stat.st_uid == os.geteuid()
