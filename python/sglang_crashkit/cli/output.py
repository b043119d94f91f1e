"""The only module of the command line that prints. It escapes all control characters but those that it adds itself.

Output that cannot be written is dropped: a closed standard output, a full disk or a closed pipe ends no command.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO

from sglang_crashkit.visible import visible

_BOLD, _NORMAL = "\033[1m", "\033[0m"


def say(*lines: object, error: bool = False) -> None:
    """Print `str` of each value on one line, whatever characters it has; with `error` on the standard error."""
    stream = sys.stderr if error else sys.stdout
    stream.write("".join(f"{visible(str(line), keep='')}\n" for line in lines))
    stream.flush()


#: Prints lines on the standard error.
tell = functools.partial(say, error=True)


def say_text(text: str, *, error: bool = False) -> None:
    """Print a text of several lines."""
    say(*text.removesuffix("\n").split("\n"), error=error)


def say_screen(lines: Iterable[str]) -> None:
    """Print lines, the first in bold on a terminal that shows it; https://no-color.org switches that off."""
    title, *rest = lines
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        say(title)
    else:
        write = sys.stdout.control if isinstance(sys.stdout, _Stream) else sys.stdout.write
        write(f"{_BOLD}{visible(title, keep='')}{_NORMAL}\n")
    say(*rest)


def say_json(value: Any, indent: int | None = None) -> None:
    """Print a JSON value, in which all that is not ASCII is escaped."""
    sys.stdout.write(json.dumps(value, indent=indent) + "\n")
    sys.stdout.flush()


class _Stream(io.TextIOWrapper):
    """A standard stream whose writes never fail; it escapes control characters, also in warnings and argparse's text.

    Attributes:
        problem: why something was not written; empty also where the reader closed the pipe, as `head` does.
    """

    problem = ""

    def write(self, text: str, /) -> int:
        self.control(visible(text))
        return len(text)

    def control(self, text: str) -> None:
        """Write a text with its control characters as they are."""
        with self._written():
            super().write(text)

    def flush(self) -> None:
        with self._written():
            super().flush()

    @contextlib.contextmanager
    def _written(self) -> Iterator[None]:
        """Send output that cannot be written to the null device, so that the command runs to its end."""
        try:
            yield
        except OSError as error:
            if not isinstance(error, BrokenPipeError):
                self.problem = error.strerror or str(error)
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)


def guarded(stream: TextIO | None) -> TextIO:
    """Return a stream in place of a standard one, which may be closed (None); writing to it never fails.

    Control characters, and characters that the stream's encoding lacks, are escaped.
    """
    if stream is None:
        # It is never closed: the process uses it to its end.
        return Path(os.devnull).open("w")
    if id(stream) not in map(id, (sys.__stdout__, sys.__stderr__)):
        return stream
    stream.flush()
    # Evidence may have characters that the encoding lacks.
    return _Stream(
        open(stream.fileno(), "wb", closefd=False),
        encoding=stream.encoding,
        errors="backslashreplace",
        line_buffering=stream is sys.__stderr__,
    )


def problem_of(stream: TextIO) -> str:
    """Flush a guarded stream, and return why not all of its output was written; empty where it was."""
    stream.flush()
    return stream.problem if isinstance(stream, _Stream) else ""
