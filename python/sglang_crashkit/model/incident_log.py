"""The log of an incident, ``events.jsonl``: a line for each piece of it that came or changed, as it did.

A line is an object with one name, that of a part of ``incident.json``, and its value: of one process, by its pid, what
is new; one event of the timeline; or the whole of any other part. `reduce` puts them together; a last line that was cut
off is no line.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import islice
from typing import Any

from sglang_crashkit.model.incident import Incident

LOG = "events.jsonl"
#: A log of 512 ranks has 10 MB in some thousand lines; anybody may have written it.
MAX_BYTES, _MAX_LINES = 64 << 20, 100_000


class IncidentLog:
    """What is in the log of an incident by now."""

    def __init__(self) -> None:
        self._logged: dict[tuple[object, str], int] = {}  # of each value the hash of what was logged last
        self._events = 0
        self._next: tuple[dict[tuple[object, str], int], int] = ({}, 0)

    def lines(self, incident: Incident) -> list[str]:
        """Return a line for each piece that came or changed since `keep` was called last."""
        document = incident.to_json()
        del document["timeline"]
        self._next = (dict(self._logged), len(incident.timeline))
        processes = [(one, self._changed(one["pid"], one)) for one in document.pop("processes")]
        # The processes first: what a log that is cut off says of one comes after it.
        told = [_line("processes", {"pid": one["pid"], **changed}) for one, changed in processes if changed]
        told += [_line(name, value) for name, value in self._changed(None, document).items()]
        return told + [_line("timeline", entry) for entry in incident.timeline[self._events :]]

    def keep(self) -> None:
        """Take the lines that were returned last for written."""
        self._logged, self._events = self._next

    def _changed(self, owner: object, values: dict[str, Any]) -> dict[str, Any]:
        """Return those of an owner's values that are not logged as they are; what is empty goes without saying."""
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
    """Return the incident that the lines of a log tell of, which is not complete; what is no line is passed over."""
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
