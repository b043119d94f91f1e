"""Limit the disk space of incidents by age, count, size and free space; the limits are checked before each write.

To make room for a new incident, the oldest finished ones are removed, with the GPU cores and upstream's dumps of
requests that they name, which are in the host's folder. If other programs filled the disk, evidence is still written,
but only into the space that removed incidents freed (compare journald.conf(5), ``SystemMaxUse=``, ``SystemKeepFree=``).

A core or a dump that no incident names may belong to any program. It is never removed. It counts toward the limit when
another GPU core is requested, but not when the small files of an incident itself are written.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import socket
import stat
import time
from pathlib import Path

from sglang_crashkit.incident.store import MAX_JSON, PARTIAL, REMOVING, is_finished, parse_name
from sglang_crashkit.kernel import procfs
from sglang_crashkit.kernel.private_files import FolderLock, read_json, read_regular
from sglang_crashkit.model.incident import EvidenceStatus
from sglang_crashkit.model.incident_log import LOG
from sglang_crashkit.settings import KEEP_FREE, MAX_INCIDENT, MAX_USE, MB, DiskLimits

#: Cores of a server of eight GPUs take 2 GB without memory contents. On a small file system the share is the default.
_DEFAULT_MAX_USE, _USE_SHARE = 4096 * MB, 0.10
_DEFAULT_KEEP_FREE, _FREE_SHARE = 1024 * MB, 0.05
#: Make room for at least this many bytes at a time, so that not every file of an incident removes others.
_AT_A_TIME = 256 * 1024
BLOCK = 4096
LOCK_SECS = 0.5
#: A file that changed within this many seconds may not be complete; this is twice the time limit of a server's end. The
#: processes of another container cannot be seen, so its incidents stay for the longer time, also in seconds.
_SETTLED_SECS, _UNSEEN_SECS = 120.0, 3600.0
#: The names of the driver's cores with ``--crash-dump-folder``, and of SGLang's dumps.
_CRASH_FILES = re.compile(r"core\.cuda\.\d+\.\d+|crash_dump_[\w.-]+\.pkl")
FULL = "the disk is full"


class NoRoomError(OSError):
    """There is no room for a piece of evidence; the message is the reason."""

    def __str__(self) -> str:
        return str(self.strerror)


def status_of(error: Exception) -> EvidenceStatus:
    """Return the status of a piece of evidence that was not written because of `error`."""
    return "skipped" if isinstance(error, NoRoomError) else "failed"


class Retention:
    """Makes room for the incident `incident_id` in the folder `incidents`; the folder `host` holds the crash files.

    Incidents of a running server are never removed, except those of `server`, a pid. `own` is how many bytes this
    incident takes, `share` how many may be reserved for its essential files. Raises OSError if a folder cannot be read.
    """

    def __init__(self, incidents: Path, host: Path, incident_id: str, limits: DiskLimits, server: int = 0) -> None:
        self._incidents, self._host, self._id = incidents, host, incident_id
        self._limits, self._server = limits, server
        self._max_use, keep_free = limits_on(incidents, limits)
        # If less than `keep_free` is free already, don't remove evidence to restore it; only keep what is free.
        self._floor = min(keep_free, space_of(incidents)[1])
        self._taken: int | None = None  # bytes that all other incidents take, with the files that they name
        self.own = 0
        self.share = min(self._max_use, limits.max_incident) // 4

    def take(self, growth: int, *, essential: bool = False) -> None:
        """Make room for `growth` bytes and count them; NoRoomError if a limit forbids bytes that aren't `essential`."""
        growth = -(-growth // BLOCK) * BLOCK
        if not essential and growth > 0:
            if self.own + growth > self._limits.max_incident:
                limit = f"{MAX_INCIDENT} ({self._limits.max_incident / MB:g} MB)"
                raise NoRoomError(errno.ENOSPC, f"the incident would take more than {limit}")
            # Not in the constructor: that runs before the first stacks are taken, which nothing may delay.
            if self._taken is None or self._lack(growth, self._taken):
                self.make_room(max(growth, _AT_A_TIME))
            if reason := self._lack(growth, self._taken or 0):
                raise NoRoomError(errno.ENOSPC, reason)
        self.own += growth

    def make_room(self, growth: int, beside: Path | None = None) -> str:
        """Remove the oldest finished incidents until `growth` more bytes fit, and the limits of age and count hold.

        `beside` is another folder, to which another program, such as the CUDA driver, is about to write these bytes;
        with it, cores and dumps that no incident names count, too. Returns why there is no room, or an empty text.
        Raises OSError if a folder is gone.
        """
        unnamed, found = self._crash_files(), {}
        # A file that several incidents name goes with the newest of them, which may be unfinished.
        for path in sorted(self._incidents.iterdir(), key=lambda path: path.name.removeprefix(PARTIAL), reverse=True):
            if not path.name.endswith(f"-{self._id}"):
                files = _named_in(path, unnamed)
                found[path] = (size_of(path) + sum(unnamed.pop(file) for file in files), files)
        self._taken = taken = sum(size for size, _files in found.values())
        taken += sum(unnamed.values()) if beside else 0
        finished = sorted((path for path in found if is_finished(path.name)), key=lambda path: path.name)
        excess = len(finished) - (self._limits.max_count or len(finished))
        oldest = time.time() - (self._limits.max_age_secs or time.time())
        lock = FolderLock(self._incidents, follow=True)
        # Two processes that make room at the same time would remove twice as much as they need.
        is_alone = lock.acquire(LOCK_SECS) != "taken"
        for number, path in enumerate(finished if is_alone else ()):
            name, (size, files) = parse_name(path.name), found[path]
            is_due = number < excess or (name is not None and name.seconds < oldest)
            if (is_due or self._lack(growth, taken, beside)) and self._may_go(path, files) and _remove(path, files):
                self._taken, taken = self._taken - size, taken - size
        lock.release()
        return self._lack(growth, taken, beside)

    def _lack(self, growth: int, taken: int, folder: Path | None = None) -> str:
        """Return why `growth` bytes don't fit beside `taken` bytes of other incidents; empty if they do."""
        if taken + self.own + growth > self._max_use:
            return f"incidents would take more than {MAX_USE} ({self._max_use / MB:g} MB)"
        folder = folder or self._incidents
        is_here, free = folder.stat().st_dev == self._incidents.stat().st_dev, space_of(folder)[1]
        floor = self._floor if is_here else limits_on(folder, DiskLimits())[1]
        if free - growth >= floor:
            return ""
        return FULL if free < growth else f"less than {KEEP_FREE} ({floor / MB:.3g} MB) would stay free on the disk"

    def _crash_files(self) -> dict[Path, int]:
        """Return this user's GPU cores and dumps of requests in the host's folder, with the bytes that they take."""
        # The driver names its folder by gethostname(2), which may differ from the host's name here.
        hosts = [host for host in (self._host, self._host / ".." / socket.gethostname()) if host.is_dir()]
        found = {}
        for path in (path for host in {host.stat().st_ino: host for host in hosts}.values() for path in host.iterdir()):
            with contextlib.suppress(OSError):
                status = path.lstat()
                if _CRASH_FILES.fullmatch(path.name) and stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
                    found[path] = status.st_blocks * 512
        return found

    def _may_go(self, path: Path, files: list[Path]) -> bool:
        """Return whether a finished incident may be removed: its server no longer writes it, nor the files it names."""
        name = parse_name(path.name)
        try:
            if any(time.time() - file.lstat().st_mtime < _SETTLED_SECS for file in files):
                return False
            server = read_json(path / "incident.json", MAX_JSON)["server"]
            pid, start_ticks, namespace = server["pid"], server["start_ticks"], server.get("pid_namespace")
            if namespace not in (None, procfs.own_namespace()):
                return name is None or time.time() - name.seconds > _UNSEEN_SECS
            return bool(pid == self._server) or not procfs.is_running(int(pid), int(start_ticks))
        except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError):
            return True


