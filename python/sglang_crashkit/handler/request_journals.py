"""The request journals of a server: read for an incident, removed with the server, found when left behind."""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sglang_crashkit.core import journal_place
from sglang_crashkit.core.incident import Incident, Requests, Trigger, Verdict, iso_time
from sglang_crashkit.core.incident_folder import IncidentFolder, new_id
from sglang_crashkit.core.incident_name import parse_name
from sglang_crashkit.core.incident_store import StoredIncident, find_incidents
from sglang_crashkit.core.private_files import create_private, make_private_folder
from sglang_crashkit.core.recovery import TakeJournals
from sglang_crashkit.core.remains import REQUESTS
from sglang_crashkit.core.settings import Settings
from sglang_crashkit.core.summary import format_summary, mapping_of
from sglang_crashkit.core.titles import role_of
from sglang_crashkit.errors import CrashkitError
from sglang_crashkit.handler.identity import server_info
from sglang_crashkit.handler.incident_run import IncidentRun
from sglang_crashkit.handler.journal_export import export_requests

logger = logging.getLogger(__name__)

#: The longest that an incident waits for its journal, in seconds: a full ring of 64 MiB takes about two.
_EXPORT_SECS = 3.0
#: Kinds of incidents after which the server may go on.
_GOES_ON = frozenset({"hang", "peer_lost", "snapshot"})


class RequestJournals:
    """The journals of the server at hand.

    Args:
        folder: the server's folder of journals; None where it keeps none.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._is_incomplete = False
        self._stays = False
        self._taken: list[Path] = []

    def add_to(self, run: IncidentRun) -> None:
        """Put what the journals hold now into an incident that is about to be finished."""
        rings = journal_place.rings_in(self._folder) if self._folder else []
        if not rings:
            return
        # Before they are read: whoever ends meanwhile may have written more.
        gone = [ring for ring in rings if journal_place.is_writer_gone(ring)]
        began = time.time() - (time.monotonic() - run.opened)
        told = export_requests(rings, run.path, _EXPORT_SECS, run.charge, seconds=began)
        run.set_journal(told)
        self._is_incomplete = told.reason is not None
        self._taken = [] if self._is_incomplete else gone

    def remove_taken(self) -> None:
        """Remove what dead processes left and the incident holds, which is on the disk by now.

        A server that starts killed tokenizer workers anew would keep a journal of each, and tell of its requests again.
        """
        for ring in self._taken:
            with contextlib.suppress(OSError):
                ring.unlink()
        self._taken = []

    def keep(self) -> None:
        """Leave the journals where they are: the incident could not be written, and the next start may."""
        self._stays = True
        self._taken = []

    def clean_up(self, run: IncidentRun | None) -> None:
        """Remove the journals of a server that is gone; what an incident could not take in goes to it as it is."""
        if self._folder is None or self._stays:
            return
        is_needed = run is not None and self._is_incomplete
        if run is None or not is_needed or _move(journal_place.rings_in(self._folder), run.path):
            journal_place.remove(self._folder)


def take_for_incident(host_folders: Iterable[Path]) -> TakeJournals:
    """Return what puts the journals that a server left into the incident that its crash handler did not finish.

    Args:
        host_folders: the host's folders that journals are in.
    """

    def take(pid: int, start_ticks: int, incident: Path) -> dict[str, Any] | None:
        for host_folder in host_folders:
            folder = journal_place.journal_folder(host_folder, pid, start_ticks)
            if folder not in journal_place.left_behind(host_folder):
                continue
            held = journal_place.lock(folder)
            try:
                rings = journal_place.rings_in(folder)
                name = parse_name(incident.name)
                told = export_requests(rings, incident, _EXPORT_SECS, seconds=name.seconds if name else None)
                if told.reason is None or _move(rings, incident):
                    journal_place.remove(folder)
            finally:
                journal_place.unlock(held)
            return asdict(told)
        return None

    return take


def take_in_left_behind(host_folder: Path, incidents: Path | None = None) -> list[Path]:
    """Make an incident of the journals that a server left whose crash handler was killed, too.

    Args:
        host_folder: the host's folder that the journals are in.
        incidents: where the incidents go; those of `host_folder` by default.

    Returns:
        The incidents' folders; a journal without requests, or of which an incident of the same server has each one, is
        removed and gives none.
    """
    made = []
    for folder in journal_place.left_behind(host_folder):
        held = journal_place.lock(folder)
        try:
            incident = _make_incident(folder, incidents or host_folder / "incidents")
        except (OSError, CrashkitError) as error:
            logger.error("the request journal %s was left behind and stays: %s", folder, error)
        else:
            made += [incident] if incident else []
        finally:
            journal_place.unlock(held)
    return made


def _make_incident(folder: Path, incidents: Path) -> Path | None:
    rings = journal_place.rings_in(folder)
    seconds = max((ring.stat().st_mtime for ring in rings), default=time.time())
    pid, start_ticks = map(int, folder.name.split("-"))
    incident = Incident(
        id=new_id(),
        kind="left_behind",
        trigger=Trigger("journal_found", iso_time(time.time()), pid, "server"),
        server=server_info(pid, start_ticks),
    )
    target = IncidentFolder(incidents, incident.kind, incident.id, seconds, Settings.from_environ().disk)
    told = export_requests(rings, target.path, _EXPORT_SECS, target.charge)
    has_requests = told.finished + told.unfinished > 0
    if told.reason is None and not (has_requests and _is_news(target.path, incidents, pid, start_ticks)):
        # With requests: the crash handler was killed when the incident of the server's end had them already.
        target.discard()
        journal_place.remove(folder)
        return None
    incident.requests = Requests(
        finished=told.finished,
        unfinished=told.unfinished,
        source="journal",
        reason="the server and its crash handler ended before they were saved",
        journal=told,
    )
    text = f"server {pid} and its crash handler ended without a word; its requests were in its journal"
    incident.verdict = Verdict("unknown", None, "unknown", text)
    incident.complete = True
    document = incident.to_json()
    target.save(document, format_summary(document), sync=True)
    is_moved = told.reason is None or _move(rings, target.path)
    path = target.publish()
    if is_moved:
        journal_place.remove(folder)
    logger.warning("%s: %s", text, path)
    return path


def _is_news(incident: Path, incidents: Path, pid: int, start_ticks: int) -> bool:
    """Say whether an incident has a request that no incident of the same server's end has."""
    told = (found.path for found in find_incidents(incidents) if _tells_of_the_end(found, pid, start_ticks))
    return not _rids_in([incident]) <= _rids_in(told)


