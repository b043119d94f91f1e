"""Show a text from anywhere as it is, and let no character in it act: on a terminal, or on the text beside it."""

from __future__ import annotations

import re

#: Colours of a terminal, which logs are full of.
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
#: What Python calls not printable and ordinary texts hold: the spaces of some languages, and what joins emoji.
_ORDINARY = frozenset("\xa0\u202f\u3000\u200d")


def visible(text: str, keep: str = "\n\t") -> str:
    """Return `text` with an escape for each character that is not seen, or that changes how others are seen.

    Args:
        text: anything.
        keep: characters that stay, too; without a newline in it, what comes back is one line.
    """
    if text.isprintable():
        return text
    text = _COLOURS.sub("", text.replace("\r\n", "\n"))
    kept = _ORDINARY.union(keep)
    return "".join(char if char.isprintable() or char in kept else ascii(char)[1:-1] for char in text)
