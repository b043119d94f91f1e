"""Incidents on disk: the names of their folders, and how to find them, newest first; `folder` writes them.

The name of a folder is ``<UTC time>-<kind>-<id>``, with a prefix until the incident is complete.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import stat
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_crashkit import settings
from sglang_crashkit.errors import WHAT_DIR_IS, WHOSE_IT_IS, CrashkitError, NothingToDoError, UsageError
from sglang_crashkit.kernel import titles
from sglang_crashkit.kernel.discovery import value_of
from sglang_crashkit.kernel.private_files import open_regular, read_regular
from sglang_crashkit.model.step import Step

if TYPE_CHECKING:
    from sglang_crashkit.model.incident import Incident

#: The prefix of the folder of an unfinished incident.
PARTIAL = ".partial-"
#: The prefix of the folder of an incident that is being removed.
REMOVING = ".removing-"

_NAME = re.compile(r"(\d{4})(\d\d)(\d\d)T(\d\d)(\d\d)(\d\d)\.(\d{3})Z-([a-z_]+)-([0-9a-f]{8})", re.ASCII)
_CRASH_FOLDER = "--crash-dump-folder"
STEPS_SUFFIX = ".steps.jsonl"

#: Seconds between incidents, of one host and of several hosts, up to which they are taken to be about one failure.
_SAME_HOST_SECS, _OTHER_HOST_SECS = 60.0, 900.0
#: The most bytes read of an ``incident.json``, which may be any user's; that of 512 ranks has 2 MB.
MAX_JSON = 64 << 20
#: The most bytes read of one step, with its requests.
_MAX_LINE = 4 << 20


@dataclass(frozen=True)
class IncidentName:
    """The parts of the name of an incident's folder."""

    seconds: float  # when it was opened, since the epoch, to the millisecond
    kind: str
    id: str

    def __str__(self) -> str:
        moment = datetime.fromtimestamp(self.seconds, timezone.utc)
        stamp = moment.strftime("%Y%m%dT%H%M%S.") + f"{moment.microsecond // 1000:03d}Z"
        return f"{stamp}-{self.kind}-{self.id}"


def parse_name(name: str) -> IncidentName | None:
    """Parse the name of the folder of a finished or an unfinished incident; return None for any other name."""
    match = _NAME.fullmatch(name.removeprefix(PARTIAL))
    if match is None:
        return None
    *day_and_second, thousandths, kind, its_id = match.groups()
    year, month, day, hour, minute, second = map(int, day_and_second)
    try:
        # Not `strptime`, which takes ten times as long: a fleet has tens of thousands of names.
        moment = datetime(year, month, day, hour, minute, second, int(thousandths) * 1000, timezone.utc)
    except ValueError:
        return None
    return IncidentName(moment.timestamp(), kind, its_id)


def is_finished(name: str) -> bool:
    """Return whether `name` is that of a finished incident's folder."""
    return parse_name(name) is not None and not name.startswith(PARTIAL)


