"""Arguments that several commands have, and argparse types, which raise `argparse.ArgumentTypeError` in plain words."""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path

_LONGEST_SECS = 1e7
_SETS_VARIABLE = re.compile(r"[A-Za-z_]\w*=")
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def add_incident(parser: argparse.ArgumentParser, *, default: str | None = "latest") -> None:
    """Add the arguments that name an incident (see `crash_folder`); without a `default` the user has to name one."""
    parser.add_argument(
        "incident",
        nargs="?" if default else None,
        default=default,
        help=f"id of an incident or how it begins, latest{' (the default)' if default else ''}, or the path of its "
        "folder or of a crash folder",
    )
    parser.add_argument(
        "--folder", metavar="DIR", type=Path, help="crash folder in which an id and latest are looked up"
    )


def add_python(parser: argparse.ArgumentParser) -> None:
    """Add the option that names an SGLang installation."""
    parser.add_argument(
        "--python",
        metavar="PATH",
        help="interpreter or virtual environment with the SGLang that is meant; this one by default",
    )


def positive(text: str) -> int:
    """Return a whole number of 1 or more."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return number


def seconds(text: str) -> float:
    """Return a number of seconds from 0 to less than `_LONGEST_SECS`, some months."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < _LONGEST_SECS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0 to {_LONGEST_SECS:.0f}")
    return number


def duration(text: str) -> float:
    """Return a duration such as ``90m``, ``12h`` or ``2d`` in seconds; a bare number is one of seconds."""
    number, unit = (text[:-1], text[-1]) if text[-1:] in _UNITS else (text, "s")
    try:
        return seconds(number) * _UNITS[unit]
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"{text!r} is no time such as 30s, 90m, 12h or 2d") from None


def command(text: str) -> list[str]:
    """Return the words of a command as a shell splits them; ``env`` sets the variables that stand before it."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no command: {error}") from None
    if not words:
        raise argparse.ArgumentTypeError("a command is missing")
    # No shell runs the command, so ``env`` sets its variables.
    return ["env", *words] if _SETS_VARIABLE.match(words[0]) else words
