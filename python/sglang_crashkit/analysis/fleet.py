"""What the incidents of many hosts have in common: the same fault by count, and on which hosts it is and is not.

Pure: incidents in, groups out. A contrast is no more than counts of hosts, which are told with it.
"""

from __future__ import annotations

import functools
import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from packaging.version import InvalidVersion, Version

from sglang_crashkit.model.incident import FleetIncident

RELEASE = "release"
#: An attribute is told where it has so large a share of the hosts of a fault, and no more than that of the others.
_SHARE_IN, _SHARE_OUT = 0.9, 0.5
#: Fewer hosts than this tell nothing.
_LEAST_HOSTS = 3
_MAX_CONTRASTS = 3


@dataclass(frozen=True)
class Contrast:
    """An attribute that the hosts of a fault share, and others do not."""

    name: str
    value: str
    inside: int  # how many hosts of the fault have it, of `inside_of` of which it is known
    inside_of: int
    outside: int  # how many of the other hosts with incidents have it, of `outside_of` of which it is known
    outside_of: int

    def __str__(self) -> str:
        who = f"all {self.inside}" if self.inside == self.inside_of else f"{self.inside} of {self.inside_of}"
        return f"{who} with {self.name} {self.value}, and {self.outside} of {self.outside_of} other hosts"


@dataclass(frozen=True)
class Group:
    """A fault."""

    key: str  # a short name for it
    kind: str  # this and `fault`: as `FleetIncident` has them
    fault: tuple[str, ...]
    count: int  # how many incidents of it there are
    hosts: tuple[str, ...]  # on which hosts, sorted
    first: float  # when it began first, in seconds since the epoch
    last: float  # when it began last
    causes: Mapping[str, int]  # how many incidents have which cause
    values: Mapping[str, Mapping[str, int]]  # by attribute, how many hosts have which value
    contrasts: tuple[Contrast, ...]  # what sets its hosts apart, the clearest first
    #: The oldest release that it is seen with, where hosts with older ones have other incidents.
    since_release: str | None
    older_hosts: int  # how many hosts have incidents with older releases, none of which is this
    path: str  # the latest incident of it

    def lines(self, hosts: int) -> list[str]:
        """Return in words what is reported of its hosts, of so many in all."""
        lines = [f"seen on {len(self.hosts)} of {hosts} hosts", *map(str, self.contrasts)]
        if self.since_release is not None:
            lines.append(
                f"first with release {self.since_release}: none on the {self.older_hosts} hosts that have incidents "
                "with an older one"
            )
        return lines

    def to_json(self) -> dict[str, Any]:
        """Return it for a program."""
        return vars(self) | {"contrasts": [vars(contrast) for contrast in self.contrasts]}


def group(incidents: Iterable[FleetIncident]) -> list[Group]:
    """Return the faults, that on most hosts first."""
    faults: dict[tuple[str, ...], list[FleetIncident]] = {}
    known: dict[str, dict[str, set[str]]] = {}
    for row in incidents:
        faults.setdefault((row.kind, *row.fault), []).append(row)
        for name, value in row.attributes.items():
            known.setdefault(name, {}).setdefault(row.host, set()).add(value)
    groups = [_group(members, known) for members in faults.values()]
    return sorted(groups, key=lambda its: (-len(its.hosts), -its.count, its.key))


def _group(members: Sequence[FleetIncident], known: Mapping[str, Mapping[str, set[str]]]) -> Group:
    latest = max(members, key=lambda row: row.seconds)
    hosts = {row.host for row in members}
    own: dict[str, dict[str, set[str]]] = {}
    for row in members:
        for name, value in row.attributes.items():
            own.setdefault(name, {}).setdefault(row.host, set()).add(value)
    since, older = _since_release(members, own.get(RELEASE, {}), known.get(RELEASE, {}))
    identity = (latest.kind, *latest.fault)
    return Group(
        key=hashlib.sha256(repr(identity).encode()).hexdigest()[:8],
        kind=latest.kind,
        fault=latest.fault,
        count=len(members),
        hosts=tuple(sorted(hosts)),
        first=min(row.seconds for row in members),
        last=latest.seconds,
        causes=dict(Counter(row.cause for row in members).most_common()),
        values={name: dict(_hosts_by_value(by_host).most_common()) for name, by_host in sorted(own.items())},
        contrasts=tuple(_contrasts(own, known)),
        since_release=since,
        older_hosts=older,
        path=latest.path,
    )


def _hosts_by_value(by_host: Mapping[str, set[str]]) -> Counter[str]:
    return Counter(value for values in by_host.values() for value in values)


def _contrasts(
    own: Mapping[str, Mapping[str, set[str]]], known: Mapping[str, Mapping[str, set[str]]]
) -> list[Contrast]:
    found = []
    for name, inside in own.items():
        outside = {host: values for host, values in known[name].items() if host not in inside}
        if min(len(inside), len(outside)) < _LEAST_HOSTS:
            continue
        others = _hosts_by_value(outside)
        for value, count in _hosts_by_value(inside).items():
            if count >= _SHARE_IN * len(inside) and others[value] <= _SHARE_OUT * len(outside):
                found.append(Contrast(name, value, count, len(inside), others[value], len(outside)))
    found.sort(key=lambda its: (its.outside / its.outside_of - its.inside / its.inside_of, its.name))
    return found[:_MAX_CONTRASTS]


def _since_release(
    members: Sequence[FleetIncident], own: Mapping[str, set[str]], known: Mapping[str, set[str]]
) -> tuple[str | None, int]:
    named = {row.attributes.get(RELEASE) for row in members}
    releases = [version for name in named if (version := _version_of(name)) is not None]
    if not releases or len(own) < _LEAST_HOSTS:
        return None, 0
    oldest = min(releases)
    older = [
        host
        for host, values in known.items()
        if any((version := _version_of(value)) is not None and version < oldest for value in values)
    ]
    return (str(oldest), len(older)) if len(older) >= _LEAST_HOSTS else (None, 0)


@functools.lru_cache(maxsize=1024)
def _version_of(text: str | None) -> Version | None:
    try:
        return Version(text) if text else None
    except InvalidVersion:
        return None
