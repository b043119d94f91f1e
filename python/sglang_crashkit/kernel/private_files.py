"""Folders and files that only their owner may read, whatever the umask; locks on folders, and named pipes.

Evidence holds prompts, tokens and memory. A shared temporary folder may hold a symbolic link that somebody else put
there, so links are never followed for the last component.
"""

from __future__ import annotations

import contextlib
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
_POLL_SECS = 0.01


class OwnFolder:
    """A folder of this user's, opened once: what is done below `path` is done in it, whatever its name leads to later.

    It is made with mode 0700 where it is missing, as are those above it.

    Args:
        folder: its last components must be folders of this user, and no links; what is above is the user's choice.
        own: how many, 1 or more.
        within: the folder that `folder` is in, where that is open.

    Attributes:
        path: a way to it that no name is on; good in this process, and as long as this object is there.

    Raises:
        CrashkitError: one of them is a link, a file, or another user's.
        OSError: it cannot be created or opened.
    """

    path: Path

    def __init__(self, folder: Path, own: int = 1, within: OwnFolder | None = None) -> None:
        own = min(own, len(folder.parents))
        above = folder.parents[own - 1]
        # Not `parents=True`: the folders that it makes have the mode that the umask leaves.
        for parent in reversed((above, *above.parents)) if within is None else ():
            if not parent.exists():
                parent.mkdir(mode=0o700, exist_ok=True)
        self._descriptor = os.open(within.path if within else above, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        for name in folder.parts[-own:]:
            above /= name
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=self._descriptor)
            try:
                inner = os.open(name, flags, dir_fd=self._descriptor)
            except NotADirectoryError:
                next_step = f"remove it, or name another folder: ls -ld {above}"
                raise CrashkitError(f"{above} is not a folder", next_step=next_step) from None
            os.close(self._descriptor)
            self._descriptor = inner
            if (owner := os.fstat(inner).st_uid) != os.geteuid():
                raise CrashkitError(f"{above} belongs to user {owner}", next_step="name a folder of your own")
        self.path = Path(f"/proc/self/fd/{self._descriptor}")

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError):
            os.close(self._descriptor)


def make_private_folder(folder: Path) -> Path:
    """Make `folder` as `OwnFolder` does, with what it raises, and return it."""
    OwnFolder(folder)
    return folder


def create_private(path: Path) -> BinaryIO:
    """Open a new file with mode 0600 for writing bytes; raises FileExistsError where there is anything, as a link."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    return os.fdopen(descriptor, "wb")


def create_in_memory(name: str) -> int:
    """Return a descriptor of an empty file that is in memory only, and may be sealed; no program inherits it.

    A Python that was built on an older system, as those of uv were until July 2026, has no function for it; the C
    library has one. Raises OSError where there is no memory or no descriptor.
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

    With `sync` it has reached the disk then. Raises OSError where that is not possible, and leaves nothing behind.
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


def append_private(path: Path, data: bytes) -> None:
    """Add `data` at the end of a file, a new one with mode 0600, in one write, or nothing.

    Raises OSError where it is a link, or there is no room.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        before = os.fstat(descriptor).st_size
        if os.write(descriptor, data) < len(data):
            os.ftruncate(descriptor, before)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    finally:
        os.close(descriptor)


def write_named(path: Path, data: bytes) -> None:
    """Write `data` to a path that a user named, as `write_private` does.

    Raises OSError, too, where there is something that is no file, such as a link, which is not replaced.
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
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def open_regular(path: Path, *, follow: bool = False) -> BinaryIO:
    """Open a file that may be anybody's for reading: no pipe is waited for, and no link followed but with `follow`.

    Raises OSError where it is missing, no regular file, or cannot be read.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    descriptor = os.open(path, flags)
    # `fdopen` refuses a folder, and leaves it open.
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "is no regular file", str(path))
    return os.fdopen(descriptor, "rb")


def read_regular(path: Path, most: int, *, from_end: bool = False) -> bytes:
    """Return at most so many bytes, with `from_end` the last ones, of a file as `open_regular` opens it."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if from_end:
            file.seek(max(0, size - most))
        # Room is made for as much as is asked for. A size of 0 says nothing, as that of a file in /proc.
        return file.read(min(most, size) or most)


def read_json(path: Path, most: int) -> Any:
    """Return the JSON value in a file that may be anybody's, of at most so many bytes; see `open_regular`.

    Raises:
        OSError: it is missing, no regular file, too long, or cannot be read.
        ValueError: it holds no JSON.
        RecursionError: it is nested too deeply.
    """
    data = read_regular(path, most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"has more than {most} bytes", str(path))
    return json.loads(data)


class FifoError(Exception):
    """Nothing was written; the message says why, in a few words."""


def write_to_fifo(path: Path, data: bytes, owner: int | None, *, follow: bool = False) -> None:
    """Write few enough bytes for a pipe that is empty to the named pipe `path` and return at once.

    It must belong to the user `owner`. `path` may be a link, such as one of those in ``/proc/PID/fd``, with `follow`.
    Raises FifoError where it is no pipe of that user, or has no reader.
    """
    try:
        # Not blocking: a pipe without a reader would hold the caller up for ever.
        flags = os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
        descriptor = os.open(path, flags)
    except OSError as error:
        why = "it has no reader" if error.errno == errno.ENXIO else error.strerror or str(error)
        raise FifoError(f"pipe {path}: {why}") from error
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISFIFO(found.st_mode) or found.st_uid != owner:
            raise FifoError(f"{path} is not a pipe of the process's own user")
        os.write(descriptor, data)
    except OSError as error:
        raise FifoError(f"pipe {path}: {error.strerror}") from error
    finally:
        os.close(descriptor)


def files_below(folder: Path, problems: list[CrashkitError]) -> list[Path]:
    """Return the regular files below a folder, in order; `problems` gets why folders in it cannot be looked into."""

    def note(error: OSError) -> None:
        at = error.filename
        problems.append(CrashkitError(f"{at} cannot be read: {error.strerror}", next_step=f"ls -ld {at}"))

    walked = ((Path(at), names) for at, _folders, names in os.walk(folder, onerror=note))
    return sorted(path for at, names in walked for path in map(at.joinpath, names) if path.is_file())


class FolderLock:
    """A lock on a folder among processes, once `acquire` says so; the kernel lets go of it when its holder ends.

    flock(2) on the folder itself leaves no lock file behind. It holds across containers of one machine; pids and start
    times do not. It does not hold across machines: NFS makes no lock for a folder (nfs(5), flock(2)).

    Args:
        folder: what to lock; a link in its place is not followed.
        shared: others may have it too, unless they want it for themselves alone.
        follow: follow a link after all, such as `OwnFolder.path`.
    """

    def __init__(self, folder: Path, *, shared: bool = False, follow: bool = False) -> None:
        self._folder = folder
        self._flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
        self._kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        self._descriptor = -1

    def acquire(self, timeout_secs: float = 0.0) -> Literal["held", "taken", "unsupported"]:
        """Try to lock the folder, waiting so many seconds for somebody else to let go.

        It is ``taken`` where somebody else had it all the time, ``unsupported`` where this file system has no locks.
        Raises OSError where there is no such folder, or it may not be read.
        """
        deadline = time.monotonic() + timeout_secs
        self._descriptor = os.open(self._folder, self._flags)
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
