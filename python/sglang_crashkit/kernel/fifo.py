"""Write to a named pipe that a process reads, whatever stands at its path by then."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

#: Why nothing was written: there is no such pipe, nobody reads it, it is no pipe of that user, or anything else.
WriteOutcome = Literal["no_pipe", "no_reader", "foreign_pipe", "failed"]
_OUTCOMES: dict[int | None, WriteOutcome] = {
    errno.ENOENT: "no_pipe",
    errno.ENXIO: "no_reader",
    errno.ELOOP: "foreign_pipe",
}


class FifoError(Exception):
    """Nothing was written; the message says why, in a few words.

    Attributes:
        outcome: the same for a program.
    """

    def __init__(self, message: str, outcome: WriteOutcome) -> None:
        super().__init__(message)
        self.outcome: WriteOutcome = outcome


def write_to_fifo(path: Path, data: bytes, owner: int | None, *, follow: bool = False) -> None:
    """Write to the named pipe `path` and return at once.

    Args:
        path: the pipe.
        data: what is written, few enough bytes for a pipe that is empty.
        owner: the user that the pipe must belong to, None where nobody is known that it could belong to.
        follow: `path` may be a link, such as one of those in ``/proc/PID/fd``.

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


def owner_of(pid: int) -> int | None:
    """Return the user of a process, None where it is gone."""
    try:
        return os.stat(f"/proc/{pid}").st_uid  # noqa: PTH116
    except OSError:
        return None


def open_files(pid: int) -> Iterator[tuple[Path, Path]]:
    """Yield what the process `pid` has open: the kernel's link to it, and the path that it had when it was opened."""
    with contextlib.suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            # Between the two it may be closed.
            with contextlib.suppress(OSError):
                yield entry, entry.readlink()
