"""Short names of processes, such as ``TP1`` for ``sglang::scheduler_TP1 (pid 4711)``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang_crashkit.model.incident import Entry, Failure, Incident, ProcessReport, Trigger

_TITLE = re.compile(r"\bsglang::(?:scheduler_(?=\w))?")
_NUMBERED = re.compile(r"(.*?)(\d{1,9})")


def short_name(title: str, role: str = "") -> str:
    """Return the title of a process without its usual prefixes."""
    if role == "server":
        return "the main process"
    return title.removeprefix("sglang::").removeprefix("scheduler_") or title


def join_names(names: Iterable[str]) -> str:
    """Join names in order; names that end in consecutive numbers become a range: ``TP0, TP2-7``."""
    runs: list[tuple[str, int, int] | str] = []
    for name in sorted(dict.fromkeys(names), key=natural_order):
        found = _NUMBERED.fullmatch(name)
        last = runs[-1] if runs else ""
        if found is None:
            runs.append(name)
        elif isinstance(last, tuple) and (last[0], last[2] + 1) == (found[1], int(found[2])):
            runs[-1] = (last[0], last[1], last[2] + 1)
        else:
            runs.append((found[1], int(found[2]), int(found[2])))
    texts = (run if isinstance(run, str) else f"{run[0]}{run[1]}" + (f"-{run[2]}" * (run[2] > run[1])) for run in runs)
    return ", ".join(texts)


def join_some_names(names: Iterable[str], most: int) -> str:
    """Join names as `join_names` does; if that exceeds `most` characters, return the first name and the number."""
    every = list(dict.fromkeys(names))
    text = join_names(every)
    return text if len(text) <= most else f"{text.partition(', ')[0]}, ... ({len(every):,} in all)"


def natural_order(name: str) -> tuple[str, int]:
    """Return a key that sorts names by their last number: ``TP2`` before ``TP10``."""
    found = _NUMBERED.fullmatch(name)
    return (found[1], int(found[2])) if found else (name, -1)


class Names:
    """The short names of the processes of an incident."""

    def __init__(self, incident: Incident) -> None:
        names = {process.pid: short_name(process.title, process.role) for process in incident.processes}
        self._long = {f"{one.title} (pid {one.pid})": names[one.pid] for one in incident.processes}
        self._by_pid = {incident.server.pid: "the main process", **names}

    def short(self, process: ProcessReport | Trigger | Failure | Entry) -> str:
        """Return the short name of a process."""
        known = self._by_pid.get(process.pid) if process.pid is not None else None
        return known or short_name(process.title)

    def shorten(self, text: str) -> str:
        """Replace the long names in a sentence with short ones."""
        for long in sorted(self._long, key=len, reverse=True):
            text = text.replace(long, self._long[long])
        return _TITLE.sub("", text)


_DIGITS = re.compile(r"\d+")
#: Compiled at its first use: most commands do not need it.
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
    """Return a text with `mark` in place of the numbers that differ between processes or from time to time.

    Exit codes, signals, error numbers, counts of ranks and other small numbers are left as they are.
    """

    def marked(found: re.Match[str]) -> str:
        if found["kept"]:
            return found[0]
        return mark if found["whole"] else _DIGITS.sub(mark, found[0])

    return re.sub(_NUMBER, marked, text, flags=re.IGNORECASE | re.VERBOSE)
