"""How much of the disk incidents may take, kept before a byte is written.

The oldest finished incidents make room for a new one, with the GPU cores, which the driver writes, and upstream's dumps
of requests, which lie in the host's folder and which an incident names. What others filled the disk with is none of
their business: then an incident takes no more than older ones gave up for it. journald keeps its journals in the same
way (journald.conf(5), ``SystemMaxUse=``, ``SystemKeepFree=``).

A core or a dump that no incident names may be anybody's. It is never removed; it counts where further cores are asked
for, and not against who died of what, which is small and worth more.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import socket
import stat
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sglang_crashkit.incident.store import PARTIAL, REMOVING, is_finished, parse_name
from sglang_crashkit.kernel import procfs
from sglang_crashkit.kernel.private_files import FolderLock
from sglang_crashkit.model.incident import EvidenceStatus
from sglang_crashkit.settings import KEEP_FREE, MAX_INCIDENT, MAX_USE, MB, DiskLimits

#: Cores of a server of eight GPUs take 2 GB without memory in them.
_DEFAULT_MAX_USE = 4096 * MB
_DEFAULT_KEEP_FREE = 1024 * MB
#: Of a small file system the defaults take these shares at most.
_USE_SHARE, _FREE_SHARE = 0.10, 0.05
#: Room is made for at least this much at a time, so that not every file of an incident needs some of its own.
_AT_A_TIME = 256 * 1024
_BLOCK = 4096
_LOCK_SECS = 0.5
#: A core or a dump that changed within so many seconds may be written still; twice the time that a server's end has.
_SETTLED_SECS = 120.0
#: As ``--crash-dump-folder`` has the driver name its cores, and as SGLang names its dumps.
_CRASH_FILES = re.compile(r"core\.cuda\.\d+\.\d+|crash_dump_[\w.-]+\.pkl")
MAX_JSON = 8 << 20
FULL = "the disk is full"


class NoRoomError(OSError):
    """A piece of evidence was not written because there is no room for it; the message is the reason."""

    def __str__(self) -> str:
        return str(self.strerror)


def status_of(error: Exception) -> EvidenceStatus:
    """Return the status of a piece of evidence that could not be written for `error`."""
    return "skipped" if isinstance(error, NoRoomError) else "failed"


@dataclass(frozen=True)
class CrashFile:
    """A GPU core or a dump of requests beside folders of incidents."""

    path: Path
    size: int  # how many bytes of the disk it takes
    inode: int  # of the file that was found, so that another one of its name is not taken for it
    age_secs: float  # how long ago it changed, in seconds


def find_crash_files(incidents: Iterable[Path]) -> list[CrashFile]:
    """Return the GPU cores and the dumps of requests of this user beside these folders of incidents."""
    # The driver names a host's folder by gethostname(2), which may be another one.
    folders = {folder for path in incidents for folder in (path.parent, path.parent.parent / socket.gethostname())}
    found = []
    for folder in folders:
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            for path in (Path(entry.path) for entry in entries if _CRASH_FILES.fullmatch(entry.name)):
                with contextlib.suppress(OSError):
                    status = path.lstat()
                    if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
                        age_secs = time.time() - status.st_mtime
                        found.append(CrashFile(path, status.st_blocks * 512, status.st_ino, age_secs))
    return found


def named_in(incidents: Iterable[Path], files: Sequence[CrashFile]) -> dict[Path, list[CrashFile]]:
    """Return which of `files` each incident names, by its folder; the first one has those that several name."""
    left, found = list(files), {}
    for path in incidents if left else ():
        text = _document_of(path)
        # The name of another one may begin or end with this one.
        own = [one for one in left if re.search(rf"(?<![\w.-]){re.escape(one.path.name)}(?![\w-])".encode(), text)]
        if own:
            found[path] = own
            left = [one for one in left if one not in own]
    return found


def is_of_living_server(incident: Path, *, but: int) -> bool:
    """Say whether the server of the incident in this folder lives on this machine, and is not the process `but`."""
    try:
        server = json.loads(_document_of(incident))["server"]
        pid, start_ticks = int(server["pid"]), int(server["start_ticks"])
    except (ValueError, TypeError, LookupError, RecursionError):
        return False
    return pid != but and procfs.is_running(pid, start_ticks)


def _document_of(incident: Path) -> bytes:
    with contextlib.suppress(OSError), (incident / "incident.json").open("rb") as file:
        return file.read(MAX_JSON)
    return b""


@dataclass(frozen=True)
class _Entry:
    """What one entry of a folder of incidents takes of file system `device`; `files` are what it names beside it."""

    own: int
    device: int
    files: Sequence[CrashFile] = ()

    @property
    def size(self) -> int:
        return self.own + sum(file.size for file in self.files)


class Ledger:
    """What one incident has taken of the disk, and may take still.

    Args:
        incidents: the folder of all incidents of this host.
        name: what this incident's folder is called when it is finished; it is never removed.
        limits: what the user allows.
        elsewhere: other folders of incidents of this host, which count as well.
        server: the pid of the incident's server; what another one that lives has left is never removed.

    Raises:
        OSError: the folder cannot be read.
    """

    def __init__(
        self, incidents: Path, name: str, limits: DiskLimits, elsewhere: Sequence[Path] = (), server: int = 0
    ) -> None:
        self._incidents = incidents
        self._folders = (incidents, *elsewhere)
        self._server = server
        self._names = {name, f"{PARTIAL}{name}"}
        self._max_use, keep_free = limits_on(incidents, limits)
        # What others have filled already is not emptied again at the expense of evidence.
        self._floor = min(keep_free, _space_of(incidents)[1])
        self._max_incident = limits.max_incident
        self._own: dict[str, int] = {}
        self._measured: dict[Path, _Entry] | None = None

    @property
    def own(self) -> int:
        """How many bytes this incident takes."""
        return sum(self._own.values())

    @property
    def share(self) -> int:
        """How many bytes may be kept for the essential files, so that there is room for the others."""
        return min(self._max_use, self._max_incident) // 4

    def charge(self, name: str, size: int, *, essential: bool = False) -> None:
        """Count a file that is about to be written, and make room for it.

        Args:
            name: the file; one of the same name is replaced.
            size: its length in bytes.
            essential: it is written whatever the limits say.

        Raises:
            NoRoomError: the limits do not allow it; it is not counted.
        """
        size = -(-size // _BLOCK) * _BLOCK
        reason = "" if essential else self._reason_against(size - self._own.get(name, 0))
        if reason:
            raise NoRoomError(errno.ENOSPC, reason)
        self._own[name] = size

    def forget(self, name: str) -> None:
        """Count a file no longer: it was not written after all."""
        self._own.pop(name, None)

    def rename(self, name: str) -> None:
        """Note that this incident's folder is called something else when it is finished."""
        self._names.add(name)

    def make_room(self, growth: int) -> None:
        """Remove the oldest finished incidents until `growth` more bytes fit, or none is left."""
        self._remove_until(lambda: self._fits_use(growth))
        self._remove_until(lambda: self._fits_disk(growth), here=True)

    def make_room_beside(self, folder: Path, size: int) -> str:
        """Make room for what somebody else, such as the CUDA driver, is about to write to `folder`.

        The oldest incidents make room for it.

        Args:
            folder: where it will be.
            size: how long it may become, in bytes; 0 where it is there by now, and is to become no longer.

        Returns:
            Why there is none; empty where there is room.
        """
        try:
            self._remove_until(lambda: self._fits_use(size, beside=True))
            if not self._fits_use(size, beside=True):
                return self._too_much
            if folder.stat().st_dev == self._incidents.stat().st_dev:
                self._remove_until(lambda: self._fits_disk(size), here=True)
                fits = self._fits_disk(size)
            else:
                total, free = _space_of(folder)
                fits = free - size >= _default_free(total)
        except OSError as error:
            return f"{folder} cannot be written to: {error.strerror}"
        if fits:
            return ""
        return f"there is no room for {size / MB:g} MB in {folder}" if size else f"{folder} has no room for more"

    @property
    def _too_much(self) -> str:
        return f"incidents would take more than {MAX_USE} ({self._max_use / MB:g} MB)"

    def _remove_until(self, fits: Callable[[], bool], *, here: bool = False) -> None:
        """Remove the oldest finished incidents until it `fits`, or none is left.

        Args:
            fits: asked again after each.
            here: only those on the file system of this incident are of use.
        """
        if fits():
            return
        lock = FolderLock(self._incidents)
        # Two at a time would remove twice as much as they need.
        if lock.acquire(_LOCK_SECS) == "taken":
            return
        try:
            self._measured = others = self._measure()
            device = self._incidents.stat().st_dev
            for path in sorted((path for path in others if is_finished(path.name)), key=lambda path: path.name):
                if fits():
                    break
                # Its server may be about to write what it names.
                is_old = all(file.age_secs >= _SETTLED_SECS for file in others[path].files)
                is_of_use = is_old and (not here or others[path].device == device)
                is_free = is_of_use and not is_of_living_server(path, but=self._server)
                if is_free and remove_incident(path, others[path].files):
                    del others[path]
        finally:
            lock.release()

    def _reason_against(self, growth: int) -> str:
        if self.own + growth > self._max_incident:
            return f"the incident would take more than {MAX_INCIDENT} ({self._max_incident / MB:g} MB)"
        if not self._fits_use(growth) or not self._fits_disk(growth):
            self.make_room(max(growth, _AT_A_TIME))
        if not self._fits_use(growth):
            return self._too_much
        if self._fits_disk(growth):
            return ""
        if _space_of(self._incidents)[1] < growth:
            return FULL
        return f"less than {KEEP_FREE} ({self._floor / MB:.3g} MB) would stay free on the disk"

    def _fits_use(self, growth: int, *, beside: bool = False) -> bool:
        """Say whether `growth` more bytes fit, with what lies `beside` the incidents also where none names it."""
        if self._measured is None:
            # Not before the first stacks: nothing may delay the capture.
            self._measured = self._measure()
        if beside:
            # Looked at anew: cores grow, and those of this incident are named by none that is finished.
            taken = sum(one.own for one in self._measured.values())
            taken += sum(file.size for file in find_crash_files(self._folders))
        else:
            taken = sum(one.size for one in self._measured.values())
        return taken + self.own + growth <= self._max_use

    def _fits_disk(self, growth: int) -> bool:
        return _space_of(self._incidents)[1] - growth >= self._floor

    def _measure(self) -> dict[Path, _Entry]:
        """Return what everything in the folders but this incident takes, by path."""
        found: dict[Path, _Entry] = {}
        for folder in self._folders:
            try:
                device, entries = folder.stat().st_dev, list(folder.iterdir())
            except OSError:
                if folder == self._incidents:
                    raise
                continue
            found |= {path: _Entry(size_of(path), device) for path in entries if path.name not in self._names}
        # What several name is the last one's, which may be unfinished.
        incidents = [path for path in found if parse_name(path.name)]
        incidents.sort(key=lambda path: path.name.removeprefix(PARTIAL), reverse=True)
        for path, files in named_in(incidents, find_crash_files(self._folders)).items():
            found[path] = _Entry(found[path].own, found[path].device, files)
        return found


