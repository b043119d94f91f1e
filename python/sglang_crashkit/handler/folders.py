"""Make, keep and remove the folders of a crash handler; clear the shared memory that a killed server leaves.

The crash folder may lie on a network disk whose server is gone. A process that accesses it then blocks, and no signal
ends that process. So child processes make the folders. A folder that the operator made keeps its permissions.

``systemd-tmpfiles`` removes files that were not touched for ten days, including sockets, but leaves alone a folder that
a process has locked by flock(2), with everything below it; see tmpfiles.d(5).
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import shutil
import socket
import stat
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path

from sglang_crashkit.errors import CrashkitError
from sglang_crashkit.handler.processes import ProcessTree
from sglang_crashkit.handler.unfinished import SPOOL
from sglang_crashkit.incident.folder import IncidentFolder, NullFolder, new_id
from sglang_crashkit.incident.marker import MARKER
from sglang_crashkit.kernel import procfs, shared_memory
from sglang_crashkit.kernel.forked import call_within
from sglang_crashkit.kernel.private_files import FolderLock, make_private_folder
from sglang_crashkit.kernel.shared_memory import OrphanedSegment, Segment
from sglang_crashkit.settings import RUN, DiskLimits, fallback_folder

logger = logging.getLogger(__name__)

#: Seconds within which all disks together must answer, as the launch waits: enough for a busy network disk. A disk that
#: is asked after that has the second time.
ANSWER_SECS, _LEAST_SECS = 10.0, 1.0
#: Seconds to wait for a lock: a cleaner locks a folder briefly while it checks it.
_LOCK_SECS = 0.5
#: Seconds between reads of all mappings, which take tens of ms: a starting server, and large requests, create segments.
_MAPS_SECS, _MAPS_AFTER_A_CHANGE_SECS = 60.0, 10.0
#: Runs a function that makes folders in a child process; returns the error, or an empty string.
_Make = Callable[[Callable[[], bytes]], str]


@dataclass
class Place:
    """Where the handler works."""

    host_folder: Path  # the host's folder in the crash folder or the fallback folder; incidents go below it
    spool: Path  # where failing ranks leave their records
    runtime: Path  # the folder of the socket, removed at the end
    core_file: str = ""  # the template of the paths of GPU cores
    flight_folder: Path | None = None  # where PyTorch's flight recorder writes; None if it can't
    warnings: list[str] = field(default_factory=list)  # which folders could not be made, for the server's log

    def make_folder(self, kind: str, seconds: float, limits: DiskLimits, server_pid: int) -> IncidentFolder:
        """Make the folder of an incident of `seconds` since the epoch; if the crash folder fails, in the fallback one.

        If both fail, return a folder that stores nothing, whose `problem` says why.
        """
        problems = []
        for folder in (self.host_folder, fallback_folder()):
            try:
                return IncidentFolder(folder / "incidents", kind, new_id(), seconds, limits, server_pid)
            except (OSError, CrashkitError) as error:
                problems.append(f"no incident can be written below {folder}: {error}")
                logger.error("%s", problems[-1])
        return NullFolder("; ".join(problems))

    def record_of(self, record: str | None) -> Path | None:
        """Return the path of the record that a failing rank reported; None if it is no file in the spool."""
        path = Path(record or "")
        try:
            is_record = path.parent == self.spool and path.is_file() and not path.is_symlink()
        except OSError:
            return None
        return path if is_record else None

    def drop_record(self, record: str | None) -> None:
        """Remove the record of a rank that ended as requested."""
        if (path := self.record_of(record)) is not None:
            path.unlink(missing_ok=True)

    def remove_marker(self) -> None:
        """Remove the server's marker, because the server's end is known."""
        with contextlib.suppress(OSError):
            (self.spool / MARKER).unlink()

    def remove_own(self) -> None:
        """Remove the runtime folder, the marker and the spool; a spool with a record that no incident adopted stays."""
        shutil.rmtree(self.runtime, ignore_errors=True)
        self.remove_marker()
        with contextlib.suppress(OSError):
            self.spool.rmdir()

    def clean_up(self, keys: Collection[str]) -> None:
        """Remove files that are useless without the server's processes; `keys` are theirs (see `procfs.server_key`).

        Another server may use the host's folder too, and all its pids may be the same.
        """
        self.remove_own()
        torn = (dump for dump in self.host_folder.glob(".crash_dump_*.partial") if dump.name.split(".")[-2] in keys)
        # A dump that no incident adopted, such as one that was written after the incident was finished.
        flight = (self.host_folder / "flight_recorder").glob("*-*-*-rank*")
        late = (dump for dump in flight if dump.name.partition("-rank")[0] in keys)
        for dump in (*torn, *late):
            with contextlib.suppress(OSError):
                dump.unlink()


def make_place(
    crash_folder: str | None, runtime: Path, core_file: str = "", flight_folder: str = "", secs: float = ANSWER_SECS
) -> Place:
    """Make the folders; a folder that cannot be made in the crash folder is made below the fallback folder.

    Args:
        crash_folder: the server's ``--crash-dump-folder``, absolute; None if the option is not set.
        runtime: the server's runtime folder, which exists and has the server's key as its name (see `procfs.key_of`).
        core_file: the template of the paths of GPU cores, as CUDA expands it; empty for none.
        flight_folder: where PyTorch's flight recorder is to write; empty if it is not used.
        secs: the time limit for the disks, in seconds.

    Raises:
        OSError: neither the crash folder nor the fallback folder can be used.
    """
    hostname = os.getenv("HOSTNAME", socket.gethostname())
    fallback, deadline = fallback_folder() / hostname, time.monotonic() + secs

    def make(make_them: Callable[[], bytes]) -> str:
        try:
            call_within(max(_LEAST_SECS, deadline - time.monotonic()), make_them)
        except OSError as error:
            return str(error.strerror)
        return ""

    candidates = [Path(crash_folder) / hostname, fallback] if crash_folder else [fallback]
    warnings = []
    for host_folder in candidates:
        spool = host_folder / "incidents" / f"{SPOOL}{runtime.name}"
        # An existing folder may be on a full or read-only disk; making the spool shows it.
        problem = make(functools.partial(_make_each, host_folder, spool.parent, spool))
        if not problem:
            break
        advice = "next: check the --crash-dump-folder" if crash_folder else "next: set TMPDIR"
        warnings.append(f"crash folder {host_folder} cannot be used ({problem}); {advice}")
    else:
        raise OSError(errno.EIO, "; ".join(warnings))
    place = Place(host_folder, spool, runtime, core_file, warnings=warnings)
    # If the crash folder's disk failed, don't access it again.
    moved = crash_folder is not None and host_folder == fallback
    if core_file and not core_file.startswith("|"):
        _make_core_folder(place, crash_folder, make, moved=moved)
    if flight_folder:
        other = host_folder / Path(flight_folder).name
        # If the folder is missing when a dump is requested, the dump is never written.
        wanted = [other] if moved else [Path(flight_folder), other]
        made = (folder for folder in wanted if not make(functools.partial(_make_each, folder.parent, folder)))
        place.flight_folder = next(made, None)
    return place


def _make_each(*folders: Path) -> bytes:
    # One after another, so that a link that another user put in a shared crash folder is not followed.
    for folder in folders:
        make_private_folder(folder)
    return b""


def _make_core_folder(place: Place, crash_folder: str | None, make: _Make, *, moved: bool) -> None:
    """Make the folder for the GPU cores, private to its owner, because the driver does not make it."""
    name, core_file = "core.cuda.%t.%p", place.core_file
    is_own = crash_folder is not None and core_file == f"{crash_folder}/%h/{name}"
    problem = "it is in the crash folder" if moved and is_own else ""
    if not problem:
        problem = make(functools.partial(_make_folder_of, core_file, is_own=is_own))
    if not problem:
        return
    # Upstream's wording, because users search for it.
    place.warnings.append(
        f"Failed to create CUDA coredump directory {os.path.dirname(core_file)}: {problem}; coredumps "  # noqa: PTH120
        + (f"go below {fallback_folder()}" if is_own else "may fail to write. next: check CUDA_COREDUMP_FILE")
    )
    if is_own:
        place.core_file = f"{fallback_folder()}/%h/{name}"
        make(functools.partial(_make_folder_of, place.core_file, is_own=True))


def _make_folder_of(core_file: str, *, is_own: bool) -> bytes:
    with contextlib.suppress(OSError):
        if stat.S_ISFIFO(os.stat(core_file).st_mode):  # noqa: PTH116
            return b""
    folder = Path(os.path.dirname(core_file).replace("%h", socket.gethostname()))  # noqa: PTH120 - may be empty
    if "%" in str(folder):
        raise OSError(errno.EINVAL, "only %h is supported in the directory part of CUDA_COREDUMP_FILE", str(folder))
    # A core holds GPU memory, and the driver follows links: a folder that another user prepared must not pass for ours.
    if is_own or not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
        make_private_folder(folder)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise OSError(errno.EACCES, "it cannot be written to", str(folder))
    return b""


def keep(runtime: Path) -> list[FolderLock]:
    """Lock a server's runtime folder and, shared with other handlers, the kit's two folders above; return the locks."""
    above = [runtime.parent.parent, runtime.parent] if runtime.parent.name == RUN else []
    locks = [*(FolderLock(folder, shared=True) for folder in above), FolderLock(runtime)]
    for lock in locks:
        with contextlib.suppress(OSError):
            lock.acquire(_LOCK_SECS)
    return locks


class SharedMemory:
    """The shared memory segments of one server: noted while it lives, removed or reported when it is gone."""

    def __init__(self, tree: ProcessTree) -> None:
        self._tree = tree
        self._segments: set[Segment] = set()
        self._own: dict[int, int] = {}  # start times by pid
        self._noted_at = time.monotonic()

    def act_on_time(self) -> float:
        """Note the mapped segments if that is due; return when it is due next, by the monotonic clock."""
        interval = _MAPS_SECS if self._tree.settled else _MAPS_AFTER_A_CHANGE_SECS
        if time.monotonic() >= self._noted_at + interval:
            self.note()
        return self._noted_at + interval

    def note(self) -> None:
        """Note the segments that the living processes map now."""
        self._noted_at = time.monotonic()
        for process in self._tree.alive():
            if not process.matters:
                # Segments of a user's other processes are not the server's.
                continue
            self._own[process.pid] = process.handle.start_ticks
            with contextlib.suppress(OSError):
                self._segments |= shared_memory.mapped_by(process.pid)
        if any(process.role == "tokenizer_worker" for process in self._tree):
            # Only with tokenizer workers: by its name alone, a segment may be another container's with the same pids.
            self._segments |= shared_memory.of_server(self._tree.root.pid)

    def clear(self) -> tuple[list[str], list[OrphanedSegment]]:
        """Remove the segments that only the server used, unless a process of it lives; see `shared_memory.clear`."""
        lives = any(process.exited_at is None and process.matters for process in self._tree)
        lives = lives or any(procfs.is_running(pid, ticks) for pid, ticks in self._own.items())
        removed, left = shared_memory.clear(self._segments, {} if lives else self._own)
        if removed:
            logger.info("removed from %s what the server left: %s", shared_memory.FOLDER, " ".join(removed))
        if left:
            named = ", ".join(f"{one.name} ({one.why})" for one in left)
            logger.info("the server left in %s: %s", shared_memory.FOLDER, named)
        return removed, left


def left_by_others() -> str:
    """Describe in one line the segments that ended processes left; they may be of any program, so they stay."""
    try:
        left = [segment for segment in shared_memory.of_gone() if not segment.why]
    except OSError:
        return ""
    if not left:
        return ""
    count, size = len(left), sum(segment.bytes for segment in left) / (1 << 30)
    largest = max(left, key=lambda segment: segment.bytes)
    return (
        f"{count} segment{'s' if count > 1 else ''} of user {os.geteuid()} in {shared_memory.FOLDER} "
        f"({size:.2f} GiB; the largest is {largest.name}) {'are' if count > 1 else 'is'} of processes that are gone; "
        "next: sglang-crashkit doctor"
    )
