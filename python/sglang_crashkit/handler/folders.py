"""The folders that a crash handler works in, made, kept and removed; and what a killed server leaves in shared memory.

The crash folder may lie on a network disk whose server is gone; what touches it then stands still, and no signal ends
it. So each is made in a child process. An operator's folder keeps its permissions.

``systemd-tmpfiles`` removes what was not touched for ten days, sockets included, but leaves a folder alone, with all
that is below it, which somebody has locked by flock(2); see tmpfiles.d(5).
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

#: A disk that answers does it within this time, a busy network disk included, in seconds. All disks that a server names
#: share it, as the launch waits; one that is asked when that is over has a second.
ANSWER_SECS, _LEAST_SECS = 10.0, 1.0
#: A cleaner that looks at a folder just now has it locked for a moment, in seconds.
_LOCK_SECS = 0.5
#: Segments come while the server starts and with large requests; the mappings of all processes take tens of ms to read.
_MAPS_SECS, _MAPS_AFTER_A_CHANGE_SECS = 60.0, 10.0
#: Runs what makes folders in a child process, and returns what went wrong; empty where nothing did.
_Make = Callable[[Callable[[], bytes]], str]


@dataclass
class Place:
    """Where the handler works."""

    host_folder: Path  # the host's in the crash folder, or in the fallback folder; incidents go below it
    spool: Path  # where failing ranks leave their records
    runtime: Path  # the folder of the socket, removed at the end
    core_file: str = ""  # the template of the names of GPU cores
    flight_folder: Path | None = None  # where PyTorch's flight recorder writes; None where it cannot
    warnings: list[str] = field(default_factory=list)  # what could not be made, for the server's log

    def make_folder(self, kind: str, seconds: float, limits: DiskLimits, server_pid: int) -> IncidentFolder:
        """Make the folder of an incident of `seconds` since the epoch, in the other place where the crash folder fails.

        Where there is no place at all, it keeps nothing, and says why.
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
        """Return the record that a failing rank says it left; None if it is not in the spool."""
        path = Path(record or "")
        try:
            is_record = path.parent == self.spool and path.is_file() and not path.is_symlink()
        except OSError:
            return None
        return path if is_record else None

    def drop_record(self, record: str | None) -> None:
        """Remove the record that a rank left which ended as it was asked to."""
        if (path := self.record_of(record)) is not None:
            path.unlink(missing_ok=True)

    def remove_marker(self) -> None:
        """Remove the server's marker: its end is known."""
        with contextlib.suppress(OSError):
            (self.spool / MARKER).unlink()

    def remove_own(self) -> None:
        """Remove what is this server's alone; a record that no one took in stays."""
        shutil.rmtree(self.runtime, ignore_errors=True)
        self.remove_marker()
        with contextlib.suppress(OSError):
            self.spool.rmdir()

    def clean_up(self, keys: Collection[str]) -> None:
        """Remove what is of no use without the server's processes, whose keys these are (see `procfs.server_key`).

        The host's folder may be another server's, too, in which all pids may be the same.
        """
        self.remove_own()
        torn = (dump for dump in self.host_folder.glob(".crash_dump_*.partial") if dump.name.split(".")[-2] in keys)
        # No one took it in, as one that came when the incident was finished.
        flight = (self.host_folder / "flight_recorder").glob("*-*-*-rank*")
        late = (dump for dump in flight if dump.name.partition("-rank")[0] in keys)
        for dump in (*torn, *late):
            with contextlib.suppress(OSError):
                dump.unlink()


