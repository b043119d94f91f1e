"""The log of an incident, ``events.jsonl``: a line for each piece of it that came or changed, as it did.

A line is an object with one name, that of a part of ``incident.json``, and its value: of one process, by its pid, what
is new; one event of the timeline; or the whole of any other part. `reduce` puts them together; a last line that was cut
off is no line.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sglang_crashkit.incident.store import LOG
from sglang_crashkit.kernel.private_files import read_regular
from sglang_crashkit.model.incident import Incident

#: That of 512 ranks has 10 MB.
_MAX_BYTES = 256 << 20


class IncidentLog:
    """What is in the log of an incident by now."""

    def __init__(self) -> None:
        self._logged: dict[tuple[object, str], int] = {}  # of each value the hash of what was logged last
        self._events = 0

    def lines(self, incident: Incident) -> list[str]:
        """Return a line for each piece that came or changed since the last call."""
        document = incident.to_json()
        del document["timeline"]
        processes = [(one, self._changed(one["pid"], one)) for one in document.pop("processes")]
        told = [_line(name, value) for name, value in self._changed(None, document).items()]
        told += [_line("processes", {"pid": one["pid"], **changed}) for one, changed in processes if changed]
        told += [_line("timeline", entry) for entry in incident.timeline[self._events :]]
        self._events = len(incident.timeline)
        return told

    def _changed(self, owner: object, values: dict[str, Any]) -> dict[str, Any]:
        """Return those of an owner's values that are not logged as they are; what is empty goes without saying."""
        changed = {}
        for name, value in values.items():
            said = hash(json.dumps(value, default=str))
            if self._logged.get((owner, name), said if value in (None, [], {}, "") else None) != said:
                changed[name] = value
                self._logged[owner, name] = said
        return changed


def read_log(folder: Path) -> Incident | None:
    """Return the incident that the log in its folder tells of, judged; None without one."""
    from sglang_crashkit.incident.judging import judge

    try:
        incident = reduce(read_regular(folder / LOG, _MAX_BYTES).split(b"\n"))
    except OSError:
        return None
    incident.verdict = judge(incident, folder)
    return incident


def _line(name: str, value: object) -> str:
    return json.dumps({name: value}, default=str)


def reduce(lines: Iterable[bytes]) -> Incident:
    """Return the incident that the lines of a log tell of; what is no line of a log is passed over."""
    document: dict[str, Any] = {}
    processes: dict[str, dict[str, Any]] = {}
    timeline = []
    for line in lines:
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
    return Incident.of({**document, "processes": list(processes.values()), "timeline": timeline}).shown()
