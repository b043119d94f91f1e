"""Ask the CUDA driver of a process for a GPU core, and tell when the core is whole.

The driver of a process with ``CUDA_ENABLE_USER_TRIGGERED_COREDUMP=1`` makes a named pipe, waits for somebody to write
to it, and then writes a core, an ELF file, at the place that ``CUDA_COREDUMP_FILE`` names. Sources: NVIDIA's CUDA-GDB
manual, "GPU core dump support", and the driver API's coredump attributes. "Asked" is not "written": a core of a busy
GPU takes seconds to minutes, and a process that is killed meanwhile leaves half a file.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import re
import socket
import stat
import struct
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

_ENABLED, _PIPE, _FILE = "CUDA_ENABLE_USER_TRIGGERED_COREDUMP", "CUDA_COREDUMP_PIPE", "CUDA_COREDUMP_FILE"
#: The driver's own names, by the manual and as seen with other drivers.
_DEFAULT_PIPE = "corepipe.cuda.%h.%p"
_KNOWN_PIPE = re.compile(r"corepipe[._].*")
_DEFAULT_FILE = "core_%t_%h_%p.nvcudmp"
#: A file that nobody is seen to hold open and that does not grow for this long, in seconds, is not written any more.
_STILL_SECS = 1.0
_ELF_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SEGMENT = struct.Struct("<IIQQQQQQ")
_NO_BITS = 8
_MOST_ROWS = 1_000_000


class NoCoreError(Exception):
    """There will be no core; the message says why, in a few words."""


class CoreRequest:
    """One core of one process, from the trigger to the whole file.

    Args:
        pid: the process.
        environ: the environment that it was started with, as far as its own cannot be read: setproctitle writes the
            title over it.
    """

    def __init__(self, pid: int, environ: Mapping[str, str] = os.environ) -> None:
        self.pid = pid
        self._environ = {name: environ[name] for name in (_ENABLED, _PIPE, _FILE) if name in environ}
        self._environ |= _environment_of(pid)
        self._before: set[Path] = set()
        self._sizes: dict[Path, tuple[int, float]] = {}  # size, and since when, by the monotonic clock

    def send(self) -> None:
        """Ask for the core; return at once.

        Raises:
            NoCoreError: it cannot be asked: there is no pipe, nobody reads it, or it is not the process's own.
        """
        if self._environ.get(_ENABLED) != "1":
            raise NoCoreError(f"{_ENABLED}=1 was not set when it started")
        self._before = set(self._files())
        path = self._find_pipe()
        try:
            # Not blocking: a pipe that nobody reads any more would hold the caller up for ever.
            descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            why = "nobody reads it" if error.errno == errno.ENXIO else error.strerror or str(error)
            raise NoCoreError(f"pipe {path}: {why}") from error
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISFIFO(found.st_mode) or found.st_uid != _owner_of(self.pid):
                raise NoCoreError(f"{path} is not a pipe of the process's own user")
            os.write(descriptor, b"1")
        except OSError as error:
            raise NoCoreError(f"pipe {path}: {error.strerror}") from error
        finally:
            os.close(descriptor)

    @property
    def is_watchable(self) -> bool:
        """Whether the core becomes a file; ``CUDA_COREDUMP_FILE`` may name a command or a pipe instead."""
        template = self._environ.get(_FILE, _DEFAULT_FILE)
        return not template.startswith("|") and not _is_fifo(Path(template))

    def look(self) -> Path | None:
        """Return the core when it is whole, None while it is not.

        Raises:
            NoCoreError: the driver left a file that is no whole core.
        """
        for path in set(self._files()) - self._before:
            if self._is_being_written(path):
                continue
            if not is_whole_core(path):
                raise NoCoreError(f"{path} is no whole core ({self._size_of(path)} bytes)")
            return path
        return None

    def leftover(self) -> str:
        """Say what there is of a core that did not become whole."""
        parts = sorted(set(self._files()) - self._before)
        return ", ".join(f"{path} has {self._size_of(path)} bytes so far" for path in parts) or "no file appeared"

    def _find_pipe(self) -> Path:
        template = self._environ.get(_PIPE, _DEFAULT_PIPE)
        known = self._absolute(template)
        if "%t" not in template and known.exists():
            return known
        wanted = re.compile(_pattern_of(Path(template).name, self.pid))
        for path in _open_files(self.pid):
            if (wanted.fullmatch(path.name) or _KNOWN_PIPE.fullmatch(path.name)) and _is_fifo(path):
                return path
        raise NoCoreError(f"there is no pipe {known}: CUDA was not initialised")

    def _files(self) -> Iterator[Path]:
        path = self._absolute(self._environ.get(_FILE, _DEFAULT_FILE))
        # The time in the name is that of the core, which is not known.
        for name in glob.iglob(glob.escape(str(path)).replace("%t", "*")):  # noqa: PTH207 - an absolute pattern
            with contextlib.suppress(OSError):
                if stat.S_ISREG(os.lstat(name).st_mode):
                    yield Path(name)

    def _absolute(self, template: str) -> Path:
        path = Path(template.replace("%h", socket.gethostname()).replace("%p", str(self.pid)))
        if not path.is_absolute():
            with contextlib.suppress(OSError):
                return Path(f"/proc/{self.pid}/cwd").readlink() / path
        return path

    def _is_being_written(self, path: Path) -> bool:
        size, now = self._size_of(path), time.monotonic()
        known = self._sizes.get(path)
        if known is None or known[0] != size:
            self._sizes[path] = (size, now)
            return True
        if path in _open_files(self.pid):
            return True
        return now - known[1] < _STILL_SECS and not is_whole_core(path)

    @staticmethod
    def _size_of(path: Path) -> int:
        try:
            return path.stat().st_size
        except OSError:
            return 0


def is_whole_core(path: Path) -> bool:
    """Say whether `path` is a 64-bit ELF file that holds all that its headers name."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            header = file.read(_ELF_HEADER.size)
            if len(header) < _ELF_HEADER.size or not header.startswith(b"\x7fELF\x02\x01"):
                return False
            _, _, _, _, _, segments, sections, _, _, *numbers = _ELF_HEADER.unpack(header)
            segment_size, segment_count, section_size, section_count, _names = numbers
            if sections and not section_count:
                # More sections than the header can say: the first one says how many.
                file.seek(sections)
                row = file.read(_SECTION.size)
                section_count = _SECTION.unpack(row)[5] if len(row) == _SECTION.size else 0
            ends = [0]
            if sections and section_count:
                ends += _ends(file, sections, section_count, section_size, _SECTION, (4, 5), _NO_BITS)
            if segments and segment_count:
                ends += _ends(file, segments, segment_count, segment_size, _SEGMENT, (2, 5), None)
            return len(ends) > 1 and max(ends) <= size
    except (OSError, ValueError, struct.error):
        return False


