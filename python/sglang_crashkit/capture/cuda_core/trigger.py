"""Request a GPU core from the CUDA driver of a process, and detect when the core is complete.

The driver of a process with ``CUDA_ENABLE_USER_TRIGGERED_COREDUMP=1`` creates a named pipe. When another process writes
to the pipe, the driver writes a core, an ELF file, to the path that ``CUDA_COREDUMP_FILE`` names. Sources: NVIDIA's
CUDA-GDB manual, "GPU core dump support", and the driver API's coredump attributes. A core of a busy GPU takes seconds
to minutes, and a process that is killed before then leaves an incomplete file.
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
import socket
import stat
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from sglang_crashkit.kernel import procfs
from sglang_crashkit.kernel.private_files import FifoError, open_regular, write_to_fifo

_ENABLED, _PIPE, _FILE = "CUDA_ENABLE_USER_TRIGGERED_COREDUMP", "CUDA_COREDUMP_PIPE", "CUDA_COREDUMP_FILE"
#: The driver's default names: from the manual, and as observed with other drivers.
_DEFAULT_PIPE = "corepipe.cuda.%h.%p"
_KNOWN_PIPE = re.compile(r"corepipe[._].*")
_DEFAULT_FILE = "core_%t_%h_%p.nvcudmp"
#: Seconds after which a file that its process has closed, and that does not grow, is no longer being written.
STILL_SECS = 1.0
#: What to write to the pipe. SGLang writes one byte; vLLM writes 1 MB, as a short write was seen to have no effect.
TRIGGER = b"1"
_MAGIC = b"\x7fELF\x02\x01"
#: The fields of an ELF header for the offset of the section table, and the size and number of its rows. If the number
#: does not fit into the header, it is in the first row, from which the second struct reads it.
_HEADER, _COUNT = struct.Struct("<6s34xQ10xHH2x"), struct.Struct("<32xQ")
#: The unit of stat(2)'s ``st_blocks``.
_BLOCK_BYTES = 512


class NoCoreError(Exception):
    """There will be no core; the message is a short reason."""


class CoreRequest:
    """The request for one core of one process, from the trigger to the complete file.

    `environ` is used for variables that cannot be read from the process: setproctitle writes its title over them.
    """

    def __init__(self, pid: int, environ: Mapping[str, str] = os.environ) -> None:
        self.pid = pid
        known = dict(environ) | procfs.read_environ(pid)
        self._is_enabled = known.get(_ENABLED) == "1"
        self._pipe, self._file = known.get(_PIPE, _DEFAULT_PIPE), known.get(_FILE, _DEFAULT_FILE)
        self._before: set[Path] = set()
        self._sizes: dict[Path, tuple[int, float]] = {}  # size, and when it was first seen, by the monotonic clock

    def find_pipes(self) -> list[Path]:
        """Return the pipes that the driver may read, the likeliest first: an earlier process may have left one.

        Raises:
            NoCoreError: there is no pipe, or the driver was not configured to create one.
        """
        if not self._is_enabled:
            raise NoCoreError(f"{_ENABLED}=1 was not set when it started")
        known = self._absolute(self._pipe)
        # Check that each file is a pipe before it is opened: to open a device may have side effects.
        pattern = re.escape(Path(self._pipe).name).replace("%h", ".*").replace("%t", r"\d+")
        wanted = re.compile(pattern.replace("%p", str(self.pid)))
        opened = [path for _link, path in procfs.open_files(self.pid)]
        named = [path for path in opened if wanted.fullmatch(path.name) or _KNOWN_PIPE.fullmatch(path.name)]
        found = list(filter(_is_fifo, dict.fromkeys([known, *named])))
        if found:
            return found
        if os.path.lexists(known):
            raise NoCoreError(f"{known} is not a pipe of the process's own user")
        raise NoCoreError(f"there is no pipe {known}: CUDA was not initialised")

    def send(self, pipes: Sequence[Path] = ()) -> None:
        """Request the core at `pipes`, by default those of `find_pipes`; return at once.

        Raises:
            NoCoreError: there is no pipe, it has no reader, or it is not the process's own.
        """
        pipes = pipes or self.find_pipes()
        self._before = set(self._files())
        first_error: FifoError | None = None
        for path in pipes:
            try:
                write_to_fifo(path, TRIGGER, procfs.owner_of(self.pid))
            except FifoError as error:
                first_error = first_error or error
            else:
                return
        assert first_error is not None
        raise NoCoreError(str(first_error)) from first_error

    def join(self) -> bool:
        """Return whether the driver is already writing a core unasked, as it does when the GPU fails.

        If so, `look` returns that core.
        """
        opened = {path for _link, path in procfs.open_files(self.pid)}
        files = set(self._files())
        self._before = files - opened
        return bool(files & opened)

    @property
    def is_watchable(self) -> bool:
        """Whether the core will be a file; ``CUDA_COREDUMP_FILE`` may name a command or a pipe instead."""
        return not self._file.startswith("|") and not _is_fifo(Path(self._file))

    def look(self, *, has_ended: bool = False) -> Path | None:
        """Return the core when it is complete, None before then; a process that `has_ended` writes no more.

        Raises:
            NoCoreError: the driver left a file that is not a complete core.
        """
        for path in self._new():
            if not self._has_settled(path) and not has_ended:
                continue
            if is_whole_core(path):
                return path
            if has_ended or time.monotonic() - self._sizes[path][1] >= STILL_SECS:
                raise NoCoreError(f"{path} is no whole core ({self._size_of(path)} bytes)")
        return None

    @property
    def written(self) -> int:
        """A number of bytes that grows while the core is written, even when the driver fills holes in the file."""
        return self.size_on_disk + sum(map(self._size_of, self._new()))

    @property
    def size_on_disk(self) -> int:
        """How many bytes of the disk the core takes so far."""
        size = 0
        for path in self._new():
            with contextlib.suppress(OSError):
                size += path.stat().st_blocks * _BLOCK_BYTES
        return size

    def _new(self) -> set[Path]:
        return set(self._files()) - self._before

    @property
    def folder(self) -> Path:
        """The folder in which the core will be; see `is_watchable`."""
        return self._absolute(self._file).parent

    def written_since(self, seconds: float) -> Path | None:
        """Return the last core that the driver wrote for the process unasked, as it does when the GPU fails.

        A core from before `seconds` since the epoch has another cause, or is of another process.
        """
        found = []
        for path in self._files():
            with contextlib.suppress(OSError):
                changed = path.stat().st_mtime
                if changed >= seconds:
                    found.append((changed, path))
        return max(found)[1] if found else None

    def leftover(self) -> str:
        """Describe the files of a core that was not completed."""
        parts = sorted(self._new())
        return ", ".join(f"{path} has {self._size_of(path)} bytes so far" for path in parts) or "no file appeared"

    def _files(self) -> Iterator[Path]:
        path = self._absolute(self._file)
        # The name has the time of the core, which is not known.
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

    def _has_settled(self, path: Path) -> bool:
        """Return whether the size is unchanged since the last call, and the process has closed the file."""
        size = self._size_of(path)
        known = self._sizes.get(path)
        if known is None or known[0] != size:
            self._sizes[path] = (size, time.monotonic())
            return False
        return not any(path == name for _link, name in procfs.open_files(self.pid))

    @staticmethod
    def _size_of(path: Path) -> int:
        try:
            return path.stat().st_size
        except OSError:
            return 0


def is_whole_core(path: Path) -> bool:
    """Return whether `path`, not a link, is a 64-bit ELF file with its section table, which the driver writes last."""
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            magic, table, row_size, count = _HEADER.unpack(os.pread(file.fileno(), _HEADER.size, 0))
            if magic == _MAGIC and table and not count:
                # The number does not fit into the header; the first row has it.
                (count,) = _COUNT.unpack(os.pread(file.fileno(), _COUNT.size, table))
            return bool(magic == _MAGIC and 0 < table < table + count * row_size <= size)
    except (OSError, ValueError, OverflowError, struct.error):
        return False


def _is_fifo(path: Path) -> bool:
    try:
        return stat.S_ISFIFO(path.lstat().st_mode)
    except OSError:
        return False