def remove_incident(folder: Path, files: Sequence[CrashFile] = ()) -> bool:
    """Remove a finished incident of this user, and `files`, which it names; say whether it is gone.

    It loses its name first, so that one that is removed in part is never taken for a whole one.
    """
    removing = folder.with_name(f"{REMOVING}{folder.name}")
    with contextlib.suppress(OSError):
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            return False
        folder.rename(removing)
        for file in files:
            with contextlib.suppress(OSError):
                if file.path.lstat().st_ino == file.inode:
                    file.path.unlink()
        shutil.rmtree(removing)
        return True
    return False


def size_of(folder: Path) -> int:
    """Return how many bytes the files below `folder`, or a file of that name, take on disk; links are not followed."""
    names = [folder] if not folder.is_dir() or folder.is_symlink() else []
    names += [Path(path) / name for path, _folders, files in os.walk(folder) for name in files if not names]
    size = 0
    for name in names:
        with contextlib.suppress(OSError):
            size += name.lstat().st_blocks * 512
    return size


def use_of(incidents: Path) -> int:
    """Return what the incidents in a folder take of the disk, with the cores and dumps beside it, in bytes."""
    return size_of(incidents) + sum(file.size for file in find_crash_files([incidents]))


def limits_on(folder: Path, limits: DiskLimits) -> tuple[int, int]:
    """Return what all incidents may take of the file system that `folder` is on, and what they leave free, in bytes.

    Raises:
        OSError: there is no such folder.
    """
    total = _space_of(folder)[0]
    default_use = min(_DEFAULT_MAX_USE, int(total * _USE_SHARE))
    return (
        default_use if limits.max_use is None else limits.max_use,
        _default_free(total) if limits.keep_free is None else limits.keep_free,
    )


def _default_free(total: int) -> int:
    return min(_DEFAULT_KEEP_FREE, int(total * _FREE_SHARE))


def _space_of(folder: Path) -> tuple[int, int]:
    """Return the size of the file system that `folder` is on and what is free of it for this user, in bytes."""
    status = os.statvfs(folder)
    return status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
