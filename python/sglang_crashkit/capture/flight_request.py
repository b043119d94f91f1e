"""Request dumps of PyTorch's flight recorders of a process, for NCCL and for gloo, and detect complete dumps.

The first NCCL process group of a process has a thread that creates a named pipe, ``<stem><rank>.pipe``. About once a
second it checks for data in the pipe. If there are any, another thread writes the dump, ``<stem><rank>``. Sources, as
of PyTorch 2.9 to 2.14: ``DumpPipe`` in ``ProcessGroupNCCL.hpp``, ``HeartbeatMonitor::runLoop`` in
``ProcessGroupNCCL.cpp``, and ``DebugInfoWriter`` in ``FlightRecorder.cpp``.

The dump includes Python stacks, which no variable turns off, and the thread that writes it needs the GIL for them. If
another thread holds the GIL for ever, there is no dump.

PyTorch does not write dumps of gloo's recorder. The thread that answers for the process (see `capture.responder`) gets
one from ``torch._C._distributed_c10d._dump_fr_trace`` (PyTorch 2.9 to 2.14), and needs the GIL, too. Its answer is a
line with the process's rank and the time since the epoch, then the dump, with SGLang's names of the process groups; or
a line with the reason why there is no dump.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from sglang_crashkit.capture.responder import COLLECTIVES, Conversation
from sglang_crashkit.kernel.private_files import FifoError, open_regular, read_regular, write_private, write_to_fifo
from sglang_crashkit.kernel.procfs import open_files, owner_of
from sglang_crashkit.kernel.stack_hooks import HookFiles
from sglang_crashkit.model.flight_dump import MAX_BYTES, FlightDump, FlightDumpError, parse_dump

#: Variables for how many collectives a process records, of NCCL and of gloo alike. The second name is used if the first
#: is not set; from PyTorch 2.14 on, it causes a deprecation warning.
BUFFER_SIZE, OLD_BUFFER_SIZE = "TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"
PIPE_STEM = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
#: Variables for the stem of the dump's name; the first that is set counts.
DUMP_STEMS = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")

_DELETED = " (deleted)"
_MAX_BYTES = 1 << 16
_HEAD = re.compile(rb"(\d{1,9}) (\d{1,12}\.\d{1,9})")
_MAX_REASON = 200
#: A dump that PyTorch wrote unasked belongs to this incident if it is no older than this, in seconds.
_UNASKED_SECS = 120.0


class FlightPlace(msgspec.Struct, frozen=True):
    """The paths of the pipe and the dump of one process's flight recorder, as set in the process itself."""

    pipe_stem: str  # the beginning of the path of its pipe; empty if it has none
    dump_stem: Annotated[str, msgspec.Meta(min_length=1)]  # the beginning of the path of its dump
    is_own: bool  # no other process writes dumps there

    def write(self, runtime: Path, pid: int, start_ticks: int) -> None:
        """Save this for process `pid` in the runtime folder.

        Raises:
            OSError: the folder is gone or full.
        """
        write_private(HookFiles.of(runtime, pid, start_ticks).flight, msgspec.json.encode(self))

    @classmethod
    def read(cls, runtime: Path, pid: int, start_ticks: int) -> FlightPlace | None:
        """Return what process `pid` saved in the runtime folder; None if there is nothing, or it cannot be read."""
        try:
            data = read_regular(HookFiles.of(runtime, pid, start_ticks).flight, _MAX_BYTES)
            return msgspec.json.decode(data, type=cls)
        except (OSError, ValueError, RecursionError):
            return None


@dataclass(frozen=True)
class Received:
    """One dump: its global rank, its bytes, its parsed contents, and when it was written (seconds since the epoch)."""

    rank: int
    data: bytes
    dump: FlightDump
    seconds: float


