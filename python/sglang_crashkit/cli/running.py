"""How a command runs: whatever becomes of its output, it goes on to its end, and whoever asks it to end, it does.

Its standard output may be closed, on a full disk, or read by nobody any more.
"""

from __future__ import annotations

import contextlib
import io
import os
import select
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class _Output(io.FileIO):
    """A descriptor that takes everything: what cannot be written goes nowhere, so that the command goes on to its end.

    Attributes:
        problem: why something was not written; empty also where whoever read it has enough, as `head`.
    """

    problem = ""

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if not isinstance(error, BrokenPipeError):
                self.problem = error.strerror or str(error)
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            return memoryview(data).nbytes


def guarded(stream: TextIO | None) -> TextIO:
    """Return a standard stream, which may be closed (None), so that writing to it never fails.

    What a terminal cannot show is escaped.
    """
    if stream is None:
        # Not closed here: it is open for as long as the process.
        return Path(os.devnull).open("w")
    if not isinstance(stream, io.TextIOWrapper):
        return stream
    raw = _raw_of(stream)
    if isinstance(raw, io.FileIO) and not isinstance(raw, _Output):
        stream.flush()
        output = _Output(raw.fileno(), "w", closefd=False)
        stream = io.TextIOWrapper(
            # With PYTHONUNBUFFERED there is no buffer.
            output if raw is stream.buffer else io.BufferedWriter(output),
            encoding=stream.encoding,
            line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        )
    # Evidence may hold what the encoding cannot show.
    stream.reconfigure(errors="backslashreplace")
    return stream


def problem_of(stream: TextIO) -> str:
    """Write what is left of a guarded stream, and return why not all of it was written; empty where it was."""
    stream.flush()
    raw = _raw_of(stream)
    return raw.problem if isinstance(raw, _Output) else ""


def _raw_of(stream: TextIO) -> object:
    buffer = getattr(stream, "buffer", None)
    return getattr(buffer, "raw", buffer)


#: How often it is looked whether anybody still reads the answer, in seconds.
_LOOK_SECS = 1.0


class Terminated(KeyboardInterrupt):
    """SIGTERM came, or what it is for is over."""


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Let SIGTERM end this as Ctrl-C does."""

    def end(_signal: int, _frame: FrameType | None) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def ends_with_reader(descriptor: int, secs: float) -> Iterator[None]:
    """End this as SIGTERM does where nobody reads `descriptor` any more, and after `secs` seconds in any case.

    Who runs a command on another machine, as ssh does, does not end it there when it ends itself: all that can be seen
    of it there is that the pipe of the answer has no reader.
    """
    deadline = time.monotonic() + secs
    pipe = select.poll()
    # Of what is hung up or has no reader, it is told without being asked.
    pipe.register(descriptor, 0)

    def look(_signal: int, _frame: FrameType | None) -> None:
        if pipe.poll(0) or time.monotonic() >= deadline:
            # Once: how it ends is not to be cut short.
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise Terminated

    before = signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, _LOOK_SECS, _LOOK_SECS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def printable(text: str) -> str:
    """Return a text in which nothing is a command to a terminal: paths and titles are whatever somebody made them."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
