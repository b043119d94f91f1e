"""POSIX shared memory and semaphores that a killed server leaves in ``/dev/shm``.

A process that gets SIGKILL unlinks nothing, and Python's resource tracker, which would, is killed too. The segments
that a server had mapped and left are reported. A segment is removed only if no process can use it any more: its name
has the pid of a dead process of the server, and no process of the machine maps it. Only the host's PID namespace shows
all processes: containers may share ``/dev/shm`` with each other and with the host, and from inside a container neither
their processes are visible nor whether its ``/dev/shm`` is shared. A name without a pid (``psm_*``, ``nccl-*``,
``sem.mp-*``, ``sglang_loads_*``) does not identify its owner, so such a segment stays.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from sglang_crashkit.kernel import procfs

FOLDER = Path("/dev/shm")  # noqa: S108 - where Linux has it
_MAPPED = re.compile(rb"^\S+ \S+ \S+ \S+ (\d+) +/dev/shm/([^/\n]+)$", re.MULTILINE)
#: Names that contain the pid of their creator; SGLang's are described in its ``srt/utils/stale_shm_cleanup.py``.
_WITH_PID = re.compile(
    r"torch_(?P<torch>\d+)_\d+_\d+"
    r"|sgl_shm_[a-z]+_(?P<sglang>\d+)_[0-9a-f]{8}"
    r"|multi_tokenizer_args_(?P<tokenizers>\d+)"
)
_WITHOUT_PID = re.compile(
    r"psm_[0-9a-f]+"  # multiprocessing.shared_memory
    r"|sem\.mp-\w+"  # multiprocessing's locks
    r"|nccl-\w+"
    r"|sgl_shm_\w+"  # in another form than above
    r"|sglang_(loads|host_pool)_[\w.-]+"
)
#: The longest time that reading the mappings of all processes may take, in seconds.
_LOOK_SECS = 5.0


@dataclass(frozen=True)
class Segment:
    """A file of ``/dev/shm``, by name and inode, because a name may be reused."""

    name: str
    inode: int

    @property
    def creator(self) -> int | None:
        """The pid in its name; None if the name contains no pid."""
        match = _WITH_PID.fullmatch(self.name)
        return int(next(filter(None, match.groups()))) if match else None


@dataclass(frozen=True)
class OrphanedSegment:
    """A segment that is not removed."""

    name: str  # in ``/dev/shm``
    bytes: int  # the memory that it takes
    why: str  # why it was not removed


def mapped_by(pid: int) -> set[Segment]:
    """Return the segments with a known kind of name that process `pid` maps.

    Raises:
        OSError: the mappings of `pid` cannot be read.
    """
    found = {Segment(os.fsdecode(name), int(inode)) for inode, name in _MAPPED.findall(procfs.read_maps(pid))}
    return {its for its in found if _WITH_PID.fullmatch(its.name) or _WITHOUT_PID.fullmatch(its.name)}


def of_server(pid: int) -> set[Segment]:
    """Return the segments that are named after the pid of a server's main process and are not always mapped."""
    name = f"multi_tokenizer_args_{pid}"
    try:
        return {Segment(name, (FOLDER / name).lstat().st_ino)}
    except OSError:
        return set()


def of_gone() -> list[OrphanedSegment]:
    """Return this user's segments whose names have the pid of a process that is gone, and why each may be in use.

    Nothing is removed; see `clear`. `OrphanedSegment.why` is empty if no process maps the segment.

    Raises:
        OSError: `FOLDER` is missing or cannot be read.
    """
    there = []
    for path in sorted(FOLDER.iterdir()):
        with contextlib.suppress(OSError):
            there.append(Segment(path.name, path.lstat().st_ino))
    left = {one for one in there if one.creator is not None and procfs.read_stat(one.creator) is None}
    sizes = {one: size for one in left if (size := _size_of(one)) is not None}
    used = why_in_use(sizes) if sizes else {}
    return [OrphanedSegment(one.name, sizes[one], used[one]) for one in there if one in sizes]


