"""Colour on a terminal, and nowhere else; https://no-color.org switches it off there, too."""

from __future__ import annotations

import os
import shutil
import sys

#: Columns of a table where the output is no terminal and ``COLUMNS`` is not set.
_COLUMNS = 120


def is_coloured() -> bool:
    """Say whether the standard output is to be coloured."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def bold(text: str) -> str:
    """Return `text` so that it stands out."""
    return f"\033[1m{text}\033[0m" if is_coloured() else text


def columns() -> int:
    """Return how many columns a table may have."""
    return max(40, shutil.get_terminal_size((_COLUMNS, 24)).columns)