def _named_in(incident: Path, files: dict[Path, int]) -> list[Path]:
    text = b""
    # An unfinished incident has a log only.
    for name in ("incident.json", LOG) if files and parse_name(incident.name) else ():
        with contextlib.suppress(OSError):
            text += read_regular(incident / name, MAX_JSON)
    # Match whole names: the name of another file may begin or end with this one.
    return [one for one in files if re.search(rf"(?<![\w.-]){re.escape(one.name)}(?![\w-])".encode(), text)]


def _remove(folder: Path, files: list[Path]) -> bool:
    """Remove a finished incident of this user, and `files`, which it names; return whether all are removed.

    The folder is renamed first, so that a partly removed incident is never taken for a complete one.
    """
    removing = folder.with_name(f"{REMOVING}{folder.name}")
    with contextlib.suppress(OSError):
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            return False
        folder.rename(removing)
        for file in files:
            file.unlink(missing_ok=True)
        shutil.rmtree(removing)
        return True
    return False


def size_of(folder: Path) -> int:
    """Return the bytes that the files below `folder` take on disk; links are not followed."""
    size = 0
    for path, _folders, files in os.walk(folder) if not folder.is_symlink() else ():
        for name in files:
            with contextlib.suppress(OSError):
                size += Path(path, name).lstat().st_blocks * 512
    return size


def limits_on(folder: Path, limits: DiskLimits) -> tuple[int, int]:
    """Return how many bytes of the file system of `folder` all incidents may take, and how many must stay free."""
    total = space_of(folder)[0]
    max_use, keep_free = limits.max_use, limits.keep_free
    return (
        min(_DEFAULT_MAX_USE, int(total * _USE_SHARE)) if max_use is None else max_use,
        min(_DEFAULT_KEEP_FREE, int(total * _FREE_SHARE)) if keep_free is None else keep_free,
    )


def space_of(folder: Path) -> tuple[int, int]:
    """Return the size of the file system of `folder` and its free space for this user, in bytes."""
    status = os.statvfs(folder)
    return status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
