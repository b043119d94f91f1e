"""The log of an incident, ``events.jsonl``: a line for each piece of the incident when it is added or changed.

A line is a JSON object with one key, a field of ``incident.json``. Its value is the new or changed fields of one
process, with its pid; one event of the timeline; or the whole of any other field. `reduce` rebuilds the incident from
the lines and skips a last line that was cut off.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import islice
from typing import Any

from sglang_crashkit.model.incident import Incident

LOG = "events.jsonl"
#: Limits, since anyone may have written the log; that of 512 ranks has 10 MB in a few thousand lines.
MAX_BYTES, _MAX_LINES = 64 << 20, 100_000


class IncidentLog:
    """The state of an incident's log, from which the next lines follow."""

    def __init__(self) -> None:
        self._logged: dict[tuple[object, str], int] = {}  # hash of the last logged value of each owner and field
        self._events = 0
        self._next: tuple[dict[tuple[object, str], int], int] = ({}, 0)

    def lines(self, incident: Incident) -> list[str]:
        """Return a line for each piece that was added or changed since the last call of `keep`."""
        document = incident.to_json()
        del document["timeline"]
        self._next = (dict(self._logged), len(incident.timeline))
        processes = [(one, self._changed(one["pid"], one)) for one in document.pop("processes")]
        # Processes come first: a log that is cut off then has each process that its other lines refer to.
        told = [_line("processes", {"pid": one["pid"], **changed}) for one, changed in processes if changed]
        told += [_line(name, value) for name, value in self._changed(None, document).items()]
        return told + [_line("timeline", entry) for entry in incident.timeline[self._events :]]

    def keep(self) -> None:
        """Record that the lines of the last call of `lines` are written."""
        self._logged, self._events = self._next

    def _changed(self, owner: object, values: dict[str, Any]) -> dict[str, Any]:
        """Return the values of an owner that differ from the logged ones; an empty one is logged only after another."""
        changed, logged = {}, self._next[0]
        for name, value in values.items():
            said = hash(json.dumps(value, default=str))
            if logged.get((owner, name), said if value in (None, [], {}, "") else None) != said:
                changed[name] = value
                logged[owner, name] = said
        return changed


def _line(name: str, value: object) -> str:
    return json.dumps({name: value}, default=str)


def reduce(lines: Iterable[bytes]) -> Incident:
    """Return the incident in the lines of a log, marked as not complete; lines that don't parse are skipped."""
    document: dict[str, Any] = {}
    processes: dict[str, dict[str, Any]] = {}
    timeline = []
    for line in islice(filter(bytes.strip, lines), _MAX_LINES):
        try:
            ((name, value),) = json.loads(line).items()
        except (AttributeError, ValueError, RecursionError):
            continue
        if name == "timeline":
            timeline.append(value)
        elif name == "processes" and isinstance(value, dict):
            processes.setdefault(str(value.get("pid")), {}).update(value)
        else:
            document[name] = value
    whole = {**document, "processes": list(processes.values()), "timeline": timeline, "complete": False}
    return Incident.of(whole).shown()
