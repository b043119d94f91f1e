"""What is known of one incident where those of many hosts are compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class FleetIncident:
    """One incident, as its host left it.

    Attributes:
        host: whose folder it is in.
        seconds: when it began, since the epoch.
        path: its folder.
        kind: the verdict's, or the incident's where there is none.
        fault: what makes two the same: who failed, of what, where; without release, rank and line.
        cause: the class of its cause.
        attributes: what may set it apart, such as ``driver``, by name.
    """

    host: str
    seconds: float
    path: str
    kind: str
    fault: tuple[str, ...]
    cause: str
    attributes: Mapping[str, str]
