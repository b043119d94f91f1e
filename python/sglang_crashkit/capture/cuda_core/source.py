"""The file of a core, opened so that nothing else is read instead, and read within limits.

A core may come from anywhere, and its numbers may lie: every length is checked against the file before memory is taken
for it, and what is read in all is bounded, so that neither overlapping tables nor a name without end cost more than
that.
"""

from __future__ import annotations

import io
import os
import stat
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from sglang_crashkit.errors import CrashkitError

#: Of a core of a whole GPU of 132 SMs, section table and rows take 80 MB; memory that was dumped is never read.
MOST_BYTES = 512 << 20
#: A small read costs a system call and the work of a parser, which takes as long as reading so many bytes.
_LEAST_COST = 256
#: That core takes about 5 s on a slow machine.
MOST_SECONDS = 60.0


class CudaCoreError(CrashkitError):
    """The file is no core of the CUDA driver's, is damaged, or is more than is read of one."""


class Source:
    """A file that is read in pieces; close it, or use it as a context.

    Args:
        path: the file itself; neither a link nor anything but a file is opened.
        most_bytes: how much is read in all, in bytes.
        most_seconds: how long that may take.

    Attributes:
        path: as given.
        size: how long it is, in bytes.

    Raises:
        CudaCoreError: it cannot be opened, or is no file.
    """

    def __init__(self, path: Path, most_bytes: int = MOST_BYTES, most_seconds: float = MOST_SECONDS) -> None:
        self.path = path
        self._left = most_bytes
        self._deadline = time.monotonic() + most_seconds
        self._descriptor = -1
        try:
            # Not blocking: the open of a pipe would wait for somebody to write to it.
            self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
            found = os.fstat(self._descriptor)
        except (OSError, ValueError) as error:
            self.close()
            raise self._cannot_open(error) from error
        if not stat.S_ISREG(found.st_mode):
            self.close()
            raise CudaCoreError(f"{path} is no file", next_step="name the file that the CUDA driver wrote")
        self.size = found.st_size

    def __enter__(self) -> Source:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def error(self, what: str, next_step: str | None = None) -> CudaCoreError:
        """Return the error that says `what` of the file."""
        return CudaCoreError(f"{self.path}: {what}", next_step=next_step)

    def read(self, offset: int, size: int, what: str) -> bytes:
        """Return `size` bytes from `offset` on.

        Args:
            offset: in bytes from the file's beginning.
            size: in bytes.
            what: what lies there, for the error.

        Raises:
            CudaCoreError: the file does not reach so far, or the limits are spent.
        """
        if offset < 0 or size < 0 or offset + size > self.size:
            raise self.error(
                f"{what} reaches to byte {offset + size}, and the file has {self.size}",
                "wait until the driver has written all of it, or take another core",
            )
        self.spend(size)
        try:
            data = os.pread(self._descriptor, size, offset)
            while len(data) < size:
                piece = os.pread(self._descriptor, size - len(data), offset + len(data))
                if not piece:
                    raise self.error(f"{what} was cut off while it was read")
                data += piece
        except OSError as error:
            raise self.error(f"{what} cannot be read: {error.strerror}") from error
        return data

    def spend(self, size: int) -> None:
        """Count that `size` bytes are read.

        Raises:
            CudaCoreError: the limits are spent.
        """
        self._left -= max(size, _LEAST_COST)
        if self._left < 0:
            raise self.error("its tables take more than is read of a core", "read it with cuda-gdb")
        if time.monotonic() > self._deadline:
            raise self.error("it could not be read in time", "read it with cuda-gdb")

    def _cannot_open(self, error: OSError | ValueError) -> CudaCoreError:
        if self.path.is_symlink():
            return CudaCoreError(f"{self.path} is a link", next_step="name the file itself")
        why = error.strerror if isinstance(error, OSError) else error
        return CudaCoreError(f"{self.path} cannot be opened: {why}", next_step="name a file that you may read")


class Window(io.RawIOBase):
    """A part of the file as a stream of its own, for a parser of ELF files; it may seek as it likes.

    Args:
        source: the file.
        offset: where the part begins, in bytes.
        size: how long it is, in bytes.
        what: what lies there, for errors.
    """

    def __init__(self, source: Source, offset: int, size: int, what: str) -> None:
        super().__init__()
        self._source, self._offset, self._what = source, offset, what
        self._size = max(0, min(size, source.size - offset))
        self._at = 0

    def readable(self) -> bool:
        """Say that it can be read."""
        return True

    def seekable(self) -> bool:
        """Say that it can be moved in."""
        return True

    def tell(self) -> int:
        """Return where it is, in bytes from its beginning."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to `offset`, in bytes, from the beginning, from here or from the end."""
        at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        if not 0 <= at < 1 << 63:
            raise ValueError(f"there is no byte {at}")
        self._at = at
        return at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Fill `buffer` as far as there is something, and return how many bytes that are."""
        size = max(0, min(len(buffer), self._size - self._at))
        if size:
            buffer[:size] = self._source.read(self._offset + self._at, size, self._what)
            self._at += size
        return size


#: What a parser makes of numbers that lie, as far as it says so by itself.
_PARSER_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    OSError,
    RecursionError,
    TypeError,
    ValueError,
    struct.error,
)


@contextmanager
def parsing(source: Source, what: str) -> Iterator[None]:
    """Make every error of pyelftools one that names the file and `what` was read.

    Raises:
        CudaCoreError: in the place of any of them, or pyelftools is not installed.
    """
    try:
        from elftools.common.exceptions import ELFError
        from elftools.construct import ConstructError
    except ImportError as error:
        raise CudaCoreError("pyelftools is not installed", next_step="pip install pyelftools") from error
    try:
        yield
    except (ELFError, ConstructError, *_PARSER_ERRORS) as error:
        raise source.error(f"{what} cannot be read: {str(error) or type(error).__name__}") from error
