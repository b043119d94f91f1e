"""Incidents by fault, over many hosts, and what the hosts that have it share."""

from __future__ import annotations

import hashlib
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sglang_crashkit.incident.fingerprint import fault_of
from sglang_crashkit.incident.store import StoredIncident, parse_name
from sglang_crashkit.model.incident import Gpus, Incident

#: A value is named where at least the first share of a fault's hosts have it, and at most the second of the others.
_SHARE_IN, _SHARE_OUT = 0.9, 0.5
#: Fewer hosts than this may share a value by chance.
_LEAST_HOSTS = 2
_LINE = re.compile(r":\d+\)$")
_VERSIONS = ("driver", "torch", "kernel", "cuda")


def keep_of(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return only the fields of an ``incident.json`` that grouping needs: there may be ten thousand incidents."""
    incident = Incident.of(document)
    server, environment, cause = incident.server, incident.surroundings, incident.cause
    devices, found = (incident.gpus or Gpus()).devices, fault_of(incident)
    what = [incident.kind]
    if found is not None:
        # Rank and line number are left out: they differ between hosts and releases.
        frames = [_LINE.sub(")", frame) for frame in found.frames]
        what = [found.kind, found.who.partition(" ")[0], found.what, *frames]
    attributes = {
        "release": server.sglang_version,
        "model": environment.model,
        "GPU": next((device.name for device in devices if device.name), ""),
        **{name: environment.versions.get(name) for name in _VERSIONS},
    }
    return {
        "server": {"hostname": server.hostname},
        "what": what,
        "class": cause.kind if cause is not None else "unknown",
        "attributes": {name: value for name, value in attributes.items() if value},
    }


@dataclass(frozen=True)
class Group:
    """The incidents of one fault."""

    key: str  # a short name for it
    what: tuple[str, ...]  # kind, role, what failed, and where, innermost first
    count: int  # of incidents
    hosts: tuple[str, ...]
    first: float  # time of its first incident, in seconds since the epoch
    last: float  # time of its last incident
    causes: Mapping[str, int]  # cause → number of incidents
    common: tuple[str, ...]  # what its hosts have in common, in words
    path: str  # folder of its latest incident


def groups_of(incidents: Sequence[StoredIncident]) -> list[Group]:
    """Group incidents that were read with `keep_of` by fault; the fault on the most hosts comes first."""
    faults: dict[tuple[str, ...], list[StoredIncident]] = {}
    known: dict[str, dict[str, set[str]]] = {}
    for incident in incidents:
        kept = incident.document or {}
        faults.setdefault(tuple(kept["what"]), []).append(incident)
        for name, value in kept["attributes"].items():
            known.setdefault(name, {}).setdefault(_host_of(incident), set()).add(value)
    groups = []
    for what, members in faults.items():
        seconds = [name.seconds for one in members if (name := parse_name(one.name)) is not None]
        hosts = tuple(sorted({_host_of(one) for one in members}))
        group = Group(
            key=hashlib.sha256(repr(what).encode()).hexdigest()[:8],
            what=what,
            count=len(members),
            hosts=hosts,
            first=min(seconds),
            last=max(seconds),
            causes=dict(Counter((one.document or {})["class"] for one in members)),
            common=tuple(_common_to(set(hosts), known)) if len(hosts) >= _LEAST_HOSTS else (),
            path=str(max(members, key=lambda one: one.name).path),
        )
        groups.append(group)
    return sorted(groups, key=lambda its: (-len(its.hosts), -its.count, its.key))


def _host_of(incident: StoredIncident) -> str:
    name = (incident.document or {})["server"]["hostname"]
    return name or incident.path.absolute().parent.parent.name


def _common_to(hosts: set[str], known: Mapping[str, Mapping[str, set[str]]]) -> Iterator[str]:
    for name, by_host in known.items():
        inside = Counter(value for host, values in by_host.items() if host in hosts for value in values)
        outside = Counter(value for host, values in by_host.items() if host not in hosts for value in values)
        others = len(by_host.keys() - hosts)
        for value, count in inside.most_common(1):
            if count >= _SHARE_IN * len(hosts) and outside[value] <= _SHARE_OUT * others:
                yield f"{name} {value} on {count} of {len(hosts)} hosts, and on {outside[value]} of {others} others"


def table_of(groups: Sequence[Group]) -> Iterator[str]:
    """Yield the lines of a table, with what the hosts of each fault have in common below it."""
    yield f"{'fault':8}  {'hosts':>5}  {'times':>5}  {'first':10}  {'last':10}  what"
    for one in groups:
        days = "  ".join(time.strftime("%Y-%m-%d", time.gmtime(seconds)) for seconds in (one.first, one.last))
        yield f"{one.key:8}  {len(one.hosts):>5}  {one.count:>5}  {days}  {' '.join(one.what[:4])}"
        causes = ", ".join(f"{cause} ({count})" for cause, count in Counter(one.causes).most_common(3))
        for line in (*one.common, f"cause: {causes}; latest: {one.path}"):
            yield f"{'':10}{line}"
