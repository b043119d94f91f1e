"""What is alike in texts of many processes: all but the numbers that each process and moment has of its own."""

from __future__ import annotations

import re
from functools import partial

_DIGITS = re.compile(r"\d+")
#: Compiled when it is first used, as most commands need none of it.
_NUMBER = r"""
    (?P<kept> (?:status|code|signal|errno|error|xid|seqnum|numel\w*|ranks)\W{0,3}\d+ )
    # Of a process: a path, an address, an identity.
    | (?P<whole> 0x[0-9a-f]+ | [0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12} )
    | (?<![\w/])/\S+ | (?<=[\]\d]):\d+
    | (?<![a-z])(?:rank|tp|dp|pp|ep|gpu|device|cuda|pid|process|thread|port|batch|batches|host|node)[\s:=\#]{0,2}\d+
    # Of a moment: a time, a size, a count of what was under way; and what is too long for anything but these.
    | \d+(?:\.\d+)+ | \d{5,} | \d+(?=\s?(?:[kmgt]i?b|bytes|[munμ]?s|secs?|seconds|requests?|tokens?)\b)
    """


def without_own_numbers(text: str, mark: str = "") -> str:
    """Return a text without the numbers that differ with each process and moment.

    Exit codes, signals, numbers of errors, counts of ranks and whatever else is a small number are left as they are.

    Args:
        text: such as the reason of a failure.
        mark: what stands in place of each number.
    """
    return re.sub(_NUMBER, partial(_marked, mark), text, flags=re.IGNORECASE | re.VERBOSE)


def _marked(mark: str, found: re.Match[str]) -> str:
    if found["kept"]:
        return found[0]
    return mark if found["whole"] else _DIGITS.sub(mark, found[0])
