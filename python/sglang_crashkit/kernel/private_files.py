"""Folders and files that only their owner may read, whatever the umask; locks on folders, and named pipes.

Evidence contains prompts, tokens and memory. In a shared temporary folder another user may have put a symbolic link in
place of a file, so a link as the last component of a path is not followed.
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
    """A folder of this user, opened once: `path` leads to this folder even if its name is given to another one later.

    A missing folder is created with mode 0700, and so are missing folders above it.

    Args:
        folder: its last `own` components must be folders of this user, and no links; the user chose those above.
        own: the number of these components, 1 or more.
        within: the folder that contains `folder`, if it is open already.

    Attributes:
        path: a path to the folder by its descriptor; valid in this process, while this object exists.

    Raises:
        CrashkitError: one of the last `own` components is a link, a file, or belongs to another user.
        OSError: a folder cannot be created or opened.
    """

    path: Path

    def __init__(self, folder: Path, own: int = 1, within: OwnFolder | None = None) -> None:
        own = min(own, len(folder.parents))
        above = folder.parents[own - 1]
        # Not `parents=True`: it ignores `mode` for the folders above, which get the umask's.
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
    """Create `folder` as `OwnFolder` does, and return it; raises what `OwnFolder` raises."""
    OwnFolder(folder)
    return folder


def create_private(path: Path) -> BinaryIO:
    """Create a file with mode 0600 for writing bytes; raises FileExistsError if anything, even a link, has its name."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    return os.fdopen(descriptor, "wb")


def create_in_memory(name: str) -> int:
    """Return a descriptor, with close-on-exec set, of an empty file in memory (memfd_create(2)) that allows seals.

    A Python that was built on an older system, as uv's builds were until July 2026, has no function for it; the C
    library's is called then. Raises OSError if no memory or no descriptor is left.
    """
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, _MFD_CLOEXEC | _MFD_ALLOW_SEALING)
    # Imported here only: ctypes takes a megabyte.
    import ctypes

    create = getattr(ctypes.CDLL(None, use_errno=True), "memfd_create", None)
    descriptor = -1 if create is None else int(create(name.encode(), _MFD_CLOEXEC | _MFD_ALLOW_SEALING))
    if descriptor < 0:
        number = errno.ENOSYS if create is None else ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return descriptor


def write_private(path: Path, data: bytes, *, sync: bool = False) -> None:
    """Write `data` to `path` with mode 0600 atomically: readers see the old file or the new one, never a part.

    With `sync`, return only when the data is on the disk. On failure raise OSError, and leave no temporary file.
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
    """Append `data` to a file in one write, all of it or nothing; create the file with mode 0600 if it is missing.

    Raises OSError if `path` is a link, or the disk is full.
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
    """Write `data` to a path that a user gave, as `write_private` does.

    Also raises OSError, and replaces nothing, if `path` is a link or anything but a regular file.
    """
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    write_private(path, data)


def write_json(path: Path, value: Any, *, sync: bool = False) -> None:
    """Write `value` as indented JSON; see `write_private`."""
    write_private(path, encode_json(value), sync=sync)


def encode_json(value: Any) -> bytes:
    """Return `value` as indented JSON; an object that JSON cannot represent becomes its `str`."""
    return json.dumps(value, indent=2, default=str).encode() + b"\n"


def sync_folder(folder: Path) -> None:
    """Write the entries of `folder` to the disk; errors, as of a file system that does not support it, are ignored."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def open_regular(path: Path, *, follow: bool = False) -> BinaryIO:
    """Open for reading a file that another user may have put there: don't block on a pipe, nor follow a link.

    With `follow`, follow links. Raises OSError if the file is missing, is not regular, or cannot be read.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    descriptor = os.open(path, flags)
    # Checked before `fdopen`, which raises for a folder and leaves the descriptor open.
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def read_regular(path: Path, most: int, *, from_end: bool = False) -> bytes:
    """Return the first `most` bytes, with `from_end` the last ones, of a file that `open_regular` opens."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if from_end:
            file.seek(max(0, size - most))
        # `read` allocates as many bytes as it is asked for. A size of 0 may be wrong, as for files in /proc.
        return file.read(min(most, size) or most)


def read_json(path: Path, most: int) -> Any:
    """Return the JSON value in a file of at most `most` bytes, which `open_regular` opens.

    Raises:
        OSError: the file is missing, not regular, too long, or cannot be read.
        ValueError: the file does not contain JSON.
        RecursionError: the JSON is nested too deeply.
    """
    data = read_regular(path, most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"has more than {most} bytes", str(path))
    return json.loads(data)


class FifoError(Exception):
    """Nothing was written to the pipe; the message gives the reason in a few words."""


def write_to_fifo(path: Path, data: bytes, owner: int | None, *, follow: bool = False) -> None:
    """Write `data` to the named pipe `path` without blocking; it must fit into an empty pipe.

    The pipe must belong to the user `owner`. With `follow`, `path` may be a link, such as an entry of ``/proc/PID/fd``.
    Raises FifoError if `path` is not a pipe of that user, or the pipe has no reader.
    """
    try:
        # O_NONBLOCK, because opening a pipe without a reader would block the caller for ever.
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
    """Return the regular files below a folder, sorted; append to `problems` an error for each unreadable folder."""

    def note(error: OSError) -> None:
        at = error.filename
        problems.append(CrashkitError(f"{at} cannot be read: {error.strerror}", next_step=f"ls -ld {at}"))

    walked = ((Path(at), names) for at, _folders, names in os.walk(folder, onerror=note))
    return sorted(path for at, names in walked for path in map(at.joinpath, names) if path.is_file())


class FolderLock:
    """A lock on a folder between processes, taken by `acquire`; the kernel releases it when its holder ends.

    flock(2) on the folder itself leaves no lock file. The lock works between containers of a machine, in which pids
    and start times do not identify a process, but not between machines: NFS locks no folder (nfs(5), flock(2)).

    Args:
        folder: the folder to lock; it must not be a link.
        shared: take a shared lock, which several processes may hold at once, instead of an exclusive lock.
        follow: let `folder` be a link, such as `OwnFolder.path`.
    """

    def __init__(self, folder: Path, *, shared: bool = False, follow: bool = False) -> None:
        self._folder = folder
        self._flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
        self._kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        self._descriptor = -1

    def acquire(self, timeout_secs: float = 0.0) -> Literal["held", "taken", "unsupported"]:
        """Try to lock the folder, for at most `timeout_secs` seconds while another process holds the lock.

        Return ``taken`` if another process held it all the time, ``unsupported`` if the file system has no locks.
        Raises OSError if the folder is missing, or may not be read.
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
        """Release the lock; does nothing if it is not held."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
