"""Show a text from any source, without letting a character in it control the terminal or change the text beside it."""

from __future__ import annotations

import re

#: Escape sequences for colours of a terminal, which are common in logs.
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
#: Characters of ordinary texts that Python calls not printable: the spaces of some languages, the joiner of emoji.
_ORDINARY = frozenset("\xa0\u202f\u3000\u200d")


def visible(text: str, keep: str = "\n\t") -> str:
    """Return `text` with an escape for each character that is invisible, or that changes how others are shown.

    Args:
        text: any text; colours in it are removed.
        keep: further characters that stay; without a newline in it, the result is one line.
    """
    if text.isprintable():
        return text
    text = _COLOURS.sub("", text.replace("\r\n", "\n"))
    kept = _ORDINARY.union(keep)
    return "".join(char if char.isprintable() or char in kept else ascii(char)[1:-1] for char in text)
