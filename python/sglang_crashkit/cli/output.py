"""The only place of the command line that prints. Nothing that it prints acts on a terminal, but what is its own.

What cannot be printed goes nowhere: a closed standard output, a full disk or a reader who has enough ends no command.
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
    """Print lines as `str` has them, each on one line whatever is in it; an `error` goes to the standard error."""
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
    """A standard stream that takes everything, also what others write: a warning, an error's text, what argparse says.

    Attributes:
        problem: why something was not written; empty also where the reader has enough, as `head`.
    """

    problem = ""

    def write(self, text: str, /) -> int:
        self.control(visible(text))
        return len(text)

    def control(self, text: str) -> None:
        """Write a text with what a terminal is to act on."""
        with self._written():
            super().write(text)

    def flush(self) -> None:
        with self._written():
            super().flush()

    @contextlib.contextmanager
    def _written(self) -> Iterator[None]:
        """Let what cannot be written go nowhere, so that the command goes on to its end."""
        try:
            yield
        except OSError as error:
            if not isinstance(error, BrokenPipeError):
                self.problem = error.strerror or str(error)
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)


def guarded(stream: TextIO | None) -> TextIO:
    """Return a standard stream, which may be closed (None), so that writing to it never fails.

    What a terminal cannot show is escaped, and so is what it would act on.
    """
    if stream is None:
        # Not closed here: it is open for as long as the process.
        return Path(os.devnull).open("w")
    if id(stream) not in map(id, (sys.__stdout__, sys.__stderr__)):
        return stream
    stream.flush()
    # Evidence may hold what the encoding cannot show.
    return _Stream(
        open(stream.fileno(), "wb", closefd=False),
        encoding=stream.encoding,
        errors="backslashreplace",
        line_buffering=stream is sys.__stderr__,
    )


def problem_of(stream: TextIO) -> str:
    """Write what is left of a guarded stream, and return why not all of it was written; empty where it was."""
    stream.flush()
    return stream.problem if isinstance(stream, _Stream) else ""
