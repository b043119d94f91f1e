"""Incidents as a table, a line each, as wide as the terminal."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sglang_crashkit.incident.first_screen import counts_of, cut
from sglang_crashkit.incident.names import Names
from sglang_crashkit.incident.store import StoredIncident, parse_name
from sglang_crashkit.model.checked_json import mapping_of, mappings_of

_HEAD = ("id", "time (UTC)", "kind", "who", "cause", "requests", "seen")
#: Which column gives way where there is no room, and how narrow it may become.
_CAUSE, _LEAST = 4, 12
#: With fewer columns than this the times have neither year nor second.
_WIDE = 100


def table_lines(incidents: Sequence[StoredIncident], totals: Mapping[str, int], columns: int) -> Iterator[str]:
    """Yield the head and a line for each incident.

    Args:
        incidents: in the order in which they are told.
        totals: how often the fault of each was seen in all, by the incident's name.
        columns: how wide it may be.
    """
    of_time = slice(0, 19) if columns >= _WIDE else slice(5, 16)
    rows = [_HEAD, *(_row(one, totals.get(one.name), of_time) for one in incidents)]
    widths = [max(len(row[place]) for row in rows) for place in range(len(_HEAD))]
    spare = columns - sum(widths) - 2 * (len(widths) - 1)
    widths[_CAUSE] = max(_LEAST, min(widths[_CAUSE], widths[_CAUSE] + spare))
    for row in rows:
        cells = (cut(cell, width).ljust(width) for cell, width in zip(row, widths, strict=True))
        yield "  ".join(cells).rstrip()


def _row(incident: StoredIncident, total: int | None, of_time: slice) -> tuple[str, ...]:
    name, document = parse_name(incident.path.absolute().name), incident.document
    assert name is not None
    kind = name.kind if incident.finished else f"{name.kind} (not finished)"
    moment = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(name.seconds))[of_time]
    if document is None:
        return (name.id, moment, kind, "-", incident.problem, "-", "-")
    counts = counts_of(mapping_of(document.get("requests")))
    lost = str(counts.unfinished) if counts is not None else "-"
    return (name.id, moment, kind, _who(document), cause_of(document), lost, str(total) if total else "-")


def _who(document: Mapping[str, Any]) -> str:
    verdict = mapping_of(document.get("verdict"))
    if first := mapping_of(verdict.get("first_failure")):
        return Names(document).short(first)
    peers = mappings_of(document.get("peers"))
    return ", ".join(f"{peer.get('role')} {peer.get('address')}" for peer in peers[:1]) or "-"


def cause_of(document: Mapping[str, Any]) -> str:
    """Return the class of the cause with its level, what the verdict says where there is none."""
    cause, verdict = mapping_of(document.get("cause")), mapping_of(document.get("verdict"))
    if cause.get("class"):
        return f"{cause['class']} ({cause.get('level')})"
    text = verdict.get("text")
    return f"{text} [{verdict.get('level', 'unknown')}]" if isinstance(text, str) and text else "-"