def _ends(
    file: object, offset: int, count: int, row_size: int, row: struct.Struct, extent: tuple[int, int], empty: int | None
) -> list[int]:
    """Return where the table ends, and where all that its rows name ends, in bytes from the file's beginning."""
    if row_size < row.size or not 0 < count <= _MOST_ROWS:
        raise ValueError("no table")
    file.seek(offset)  # type: ignore[attr-defined]
    table = file.read(count * row_size)  # type: ignore[attr-defined]
    if len(table) < count * row_size:
        raise ValueError("the table is cut off")
    ends = [offset + count * row_size]
    for start in range(0, count * row_size, row_size):
        fields = row.unpack_from(table, start)
        kind = fields[1] if empty is not None else fields[0]
        ends.append(0 if kind == empty else fields[extent[0]] + fields[extent[1]])
    return ends


def _environment_of(pid: int) -> dict[str, str]:
    found = {}
    with contextlib.suppress(OSError):
        for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            name, _, value = entry.decode(errors="replace").partition("=")
            if name in (_ENABLED, _PIPE, _FILE):
                found[name] = value
    return found


def _open_files(pid: int) -> Iterator[Path]:
    with contextlib.suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            # Between the two it may be closed.
            with contextlib.suppress(OSError):
                yield entry.readlink()


def _pattern_of(template: str, pid: int) -> str:
    return re.escape(template).replace("%h", ".*").replace("%p", str(pid)).replace("%t", r"\d+")


def _owner_of(pid: int) -> int | None:
    try:
        return os.stat(f"/proc/{pid}").st_uid  # noqa: PTH116
    except OSError:
        return None


def _is_fifo(path: Path) -> bool:
    try:
        return stat.S_ISFIFO(path.lstat().st_mode)
    except OSError:
        return False