def clear(segments: Iterable[Segment], dead: Mapping[int, int]) -> tuple[list[str], list[OrphanedSegment]]:
    """Unlink those of `segments`, which a server's processes had mapped, that no process can use any more.

    `dead` has the start times of the server's processes by pid if all of them are dead. It is empty if a process of the
    server lives; then nothing is removed.

    Returns:
        The names of the removed segments, and the segments that remain.
    """
    removed, left = [], []
    there = sorted((one for one in segments if _size_of(one) is not None), key=lambda segment: segment.name)
    why_not = {one: _why_not_ours(one, dead) for one in there}
    candidates = {one for one, why in why_not.items() if not why}
    if candidates:
        why_not |= why_in_use(candidates)
    for one in there:
        size, why = _size_of(one), why_not[one]
        if size is None:
            continue
        if not why:
            try:
                (FOLDER / one.name).unlink()
                removed.append(one.name)
                continue
            except OSError as error:
                why = f"it cannot be removed: {error.strerror}"
        left.append(OrphanedSegment(one.name, size, why))
    return removed, left


def _why_not_ours(segment: Segment, dead: Mapping[int, int]) -> str:
    creator = segment.creator
    if creator is None:
        return "its name does not say whose it is"
    if not dead:
        return "a process of the server lives"
    if creator not in dead:
        return f"its name has the pid {creator}, which is not a process of the server"
    stat = procfs.read_stat(creator)
    if stat is not None and (stat.start_ticks != dead[creator] or stat.state not in "ZX"):
        return f"there is a process {creator}"
    return ""


def why_in_use(candidates: Collection[Segment]) -> dict[Segment, str]:
    """Return for each segment why it may still be in use; an empty text if no process maps it."""
    unknown = _why_unseen()
    users: dict[Segment, str] = {}
    deadline = time.monotonic() + _LOOK_SECS
    for name in os.listdir("/proc") if not unknown else ():  # noqa: PTH208
        if not name.isdigit():
            continue
        if time.monotonic() >= deadline:
            unknown = f"reading the mappings of all processes took more than {_LOOK_SECS:g} s"
            break
        try:
            mapped = mapped_by(int(name))
        except (FileNotFoundError, ProcessLookupError):
            continue
        except OSError:
            # A zombie maps nothing, so the error of a zombie is no reason to keep a segment.
            if procfs.is_running(int(name)):
                unknown = f"what process {name} maps cannot be read"
                break
            continue
        users |= {one: f"process {name} maps it" for one in mapped if one in candidates}
        # In its container this process may have the pid in the name, and may open its own segment again by name.
        pids = procfs.read_status(int(name)).get("NSpid", "").split()
        if len(pids) > 1 and (made := [one for one in candidates if str(one.creator) == pids[-1]]):
            why = f"process {name} of a container may have made it" if _shares_folder(name) else ""
            users |= {one: why for one in made if why and one not in users}
    return {one: users.get(one, unknown) for one in candidates}


def _shares_folder(pid: str) -> bool:
    try:
        return os.stat(f"/proc/{pid}/root{FOLDER}").st_dev == FOLDER.stat().st_dev  # noqa: PTH116
    except OSError:
        return True


def _why_unseen() -> str:
    """Return why processes that use this ``/dev/shm`` may be hidden from this process; empty if all are visible."""
    try:
        mounts = Path("/proc/self/mounts").read_text(errors="replace").splitlines()
    except OSError as error:
        return f"the processes cannot be listed: {error.strerror}"
    if not procfs.is_host_namespace():
        return "a process outside of this container, which cannot be seen from here, may use it"
    fields = [line.split(" ") for line in mounts]
    options = [option for mount in fields if mount[2:3] == ["proc"] for option in mount[3].split(",")]
    if any(option.startswith("hidepid=") and option not in ("hidepid=0", "hidepid=off") for option in options):
        return "/proc hides other users' processes (hidepid)"
    return ""


def _size_of(segment: Segment) -> int | None:
    """Return how many bytes a segment takes; None if it is gone, or belongs to another user."""
    try:
        stat = (FOLDER / segment.name).lstat()
    except OSError:
        return None
    is_own = stat.st_ino == segment.inode and stat.st_uid == os.geteuid()
    return stat.st_blocks * 512 if is_own else None
