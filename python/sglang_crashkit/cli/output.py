"""The standard output and error of a command, whatever becomes of them: closed, a full disk, or nobody who reads on."""

from __future__ import annotations

import io
import os
from pathlib import Path
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
    """Return a standard stream so that writing to it never fails; what a terminal cannot show is escaped.

    Args:
        stream: what it is now; None where it is closed.
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
