"""How much of the disk incidents may take, kept before a byte is written.

The oldest finished incidents make room for a new one, with the GPU cores and request dumps that they name. What others
filled the disk with is none of their business: then an incident takes no more than older ones gave up for it. journald
keeps its journals in the same way (journald.conf(5), ``SystemMaxUse=``, ``SystemKeepFree=``).

A core or a dump that no incident names may be anybody's. It is never removed; it counts where further cores are asked
for, and not against who died of what, which is small and worth more.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Callable, Sequence
from pathlib import Path

from sglang_crashkit.incident.crash_files import CrashFile, find_crash_files, is_of_living_server, named_in
from sglang_crashkit.incident.name import PARTIAL, REMOVING, is_finished, parse_name
from sglang_crashkit.kernel.folder_lock import FolderLock
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
FULL = "the disk is full"


class NoRoomError(OSError):
    """A piece of evidence was not written because there is no room for it; the message is the reason."""

    def __str__(self) -> str:
        return str(self.strerror)


def status_of(error: Exception) -> EvidenceStatus:
    """Return the status of a piece of evidence that could not be written for `error`."""
    return "skipped" if isinstance(error, NoRoomError) else "failed"


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
        total, free = _space_of(incidents)
        default_use = min(_DEFAULT_MAX_USE, int(total * _USE_SHARE))
        self._max_use = default_use if limits.max_use is None else limits.max_use
        # What others have filled already is not emptied again at the expense of evidence.
        self._floor = min(_keep_free(total, limits), free)
        self._max_incident = limits.max_incident
        self._own: dict[str, int] = {}
        self._others: dict[Path, _Other] | None = None

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
        growth = size - self._own.get(name, 0)
        reason = None if essential else self._reason_against(growth)
        if reason is not None:
            raise NoRoomError(errno.ENOSPC, reason)
        self._own[name] = size

    def forget(self, name: str) -> None:
        """Count a file no longer: it was not written after all."""
        self._own.pop(name, None)

    def rename(self, name: str) -> None:
        """Note that this incident's folder is called something else when it is finished."""
        self._names.add(name)

    def settle(self) -> None:
        """Make room for what the essential files took beyond the limits."""
        if not self._fits_use(0) or not self._fits_disk(0):
            self.make_room(0)

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
            self._remove_until(lambda: self._fits_use_beside(size))
            if not self._fits_use_beside(size):
                return self._too_much
            if folder.stat().st_dev == self._incidents.stat().st_dev:
                self._remove_until(lambda: self._fits_disk(size), here=True)
                fits = self._fits_disk(size)
            else:
                total, free = _space_of(folder)
                fits = free - size >= min(_DEFAULT_KEEP_FREE, int(total * _FREE_SHARE))
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
            self._others = others = self._measure()
            device = self._incidents.stat().st_dev
            for path in sorted((path for path in others if is_finished(path.name)), key=lambda path: path.name):
                if fits():
                    break
                is_of_use = not here or others[path].device == device
                if is_of_use and self._may_remove(path, others[path]) and remove_incident(path, others[path].files):
                    del others[path]
        finally:
            lock.release()

    def _reason_against(self, growth: int) -> str | None:
        if self.own + growth > self._max_incident:
            return f"the incident would take more than {MAX_INCIDENT} ({self._max_incident / MB:g} MB)"
        if not self._fits_use(growth) or not self._fits_disk(growth):
            self.make_room(max(growth, _AT_A_TIME))
        if not self._fits_use(growth):
            return self._too_much
        if not self._fits_disk(growth):
            if _space_of(self._incidents)[1] < growth:
                return FULL
            return f"less than {KEEP_FREE} ({self._floor / MB:.3g} MB) would stay free on the disk"
        return None

    def _fits_use(self, growth: int) -> bool:
        if self._others is None:
            # Not before the first stacks: nothing may delay the capture.
            self._others = self._measure()
        return sum(other.size for other in self._others.values()) + self.own + growth <= self._max_use

    def _fits_use_beside(self, size: int) -> bool:
        if self._others is None:
            self._others = self._measure()
        # Looked at anew: cores grow, and those of this incident are named by none that is finished.
        beside = sum(file.size for file in find_crash_files(self._folders))
        incidents = sum(other.size - other.beside for other in self._others.values())
        return incidents + beside + self.own + size <= self._max_use

    def _fits_disk(self, growth: int) -> bool:
        return _space_of(self._incidents)[1] - growth >= self._floor

    def _may_remove(self, path: Path, other: _Other) -> bool:
        # Its server may be about to write what it names.
        is_old = all(file.age_secs >= _SETTLED_SECS for file in other.files)
        return is_old and not is_of_living_server(path, but=self._server)

    def _measure(self) -> dict[Path, _Other]:
        """Return what everything in the folders but this incident takes, by path."""
        found: dict[Path, _Other] = {}
        for folder in self._folders:
            try:
                device, entries = folder.stat().st_dev, list(folder.iterdir())
            except OSError:
                if folder == self._incidents:
                    raise
                continue
            found |= {path: _Other(size_of(path), device) for path in entries if path.name not in self._names}
        # What several name is the last one's, which may be unfinished.
        incidents = sorted((path for path in found if parse_name(path.name)), key=_time_of, reverse=True)
        for path, files in named_in(incidents, find_crash_files(self._folders)).items():
            found[path].add(files)
        return found


class _Other:
    """What one entry of a folder of incidents takes.

    Attributes:
        size: its bytes on disk, with `files`.
        device: the file system that it is on.
        files: the cores and dumps that it names, and that lie beside it.
    """

    def __init__(self, size: int, device: int) -> None:
        self.size = size
        self.device = device
        self.files: Sequence[CrashFile] = ()

    @property
    def beside(self) -> int:
        """How many bytes `files` take."""
        return sum(file.size for file in self.files)

    def add(self, files: Sequence[CrashFile]) -> None:
        """Take in what it names."""
        self.files = files
        self.size += self.beside


def _time_of(path: Path) -> str:
    return path.name.removeprefix(PARTIAL)


def _keep_free(total: int, limits: DiskLimits) -> int:
    default = min(_DEFAULT_KEEP_FREE, int(total * _FREE_SHARE))
    return default if limits.keep_free is None else limits.keep_free


def remove_incident(folder: Path, files: Sequence[CrashFile] = ()) -> bool:
    """Remove a finished incident of this user; say whether it is gone.

    It loses its name first, so that one that is removed in part is never taken for a whole one.

    Args:
        folder: the incident.
        files: what it names, which goes with it.
    """
    removing = folder.with_name(f"{REMOVING}{folder.name}")
    with contextlib.suppress(OSError):
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            return False
        folder.rename(removing)
        for file in files:
            file.remove()
        shutil.rmtree(removing)
        return True
    return False


def size_of(folder: Path) -> int:
    """Return how many bytes the files below `folder`, or a file of that name, take on disk; links are not followed."""
    size = 0
    with contextlib.suppress(OSError):
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode):
            return status.st_blocks * 512
    for path, _folders, files in os.walk(folder):
        for name in files:
            with contextlib.suppress(OSError):
                size += (Path(path) / name).lstat().st_blocks * 512
    return size


def _space_of(folder: Path) -> tuple[int, int]:
    """Return the size of the file system that `folder` is on and what is free of it for this user, in bytes."""
    status = os.statvfs(folder)
    return status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
