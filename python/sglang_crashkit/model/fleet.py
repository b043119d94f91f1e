"""What is known of one incident where those of many hosts are compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class FleetIncident:
    """One incident, as its host left it."""

    host: str  # whose folder it is in
    seconds: float  # when it began, since the epoch
    path: str
    kind: str  # the verdict's, or the incident's where there is none
    fault: tuple[str, ...]  # what makes two the same: who failed, of what, where; without release, rank and line
    cause: str  # the class of its cause
    attributes: Mapping[str, str]  # what may set it apart, such as ``driver``, by name