class FlightRequest:
    """The request for one dump of one process, from the trigger to the complete file.

    `is_late` means that an earlier request got no dump. A dump that exists may then be of that request, not unasked.
    """

    def __init__(self, pid: int, place: FlightPlace, *, is_late: bool = False) -> None:
        self.pid = pid
        #: The dump existed before it was requested: PyTorch writes one before it ends a process in which a collective
        #: took too long.
        self.is_unasked = False
        self._place, self._is_late = place, is_late
        self._path: Path | None = None
        self._rank = 0
        self._before: tuple[int, ...] | None = None
        self._tried: tuple[int, ...] | None = None

    def send(self) -> None:
        """Request the dump, unless PyTorch wrote one unasked; return at once.

        Raises:
            FlightDumpError: there is no pipe, it has no reader, or it is not the process's own.
        """
        if self.take_unasked():
            return
        link, rank = self._find_pipe()
        self._expect(rank)
        self._before = self._mark()
        try:
            write_to_fifo(link, b"1", owner_of(self.pid), follow=True)
        except FifoError as error:
            raise FlightDumpError(str(error)) from error

    def take_unasked(self) -> bool:
        """Return whether PyTorch wrote a dump unasked; if so, `look` will return it."""
        # If other processes write there, too, a dump may be of one of them; an old dump is of an earlier incident.
        stem = Path(self._place.dump_stem)
        with contextlib.suppress(OSError):
            for path in stem.parent.iterdir() if self._place.is_own and not self._is_late else ():
                number = path.name.removeprefix(stem.name)
                is_one = path.name.startswith(stem.name) and _is_rank(number)
                if is_one and time.time() - path.lstat().st_mtime <= _UNASKED_SECS:
                    self._expect(int(number))
                    self.is_unasked = True
                    return True
        return False

    def _expect(self, rank: int) -> None:
        self._rank, self._path = rank, Path(f"{self._place.dump_stem}{rank}")

    def look(self) -> Received | None:
        """Return the dump when it is complete, None before then.

        Raises:
            FlightDumpError: the file is not a dump.
        """
        mark, path = self._mark(), self._path
        if path is None or mark is None or mark in (self._before, self._tried):
            return None
        if any(path == name for _link, name in open_files(self.pid)):
            return None
        owner, seconds = owner_of(self.pid), path.stat().st_mtime
        with open_regular(path) as file:
            if os.fstat(file.fileno()).st_uid != (os.geteuid() if owner is None else owner):
                raise FlightDumpError(f"{path} is another user's")
            data = file.read(MAX_BYTES + 1)
        try:
            dump = parse_dump(data)
        except FlightDumpError as error:
            if not error.is_cut_off:
                raise
            self._tried = mark
            return None
        if self._place.is_own:
            # Remove this dump, so that the next one is recognised by its existence.
            path.unlink(missing_ok=True)
        return Received(self._rank, data, dump, seconds)

    def leftover(self) -> str:
        """Describe the file of a dump that was not completed."""
        mark = self._mark()
        if mark is None or mark == self._before:
            return "no file appeared"
        return f"{self._path} has {mark[-1]} bytes"

    def _find_pipe(self) -> tuple[Path, int]:
        """Return the link in ``/proc`` to the pipe that the process reads, and the rank in the pipe's name.

        The pipe is not opened by its name: if several processes have the same stem and rank, as replicas have, each one
        unlinks the pipe of the one before, which still reads from it.
        """
        stem = self._place.pipe_stem
        for link, path in open_files(self.pid):
            number = str(path).removesuffix(_DELETED).removeprefix(stem).removesuffix(".pipe")
            if stem and _is_rank(number) and str(path).removesuffix(_DELETED) == f"{stem}{number}.pipe":
                return link, int(number)
        raise FlightDumpError(f"there is no pipe {stem or '<unset>'}<rank>.pipe: NCCL was not initialised")

    def _mark(self) -> tuple[int, ...] | None:
        """Return numbers that change when the dump is written again, its length in bytes last; None if absent."""
        try:
            status = self._path.lstat() if self._path is not None else None
        except OSError:
            status = None
        return status and (status.st_ino, status.st_mtime_ns, status.st_size)


def _is_rank(text: str) -> bool:
    return re.fullmatch(r"\d{1,9}", text, re.ASCII) is not None


class NoRecorderError(FlightDumpError):
    """The process does not record its gloo collectives; the message is the reason."""


class GlooRequest:
    """The request for one gloo dump of process `pid`, from the question at the socket `path` to the complete answer."""

    is_unasked = False

    def __init__(self, pid: int, path: Path) -> None:
        self._pid = pid
        self._path = path
        self._conversation: Conversation | None = None

    def send(self) -> None:
        """Request the dump; return at once.

        Raises:
            FlightDumpError: no thread listens at the socket.
        """
        try:
            self._conversation = Conversation(self._path, self._pid, COLLECTIVES)
        except OSError as error:
            raise FlightDumpError(f"no thread of it answers: {error.strerror or error}") from error

    def look(self) -> Received | None:
        """Return the dump when it is complete, None before then.

        Raises:
            FlightDumpError: the answer is not a dump.
        """
        reason, answer, size = None, self._answer, -1
        while reason is None and self._conversation is not None and len(answer) > size:
            size, reason = len(answer), self._conversation.read()
        if reason:
            raise FlightDumpError(reason)
        return parse_answer(bytes(answer)) if reason is not None else None

    def leftover(self) -> str:
        """Describe what came of an answer that was not completed."""
        return f"{len(self._answer)} bytes came" if self._answer else "no answer, the GIL is not to be had"

    @property
    def _answer(self) -> bytearray:
        return self._conversation.answer if self._conversation is not None else bytearray()

    def close(self) -> None:
        """Close the connection; the answer is no longer awaited."""
        if self._conversation is not None:
            self._conversation.connection.close()


def parse_answer(answer: bytes) -> Received:
    """Return the dump in an answer.

    Raises:
        NoRecorderError: the process has no recorder; the answer is the reason.
        FlightDumpError: the answer is malformed.
    """
    line, _, data = answer.partition(b"\n")
    head = _HEAD.fullmatch(line)
    if head is None:
        kind = FlightDumpError if data else NoRecorderError
        raise kind(line[:_MAX_REASON].decode(errors="backslashreplace"))
    return Received(int(head[1]), data, parse_dump(data), float(head[2]))