#: Returns the part of the contents of an ``incident.json`` that the caller needs.
Keep = Callable[[dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True)
class StoredIncident:
    """An incident found on disk."""

    path: Path
    finished: bool  # False for a folder that was left half-written
    document: dict[str, Any] | None  # the contents of ``incident.json``, None if it is missing or unreadable
    problem: str = ""  # why `document` is None; empty otherwise

    @cached_property
    def incident(self) -> Incident:
        """The incident, as far as `document` has it; see `Incident.of`."""
        # Import the model here: a command that only lists names does not need it.
        from sglang_crashkit.model.incident import Incident

        return Incident.of(self.document)

    @property
    def name(self) -> str:
        """The folder's name without the prefix of an unfinished one."""
        return self.path.name.removeprefix(PARTIAL)


def find_incidents(
    folder: Path, unreadable: list[OSError] | None = None, keep: Keep | None = None, since: float = 0.0
) -> list[StoredIncident]:
    """Return the incidents below a crash folder, a host's, its ``incidents``, or one incident's, newest first.

    `unreadable` gets the errors of folders that cannot be read, if others can. `keep` returns the part of a document to
    hold, which saves time and memory for ten thousand incidents. `since` is in seconds since the epoch. Raises
    NothingToDoError if `folder` is not a folder, OSError if no incident was found and a folder cannot be read.
    """
    is_folder = False  # other errors than these two, such as of a folder above that cannot be read, are raised
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        is_folder = stat.S_ISDIR(folder.stat().st_mode)
    if not is_folder:
        raise NothingToDoError(f"{folder} is not a folder", next_step=f"sglang-crashkit incidents DIR{WHAT_DIR_IS}")
    closed: list[OSError] = []
    found = [folder]
    if not parse_name(folder.absolute().name):
        found = list_entries(folder, closed)
        hosts = [path for path in found if not parse_name(path.name)]
        found += [path for one in (folder, *hosts) for path in list_entries(one / "incidents", closed)]
    named = [path for path in found if (name := parse_name(path.absolute().name)) and name.seconds >= since]
    incidents = [one for path in named for one in _read(path, keep)]
    if closed and not incidents:
        raise closed[0]
    if unreadable is not None:
        unreadable += closed
    return sorted(incidents, key=lambda incident: incident.name, reverse=True)


def incidents_below(folders: Iterable[Path]) -> tuple[list[Path], int]:
    """Return the incidents below crash folders that are about the latest failure, and how many others there are.

    They are the newest of each host and those shortly before it, for example of a prefill and decode pair. Hosts whose
    newest incident is far older than the newest of all are left out.
    """
    hosts: dict[Path, list[tuple[float, Path]]] = {}
    for path in sorted({path for folder in folders for path in folder.rglob("*")}):
        name = parse_name(path.name)
        if name is not None and path.is_dir():
            hosts.setdefault(path.parent, []).append((name.seconds, path))
    newest = {host: max(seconds for seconds, _path in found) for host, found in hosts.items()}
    last = max(newest.values(), default=0.0)
    together = [
        path
        for host, found in hosts.items()
        for seconds, path in sorted(found)
        if newest[host] - seconds <= _SAME_HOST_SECS and last - newest[host] <= _OTHER_HOST_SECS
    ]
    return together, sum(map(len, hosts.values())) - len(together)


def list_entries(folder: Path, unreadable: list[OSError]) -> list[Path]:
    """Return the entries of a folder, none if it is absent; if it cannot be read, add the error to `unreadable`."""
    try:
        # Only root may read the ``lost+found`` of a file system.
        return [path for path in folder.iterdir() if path.name != "lost+found"]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        unreadable.append(error)
        return []


def why_unreadable(error: OSError, folder: Path) -> str:
    """Return in words that a folder cannot be read, and why."""
    return f"{error.filename or folder} cannot be read: {error.strerror or error}"


def unreadable_error(error: OSError, folder: Path) -> CrashkitError:
    """Return the error to report for a folder that cannot be read."""
    return CrashkitError(
        why_unreadable(error, folder),
        next_step=f"ls -ld {shlex.quote(str(error.filename or folder))}{WHOSE_IT_IS}",
    )


def find_one(text: str, folder: Path | None = None, unreadable: list[OSError] | None = None) -> StoredIncident:
    """Return the incident that `text` names; an unfinished one only if no finished one matches.

    `text` is an incident's folder; or a crash folder, for its newest incident; or it names an incident in `folder`:
    ``latest``, its id, or the beginning of its id. Raises NothingToDoError if nothing fits, UsageError if there are
    several, and CrashkitError if the incident cannot be read.
    """
    is_name = "/" not in text and not Path(text).exists()
    place = (folder or settings.fallback_folder()) if is_name else Path(text)
    wanted = "" if not is_name or text == "latest" else text
    closed: list[OSError] = []
    try:
        meant = [
            one
            for one in find_incidents(place, closed)
            if one.name[-8:].startswith(wanted) or one.name == wanted or one.name.endswith(f"-{wanted}")
        ]
    except OSError as error:
        raise unreadable_error(error, place) from error
    # The next start of a server finishes the incident of a handler that was killed. Until then there is only that one.
    found = [one for one in meant if one.finished] or [one for one in meant if one.document is not None]
    if not found:
        named = f"incident {wanted}" if wanted else "finished incident"
        told = "; ".join([f"no {named} below {place}", *(why_unreadable(error, place) for error in closed)])
        raise NothingToDoError(told, next_step=f"sglang-crashkit incidents {shlex.quote(str(place))}")
    if wanted and len({one.name for one in found}) > 1:
        raise UsageError(
            f"the ids of {len(found)} incidents begin with {wanted}: {', '.join(one.name[-8:] for one in found[:8])}",
            next_step=f"sglang-crashkit incidents {shlex.quote(str(place))}",
        )
    if unreadable is not None and not wanted:
        unreadable += closed
    one = found[0]
    if one.document is None:
        readable = f"cat {shlex.quote(str(one.path / 'summary.md'))}   # says it in words"
        listed = f"ls -l {shlex.quote(str(one.path))}{WHOSE_IT_IS}"
        is_there = os.access(one.path / "summary.md", os.R_OK)
        raise CrashkitError(f"{one.path}: {one.problem}", next_step=readable if is_there else listed)
    return one


def _read(path: Path, keep: Keep | None = None) -> Iterator[StoredIncident]:
    """Yield the incident in a folder; nothing if `path` is not a folder."""
    finished = not path.absolute().name.startswith(PARTIAL)
    document, problem = None, "has no incident.json"
    try:
        document = json.loads(read_regular(path / "incident.json", MAX_JSON))
        problem = "" if isinstance(document, dict) else "incident.json is not an object"
    except (FileNotFoundError, NotADirectoryError):
        # An incident that is not complete has a log only.
        from sglang_crashkit.incident.judging import read_log

        if (incident := read_log(path)) is not None:
            document, problem = incident.to_json(), ""
    except (OSError, ValueError, RecursionError) as error:
        # Without the path, which the caller puts in front.
        problem = f"incident.json cannot be read: {getattr(error, 'strerror', None) or error}"
    if path.is_dir():
        if problem:
            document = None
        yield StoredIncident(path, finished, keep(document) if keep and document else document, problem)
    elif not finished:
        # The folder was renamed since, as its incident was finished, or it was removed.
        yield from _read(path.with_name(path.name.removeprefix(PARTIAL)), keep)


def find_incident_of(pid: int, since: float, command: object, deadline_secs: float) -> StoredIncident | None:
    """Wait up to `deadline_secs` for an incident of server `pid`; return the newest since `since`, None if absent.

    `command` is the server's command line, as words or as one text; its crash folder is read from it.
    """
    deadline = time.monotonic() + deadline_secs
    words: list[str] = []
    with contextlib.suppress(TypeError, ValueError):
        words = shlex.split(command) if isinstance(command, str) else list(map(os.fsdecode, command))  # type: ignore[call-overload]
    crash_folder = value_of(words, _CRASH_FOLDER)
    folders = [*([Path(crash_folder)] if crash_folder else []), settings.fallback_folder()]
    while True:
        # Look for the handler first: if it has ended, all that it wrote is found below.
        at_work = any(settings.runtime_folder(pid, 0).parent.glob(f"{pid}-*"))
        for folder in filter(Path.is_dir, folders):
            for one in find_incidents(folder, since=since):
                if one.finished and one.incident.server.pid == pid:
                    return one
        if not at_work or time.monotonic() >= deadline:
            return None
        time.sleep(0.02)


# -- the last steps of the ranks: ``ranks/<rank>.steps.jsonl``, a step a line


@dataclass(frozen=True)
class StoredSteps:
    """The steps of one rank."""

    title: str  # of its process
    pid: int  # of its process, 0 if it is not in the file's name
    ranks: dict[str, int]  # its ranks by lower-case name, as `titles.rank_of` returns them
    steps: tuple[Step, ...]  # in the order of their numbers
    unread: int = 0  # how many lines are no step, such as the last line of a handler that was killed


def read_steps(incident: Path, number: int | None = None, last: int | None = None) -> list[StoredSteps]:
    """Return the steps in an incident's folder, sorted by file name; CrashkitError if a file cannot be read.

    All steps, or step `number`; with `last` also the last ones of each rank, and the steps before and after `number`.
    """
    try:
        return [_read_steps(path, number, last) for path in sorted(incident.glob(f"ranks/*{STEPS_SUFFIX}"))]
    except OSError as error:
        raise CrashkitError(
            f"{incident} cannot be read: {error}", next_step=f"ls -l {shlex.quote(str(incident))}{WHOSE_IT_IS}"
        ) from error


def _read_steps(path: Path, number: int | None, last: int | None) -> StoredSteps:
    found, unread = {}, 0
    with open_regular(path) as file:
        lines = iter(lambda: file.readline(_MAX_LINE), b"")
        for line in lines if number is None and last is None else _chosen(lines, number, last or 0):
            try:
                step = Step.from_json(json.loads(line))
            except (ValueError, RecursionError):
                unread += 1
            else:
                found[step.number] = step
    label, _, pid = path.name.removesuffix(STEPS_SUFFIX).rpartition("-")
    title = f"sglang::{label or pid}"
    ordered = tuple(found[number] for number in sorted(found))
    return StoredSteps(title, int(pid) if pid.isdecimal() else 0, titles.rank_of(title), ordered, unread)


def _chosen(lines: Iterator[bytes], number: int | None, last: int) -> Iterator[bytes]:
    """Yield the line of step `number`, and with `last` those of the steps beside it, and the last ones.

    Only chosen lines are held: a thousand steps of hundreds of requests take tens of megabytes.
    """
    near = () if number is None else range(number - (last > 0), number + 1 + (last > 0))
    starts, kept = tuple(f'{{"number": {each},'.encode() for each in near), deque[bytes](maxlen=last)
    for line in lines:
        if line.startswith(starts):
            yield line
        else:
            kept.append(line)
    yield from kept
