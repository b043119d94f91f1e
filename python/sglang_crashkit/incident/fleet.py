"""Read the incidents of many hosts, from a crash folder that they share or from folders that were fetched."""

from __future__ import annotations

import gc
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang_crashkit.incident.fingerprint import fault_of
from sglang_crashkit.incident.retention import MAX_JSON
from sglang_crashkit.incident.store import is_finished, is_folder, list_entries, parse_name
from sglang_crashkit.kernel.private_files import read_regular
from sglang_crashkit.model.checked_json import mapping_of, mappings_of
from sglang_crashkit.model.incident import FleetIncident

_PLACE = "incidents"
#: From so many on, several processes read.
_MANY = 500
_MAX_PROCESSES = 16
_LINE = re.compile(r":\d+\)$")
_VERSIONS = ("driver", "torch", "kernel", "cuda")


@dataclass
class Fleet:
    """What was found."""

    hosts: set[str] = field(default_factory=set)  # the names of all hosts, those without an incident, too
    incidents: list[FleetIncident] = field(default_factory=list)  # the finished ones
    unreadable: list[str] = field(default_factory=list)  # the folders of those that cannot be read
    #: Why a folder that was named, or one below it, cannot be read, by its path.
    problems: dict[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)  # the folders that were named and are none


def read_fleet(folders: Iterable[Path], since: float = 0.0) -> Fleet:
    """Read all finished incidents below some folders.

    Args:
        folders: each a crash folder, a host's folder in one, or a folder of crash folders.
        since: those that began before are left out, in seconds since the epoch.
    """
    fleet, paths, problems = Fleet(), list[tuple[str, str]](), list[OSError]()
    for place in sorted({place for folder in folders for place in _places(folder, fleet, problems)}):
        host = place.absolute().parent.name
        try:
            with os.scandir(place) as entries:
                fleet.hosts.add(host)
                for entry in entries:
                    name = parse_name(entry.name)
                    if name is not None and is_finished(entry.name) and name.seconds >= since:
                        paths.append((host, entry.path))
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            problems.append(error)
    fleet.problems = {str(error.filename): error.strerror or str(error) for error in problems}
    for (_host, path), found in zip(paths, _read_all(paths), strict=True):
        if found is None:
            fleet.unreadable.append(path)
        else:
            fleet.incidents.append(found)
    return fleet


def _places(folder: Path, fleet: Fleet, problems: list[OSError]) -> Iterator[Path]:
    """Yield where incidents may be: of a host's folder, a crash folder, or a folder of fetched crash folders."""
    try:
        if not is_folder(folder):
            fleet.missing.append(str(folder))
            return
    except OSError as error:
        problems.append(error)
        return
    before = len(problems)
    inner = [path for path in list_entries(folder, problems) if not parse_name(path.name)]
    if len(problems) > before:
        return
    yield folder / _PLACE
    for path in inner:
        # Of a folder of incidents nothing below is a host's.
        further = list_entries(path, problems) if path.name != _PLACE else []
        yield from (each / _PLACE for each in (path, *further))


def _read_all(paths: Sequence[tuple[str, str]]) -> list[FleetIncident | None]:
    processes = min(_MAX_PROCESSES, os.cpu_count() or 1)
    if len(paths) < _MANY or processes == 1:
        return [_read(one) for one in paths]
    # Each document is given back before the next one is read; to look for circles takes as long as to read.
    with ProcessPoolExecutor(processes, initializer=gc.disable) as pool:
        return list(pool.map(_read, paths, chunksize=max(1, len(paths) // (8 * processes))))


def _read(one: tuple[str, str]) -> FleetIncident | None:
    host, path = one
    try:
        document = json.loads(read_regular(Path(path, "incident.json"), MAX_JSON))
        return found_of(host, path, document) if isinstance(document, dict) else None
    except (OSError, ValueError, RecursionError, TypeError, AttributeError, LookupError):
        # Of a thousand hosts one may have written anything.
        return None


def found_of(host: str, path: str, document: Mapping[str, Any]) -> FleetIncident:
    """Return what a fleet takes from one incident, which is in a folder `path` of `host`."""
    name = parse_name(path.rpartition("/")[2])
    fault, cause = fault_of(document), mapping_of(document.get("cause"))
    kind = str(document.get("kind") or (name.kind if name is not None else "incident"))
    told: tuple[str, ...] = ()
    if fault is not None:
        kind = fault.kind
        # Which rank it is, and in which line, differs between hosts and releases.
        told = (fault.who.partition(" ")[0], fault.what, *(_LINE.sub(")", frame) for frame in fault.frames))
    return FleetIncident(
        host=host,
        seconds=name.seconds if name is not None else 0.0,
        path=path,
        kind=kind,
        fault=told,
        cause=str(cause.get("class") or "unknown"),
        attributes=_attributes(document),
    )


def _attributes(document: Mapping[str, Any]) -> dict[str, str]:
    server, environment = mapping_of(document.get("server")), mapping_of(document.get("environment"))
    versions = mapping_of(environment.get("versions"))
    devices = mappings_of(mapping_of(document.get("gpus")).get("devices"))
    told = {
        "release": server.get("sglang_version"),
        "model": environment.get("model"),
        "GPU": next((device.get("name") for device in devices if device.get("name")), None),
    }
    told |= {name: versions.get(name) for name in _VERSIONS}
    return {name: str(value) for name, value in told.items() if value}
