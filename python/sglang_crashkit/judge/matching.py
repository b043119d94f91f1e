"""How an entry of a table is held against a case: its patterns, and the releases that it is of."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase


def are_in(patterns: Iterable[str], texts: Collection[str]) -> bool:
    """Return whether each of the patterns (of `fnmatch`) is that of one of the texts."""
    return all(any(fnmatchcase(text, pattern) for text in texts) for pattern in patterns)


def release_parts(release: str) -> tuple[int, ...]:
    """Return the numbers of a release, which order it among others; empty where it is not known."""
    return tuple(int(number) for number in re.findall(r"\d+", release.partition("+")[0]))
