"""The names that folders of incidents have: ``<UTC time>-<kind>-<id>``, with a mark in front until they are whole."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime, timezone

#: In front of the name of an incident that is not finished.
PARTIAL = ".partial-"
#: In front of the name of one that is being removed.
REMOVING = ".removing-"

_NAME = re.compile(r"(?P<time>\d{8}T\d{6}\.\d{3}Z)-(?P<kind>[a-z_]+)-(?P<id>[0-9a-f]{8})")


@dataclass(frozen=True)
class IncidentName:
    """What the name of an incident's folder tells.

    Attributes:
        seconds: when it was opened, since the epoch, to the millisecond.
        kind: its kind.
        id: its id.
    """

    seconds: float
    kind: str
    id: str

    def __str__(self) -> str:
        moment = datetime.fromtimestamp(self.seconds, timezone.utc)
        stamp = moment.strftime("%Y%m%dT%H%M%S.") + f"{moment.microsecond // 1000:03d}Z"
        return f"{stamp}-{self.kind}-{self.id}"


def parse_name(name: str) -> IncidentName | None:
    """Return what the name of a finished or an unfinished incident's folder tells; None for any other name."""
    match = _NAME.fullmatch(name.removeprefix(PARTIAL))
    if match is None:
        return None
    try:
        moment = datetime.strptime(match["time"], "%Y%m%dT%H%M%S.%fZ").replace(tzinfo=timezone.utc)
    except ValueError:
        return None
    return IncidentName(moment.timestamp(), match["kind"], match["id"])


def is_finished(name: str) -> bool:
    """Say whether it is the name of a finished incident's folder."""
    return parse_name(name) is not None and not name.startswith(PARTIAL)
