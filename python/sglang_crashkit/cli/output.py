"""The only place of the command line that prints. Nothing that it prints acts on a terminal, but what is its own.

What cannot be printed goes nowhere: a closed standard output, a full disk or a reader who has enough ends no command.
"""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from sglang_crashkit.visible import visible

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_BOLD, _NORMAL, _ERASE = "\033[1m", "\033[0m", "\033[K"


def say(*lines: object, error: bool = False) -> None:
    """Print lines; each stays one line, whatever is in it.

    Args:
        lines: what is printed as `str` has it.
        error: to the standard error.
    """
    stream = sys.stderr if error else sys.stdout
    stream.write("".join(f"{visible(str(line), keep='')}\n" for line in lines))
    stream.flush()


def say_text(text: str, *, error: bool = False) -> None:
    """Print a text of several lines."""
    say(*text.removesuffix("\n").split("\n"), error=error)


def say_title(line: str) -> None:
    """Print a line, in bold on a terminal that shows it; https://no-color.org switches that off."""
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        say(line)
        return
    write = sys.stdout.control if isinstance(sys.stdout, _Stream) else sys.stdout.write
    write(f"{_BOLD}{visible(line, keep='')}{_NORMAL}\n")


def say_progress(text: str) -> None:
    """Show on the terminal how far long work is, in place of what was shown before; without a terminal, nothing."""
    if sys.stderr.isatty():
        write = sys.stderr.control if isinstance(sys.stderr, _Stream) else sys.stderr.write
        write(f"\r{visible(text, keep='')}{_ERASE}")
        sys.stderr.flush()


def say_json(value: Any, indent: int | None = None) -> None:
    """Print a JSON value, in which all that is not ASCII is escaped."""
    sys.stdout.write(json.dumps(value, indent=indent) + "\n")
    sys.stdout.flush()


class _Stream(io.TextIOWrapper):
    """A standard stream that also shows what others write: a warning, the text of an error, what argparse says."""

    def write(self, text: str, /) -> int:
        super().write(visible(text))
        return len(text)

    def control(self, text: str) -> None:
        """Write a text with what a terminal is to act on."""
        super().write(text)


class _Output(io.FileIO):
    """A descriptor that takes everything: what cannot be written goes nowhere, so that the command goes on to its end.

    Attributes:
        problem: why something was not written; empty also where the reader has enough, as `head`.
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

    What a terminal cannot show is escaped, and so is what it would act on.
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
        stream = _Stream(
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
