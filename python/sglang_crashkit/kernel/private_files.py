"""Folders and files that only their owner may read, whatever the umask; locks on folders, and named pipes.

Evidence holds prompts, tokens and memory. A shared temporary folder may hold a symbolic link that somebody else put
there, so links are never followed for the last component.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
import time
from pathlib import Path
from typing import Any, BinaryIO, Literal

from sglang_crashkit.errors import CrashkitError

_MFD_CLOEXEC, _MFD_ALLOW_SEALING = 0x1, 0x2  # linux/memfd.h
#: Why nothing was written: there is no such pipe, nobody reads it, it is no pipe of that user, or anything else.
WriteOutcome = Literal["no_pipe", "no_reader", "foreign_pipe", "failed"]
_OUTCOMES: dict[int | None, WriteOutcome] = {
    errno.ENOENT: "no_pipe",
    errno.ENXIO: "no_reader",
    errno.ELOOP: "foreign_pipe",
}
#: What came of asking for a lock: somebody else had it all the time, or this file system has no locks.
LockState = Literal["held", "taken", "unsupported"]
_POLL_SECS = 0.01


def make_private_folder(folder: Path) -> Path:
    """Create `folder` with mode 0700; parents that are missing too.

    A folder that is there already is accepted when it is a real folder of this user.

    Raises:
        CrashkitError: it is a link, a file, or another user's.
        OSError: it cannot be created.
    """
    # Not `parents=True`: the folders that it makes have the mode that the umask leaves.
    for parent in reversed(folder.parents):
        if not parent.exists():
            parent.mkdir(mode=0o700, exist_ok=True)
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode):
            raise CrashkitError(
                f"{folder} is not a folder",
                next_step=f"remove it, or name another folder: ls -ld {folder}",
            ) from None
        if status.st_uid != os.geteuid():
            raise CrashkitError(
                f"{folder} belongs to user {status.st_uid}", next_step="name a folder of your own"
            ) from None
    return folder


def create_private(path: Path) -> BinaryIO:
    """Open a new file with mode 0600 for writing bytes.

    Raises:
        FileExistsError: there is something at `path`, a link included.
        OSError: it cannot be created.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    return os.fdopen(descriptor, "wb")


def create_in_memory(name: str) -> int:
    """Return a descriptor of an empty file that is in memory only, and may be sealed; no program inherits it.

    A Python that was built on an older system, as those of uv were until July 2026, has no function for it; the C
    library has one.

    Raises:
        OSError: there is no memory or no descriptor.
    """
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, _MFD_CLOEXEC | _MFD_ALLOW_SEALING)
    # Here alone: it takes a megabyte.
    import ctypes

    create = getattr(ctypes.CDLL(None, use_errno=True), "memfd_create", None)
    descriptor = -1 if create is None else int(create(name.encode(), _MFD_CLOEXEC | _MFD_ALLOW_SEALING))
    if descriptor < 0:
        number = errno.ENOSYS if create is None else ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return descriptor


def write_private(path: Path, data: bytes, *, sync: bool = False) -> None:
    """Write `data` to `path` with mode 0600 in one step: readers see the old file or the new one, never a part.

    With `sync` it has reached the disk then.

    Raises:
        OSError: the folder is missing, read-only or full; nothing is left behind.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        with create_private(temporary) as file:
            file.write(data)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_named(path: Path, data: bytes) -> None:
    """Write `data` to a path that a user named, as `write_private` does.

    Raises:
        OSError: it cannot be written, or there is something that is no file, such as a link, which is not replaced.
    """
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    write_private(path, data)


def write_json(path: Path, value: Any, *, sync: bool = False) -> None:
    """Write `value` as indented JSON; see `write_private`."""
    write_private(path, encode_json(value), sync=sync)


def encode_json(value: Any) -> bytes:
    """Return `value` as indented JSON; what has no form in it stands as its text."""
    return json.dumps(value, indent=2, default=str).encode() + b"\n"


def sync_folder(folder: Path) -> None:
    """Make the entries of `folder` durable; a file system that cannot is no error."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    except OSError:
        pass
    finally:
        os.close(descriptor)


def read_regular(path: Path, most: int, *, from_end: bool = False) -> bytes:
    """Return at most so many bytes of a file that may be anybody's: no pipe is waited for, and no link followed.

    With `from_end` they are its last ones.

    Raises:
        OSError: it is missing, no regular file, or cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "is no regular file", str(path))
        if from_end:
            file.seek(max(0, found.st_size - most))
        # Room is made for as much as is asked for. A size of 0 says nothing, as that of a file in /proc.
        return file.read(min(most, found.st_size) or most)


class FifoError(Exception):
    """Nothing was written; the message says why, in a few words, and `outcome` says it to a program."""

    def __init__(self, message: str, outcome: WriteOutcome) -> None:
        super().__init__(message)
        self.outcome: WriteOutcome = outcome


def write_to_fifo(path: Path, data: bytes, owner: int | None, *, follow: bool = False) -> None:
    """Write few enough bytes for a pipe that is empty to the named pipe `path` and return at once.

    It must belong to the user `owner`; None is nobody. `path` may be a link, such as one of those in ``/proc/PID/fd``,
    with `follow`.

    Raises:
        FifoError: it is no pipe of that user, or nobody reads it.
    """
    try:
        # Not blocking: a pipe that nobody reads any more would hold the caller up for ever.
        flags = os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
        descriptor = os.open(path, flags)
    except OSError as error:
        why = "nobody reads it" if error.errno == errno.ENXIO else error.strerror or str(error)
        raise FifoError(f"pipe {path}: {why}", _OUTCOMES.get(error.errno, "failed")) from error
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISFIFO(found.st_mode) or found.st_uid != owner:
            raise FifoError(f"{path} is not a pipe of the process's own user", "foreign_pipe")
        os.write(descriptor, data)
    except OSError as error:
        raise FifoError(f"pipe {path}: {error.strerror}", "failed") from error
    finally:
        os.close(descriptor)


class FolderLock:
    """A lock on a folder among processes, once `acquire` says so; the kernel lets go of it when its holder ends.

    flock(2) on the folder itself leaves no lock file behind. It holds across containers of one machine; pids and start
    times do not. Across machines it does on a file alone, where the network file system has locks: NFS makes none for a
    folder (nfs(5), flock(2)).

    Args:
        folder: what to lock; a link in its place is not followed.
        shared: others may have it too, unless they want it for themselves alone.
        file: the name of a file in the folder to lock in its place; it is made, and stays.
    """

    def __init__(self, folder: Path, *, shared: bool = False, file: str = "") -> None:
        self._path = folder / file
        self._flags = os.O_RDWR | os.O_CREAT if file else os.O_RDONLY | os.O_DIRECTORY
        self._kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        self._descriptor = -1

    def acquire(self, timeout_secs: float = 0.0) -> LockState:
        """Try to lock the folder, waiting so many seconds for somebody else to let go.

        Raises:
            OSError: there is no such folder, or it may not be read.
        """
        deadline = time.monotonic() + timeout_secs
        self._descriptor = os.open(self._path, self._flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        while True:
            try:
                fcntl.flock(self._descriptor, self._kind | fcntl.LOCK_NB)
            except OSError as error:
                is_taken = error.errno in (errno.EWOULDBLOCK, errno.EACCES)
                if is_taken and time.monotonic() < deadline:
                    time.sleep(_POLL_SECS)
                    continue
                self.release()
                return "taken" if is_taken else "unsupported"
            return "held"

    def release(self) -> None:
        """Let go of it; does nothing where it is not held."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