def _tells_of_the_end(found: StoredIncident, pid: int, start_ticks: int) -> bool:
    document = found.document or {}
    server = mapping_of(document.get("server"))
    first = mapping_of(mapping_of(document.get("verdict")).get("first_failure"))
    is_its = (server.get("pid"), server.get("start_ticks")) == (pid, start_ticks)
    # A server starts such a worker anew.
    has_lost_a_worker = role_of(str(first.get("title")), is_root=False) == "tokenizer_worker"
    return found.finished and is_its and document.get("kind") not in _GOES_ON and not has_lost_a_worker


def _rids_in(incidents: Iterable[Path]) -> set[str]:
    """Return the ids of the requests that incidents have from a journal."""
    rids = set()
    for incident in incidents:
        # Where there are none, and in a line that is cut off.
        with contextlib.suppress(OSError, ValueError, RecursionError), (incident / REQUESTS).open("rb") as file:
            for line in file:
                rids.add(str(mapping_of(json.loads(line)).get("rid")))
    return rids


def _move(rings: Sequence[Path], incident: Path) -> bool:
    """Move rings into an incident, also from another file system; say whether all of them are there."""
    for ring in rings:
        target = incident / "requests" / ring.name
        try:
            make_private_folder(target.parent)
            with ring.open("rb") as source, create_private(target) as copy:
                shutil.copyfileobj(source, copy)
            ring.unlink()
        except (OSError, CrashkitError) as error:
            logger.error("the request journal %s could not be moved to %s: %s", ring, target, error)
            return False
    return True