def make_place(
    crash_folder: str | None, runtime: Path, core_file: str = "", flight_folder: str = "", secs: float = ANSWER_SECS
) -> Place:
    """Make the folders; each of them that cannot be in the crash folder is below the fallback folder.

    Args:
        crash_folder: the server's ``--crash-dump-folder``, absolute; None where it was given none.
        runtime: the server's runtime folder, which is there, and which is called by its key (see `procfs.key_of`).
        core_file: the template of the names of GPU cores, as CUDA expands it; empty for none.
        flight_folder: where PyTorch's flight recorder is to write; empty where it is not used.
        secs: how long the disks may take, in seconds.

    Raises:
        OSError: none of the places can be used.
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
        # A folder that is there may still be full or read-only; the spool shows it.
        problem = make(functools.partial(_make_each, host_folder, spool.parent, spool))
        if not problem:
            break
        advice = "next: check the --crash-dump-folder" if crash_folder else "next: set TMPDIR"
        warnings.append(f"crash folder {host_folder} cannot be used ({problem}); {advice}")
    else:
        raise OSError(errno.EIO, "; ".join(warnings))
    place = Place(host_folder, spool, runtime, core_file, warnings=warnings)
    # A disk that did not answer is not asked again.
    moved = crash_folder is not None and host_folder == fallback
    if core_file and not core_file.startswith("|"):
        _make_core_folder(place, crash_folder, make, moved=moved)
    if flight_folder:
        other = host_folder / Path(flight_folder).name
        # What is not there when it is asked for is never written.
        wanted = [other] if moved else [Path(flight_folder), other]
        made = (folder for folder in wanted if not make(functools.partial(_make_each, folder.parent, folder)))
        place.flight_folder = next(made, None)
    return place


def _make_each(*folders: Path) -> bytes:
    # One after the other: a link that somebody put in a shared crash folder is not followed.
    for folder in folders:
        make_private_folder(folder)
    return b""


def _make_core_folder(place: Place, crash_folder: str | None, make: _Make, *, moved: bool) -> None:
    """Make the folder in which the driver will write, for its owner alone: the driver makes none."""
    name, core_file = "core.cuda.%t.%p", place.core_file
    is_own = crash_folder is not None and core_file == f"{crash_folder}/%h/{name}"
    problem = "it is in the crash folder" if moved and is_own else ""
    if not problem:
        problem = make(functools.partial(_make_folder_of, core_file, is_own=is_own))
    if not problem:
        return
    # Upstream's words, which people search for.
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
    # The driver follows links, and a core holds the memory of a GPU: what somebody else prepared is not taken for ours.
    if is_own or not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
        make_private_folder(folder)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise OSError(errno.EACCES, "it cannot be written to", str(folder))
    return b""


def keep(runtime: Path) -> list[FolderLock]:
    """Lock the runtime folder of a server, and with other handlers the kit's own two above it; return the locks."""
    above = [runtime.parent.parent, runtime.parent] if runtime.parent.name == RUN else []
    locks = [*(FolderLock(folder, shared=True) for folder in above), FolderLock(runtime)]
    for lock in locks:
        with contextlib.suppress(OSError):
            lock.acquire(_LOCK_SECS)
    return locks


class SharedMemory:
    """The segments of one server: noted while it lives, cleared or reported when it is gone."""

    def __init__(self, tree: ProcessTree) -> None:
        self._tree = tree
        self._segments: set[Segment] = set()
        self._own: dict[int, int] = {}  # start times by pid
        self._noted_at = time.monotonic()

    def act_on_time(self) -> float:
        """Look at what the processes map, where that is due, and return when it is due next."""
        interval = _MAPS_SECS if self._tree.settled else _MAPS_AFTER_A_CHANGE_SECS
        if time.monotonic() >= self._noted_at + interval:
            self.note()
        return self._noted_at + interval

    def note(self) -> None:
        """Look at what the living processes map now."""
        self._noted_at = time.monotonic()
        for process in self._tree.alive():
            if not process.matters:
                # What a program runs beside its server is its own affair.
                continue
            self._own[process.pid] = process.handle.start_ticks
            with contextlib.suppress(OSError):
                self._segments |= shared_memory.mapped_by(process.pid)
        if any(process.role == "tokenizer_worker" for process in self._tree):
            # By its name alone it may be another container's, whose processes have the same pids.
            self._segments |= shared_memory.of_server(self._tree.root.pid)

    def clear(self) -> tuple[list[str], list[OrphanedSegment]]:
        """Remove what was the server's alone, unless one of its processes lives; see `shared_memory.clear`."""
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
    """Return in one line what processes that are gone left in shared memory; it may be anybody's, and stays."""
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
