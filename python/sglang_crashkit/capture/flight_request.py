"""Ask PyTorch's flight recorders of a process, of NCCL and of gloo, for their dumps, and tell when a dump is whole.

The first NCCL process group of a process has a thread that makes a named pipe, ``<stem><rank>.pipe``, looks about once
a second whether somebody wrote to it, and has another thread write the dump, ``<stem><rank>``. Sources, as of PyTorch
2.9 to 2.14: ``DumpPipe`` in ``ProcessGroupNCCL.hpp``, ``HeartbeatMonitor::runLoop`` in ``ProcessGroupNCCL.cpp``, and
``DebugInfoWriter`` in ``FlightRecorder.cpp``.

The dump has the Python stacks with it, which no variable turns off there, and for them the writing thread needs the
GIL: where another thread holds that for ever, there is no dump.

PyTorch writes no dump of gloo's recorder by itself. A function of it (``_dump_fr_trace`` of
``torch._C._distributed_c10d``, in PyTorch 2.9 to 2.14) gives one to the thread of the process that answers for it,
which needs the GIL, too; see `capture.responder`. The answer is one line with the process's rank and the time since the
epoch, and the dump, with SGLang's names of its process groups; or one line that says why it is missing.
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

#: How many collectives a process keeps, of NCCL and of gloo alike; the second name counts where the first is not set,
#: and from PyTorch 2.14 on a warning says that it is the old one.
BUFFER_SIZE, OLD_BUFFER_SIZE = "TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"
PIPE_STEM = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
#: The first that is set counts.
DUMP_STEMS = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")

_DELETED = " (deleted)"
_MAX_BYTES = 1 << 16
_HEAD = re.compile(rb"(\d{1,9}) (\d{1,12}\.\d{1,9})")
_MAX_REASON = 200
#: A dump that PyTorch wrote by itself is of what happens now if it is no older than this, in seconds.
_UNASKED_SECS = 120.0


class FlightPlace(msgspec.Struct, frozen=True):
    """Where the flight recorder of one process is asked and where it writes, as the process itself was told."""

    pipe_stem: str  # what the name of its pipe begins with; empty where it makes none
    dump_stem: Annotated[str, msgspec.Meta(min_length=1)]  # what the name of its dump begins with
    is_own: bool  # no other process writes there

    def write(self, runtime: Path, pid: int, start_ticks: int) -> None:
        """Say so for process `pid`.

        Raises:
            OSError: the folder is gone or full.
        """
        write_private(HookFiles.of(runtime, pid, start_ticks).flight, msgspec.json.encode(self))

    @classmethod
    def read(cls, runtime: Path, pid: int, start_ticks: int) -> FlightPlace | None:
        """Return what process `pid` said, None where it said nothing."""
        try:
            data = read_regular(HookFiles.of(runtime, pid, start_ticks).flight, _MAX_BYTES)
            return msgspec.json.decode(data, type=cls)
        except (OSError, ValueError, RecursionError):
            return None


@dataclass(frozen=True)
class Received:
    """One dump: the global rank whose it is, its bytes, what they say, and when it was written, since the epoch."""

    rank: int
    data: bytes
    dump: FlightDump
    seconds: float


class FlightRequest:
    """One dump of one process, from the trigger to the whole file.

    Where an earlier request for it came to no end, a dump that is there (`is_late`) was not written unasked.
    """

    def __init__(self, pid: int, place: FlightPlace, *, is_late: bool = False) -> None:
        self.pid = pid
        #: The dump was there before anybody asked for it: PyTorch writes one before it ends a process in which a
        #: collective took too long.
        self.is_unasked = False
        self._place, self._is_late = place, is_late
        self._path: Path | None = None
        self._rank = 0
        self._before: tuple[int, ...] | None = None
        self._tried: tuple[int, ...] | None = None

    def send(self) -> None:
        """Ask for the dump, unless PyTorch wrote one unasked; return at once.

        Raises:
            FlightDumpError: it cannot be asked: there is no pipe, it has no reader, or it is not the process's own.
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
        """Say whether there is a dump already, which `look` will return then."""
        # Where others write too it may be of another process; an old one is of an earlier incident.
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
        """Return the dump when it is whole, None while it is not.

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
            # The next one is told from this one by its being there.
            path.unlink(missing_ok=True)
        return Received(self._rank, data, dump, seconds)

    def leftover(self) -> str:
        """Say what there is of a dump that did not become whole."""
        mark = self._mark()
        if mark is None or mark == self._before:
            return "no file appeared"
        return f"{self._path} has {mark[-1]} bytes"

    def _find_pipe(self) -> tuple[Path, int]:
        """Return the kernel's link to the pipe that the process reads, and the rank in its name.

        Not the name itself: of several processes that have the same stem and the same rank, as replicas have, each
        takes away the name of the pipe of the one before, which reads it nonetheless.
        """
        stem = self._place.pipe_stem
        for link, path in open_files(self.pid):
            number = str(path).removesuffix(_DELETED).removeprefix(stem).removesuffix(".pipe")
            if stem and _is_rank(number) and str(path).removesuffix(_DELETED) == f"{stem}{number}.pipe":
                return link, int(number)
        raise FlightDumpError(f"there is no pipe {stem or '<unset>'}<rank>.pipe: NCCL was not initialised")

    def _mark(self) -> tuple[int, ...] | None:
        """Return what changes when the dump is written anew, its length in bytes last; None if absent."""
        try:
            status = self._path.lstat() if self._path is not None else None
        except OSError:
            status = None
        return status and (status.st_ino, status.st_mtime_ns, status.st_size)


def _is_rank(text: str) -> bool:
    return re.fullmatch(r"\d{1,9}", text, re.ASCII) is not None


class NoRecorderError(FlightDumpError):
    """The process keeps nothing of what it does over gloo; the message says why."""


class GlooRequest:
    """One dump of process `pid`, from the question at the socket `path` to the whole answer."""

    is_unasked = False

    def __init__(self, pid: int, path: Path) -> None:
        self._pid = pid
        self._path = path
        self._conversation: Conversation | None = None

    def send(self) -> None:
        """Ask for the dump; return at once.

        Raises:
            FlightDumpError: nothing answers there.
        """
        try:
            self._conversation = Conversation(self._path, self._pid, COLLECTIVES)
        except OSError as error:
            raise FlightDumpError(f"no thread of it answers: {error.strerror or error}") from error

    def look(self) -> Received | None:
        """Return the dump when it is whole, None while it is not.

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
        """Say what there is of a dump that did not become whole."""
        return f"{len(self._answer)} bytes came" if self._answer else "no answer, the GIL is not to be had"

    @property
    def _answer(self) -> bytearray:
        return self._conversation.answer if self._conversation is not None else bytearray()

    def close(self) -> None:
        """Wait for the answer no longer."""
        if self._conversation is not None:
            self._conversation.connection.close()


def parse_answer(answer: bytes) -> Received:
    """Return the dump in an answer.

    Raises:
        NoRecorderError: the answer says that there is no recorder.
        FlightDumpError: it is no answer.
    """
    line, _, data = answer.partition(b"\n")
    head = _HEAD.fullmatch(line)
    if head is None:
        kind = FlightDumpError if data else NoRecorderError
        raise kind(line[:_MAX_REASON].decode(errors="backslashreplace"))
    return Received(int(head[1]), data, parse_dump(data), float(head[2]))
