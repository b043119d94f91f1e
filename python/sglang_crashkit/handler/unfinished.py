"""Finish the incidents that a killed crash handler left unfinished, from their logs, when the next handler starts.

The existing files stay as they are. The incident states that it is not complete and why, and its folder gets the final
name. A server that was killed together with its handler leaves only its marker, from which an incident is made (see
`marker`), and empty folders, which are removed. A process that writes an incident holds a lock on its folder.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import stat
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from sglang_crashkit.errors import CrashkitError
from sglang_crashkit.incident.folder import RESERVE, SUMMARY, IncidentFolder, new_id, read_adopted
from sglang_crashkit.incident.judging import explain, judge, read_log
from sglang_crashkit.incident.marker import MARKER, VANISHED, Marker, incident_of, read_marker
from sglang_crashkit.incident.store import MAX_JSON, PARTIAL, REMOVING, parse_name
from sglang_crashkit.kernel import procfs
from sglang_crashkit.kernel.forked import call_within
from sglang_crashkit.kernel.private_files import (
    FolderLock,
    OwnFolder,
    make_private_folder,
    read_json,
    sync_folder,
    write_json,
    write_private,
)
from sglang_crashkit.model import SCHEMA_VERSION
from sglang_crashkit.model.incident import Evidence, EvidenceKind, Incident, ServerInfo, Trigger, iso_time
from sglang_crashkit.model.incident_log import LOG, IncidentLog
from sglang_crashkit.settings import ENDED, DiskLimits
from sglang_crashkit.view.markdown import format_summary

logger = logging.getLogger(__name__)

REASON = "the crash handler was killed"
SPOOL = ".spool-"

#: Glob patterns of a process's evidence files in the incident's folder.
_PIECES: dict[EvidenceKind, str] = {"stack": "stacks/*-{}.txt", "exception": "ranks/*-{}.exception.json"}
_WORDS = "The crash handler was killed before the incident was complete."
#: Seconds after its last change in which the owner of a folder may still lock it; and, on a file system without locks,
#: in which the owner may still write.
AGE_SECS, _AGE_WITHOUT_LOCKS_SECS = 10.0, 300.0
#: Seconds after which an incident with an unreadable log is finished without its facts.
_AGE_UNREADABLE_SECS = 3600.0
MAX_FINISHED, _MAX_FREE = 100, 1000
#: The time limits for one incident and for all together, in seconds. The next start tries the rest.
_EACH_SECS, _ALL_SECS = 5.0, 10.0
#: The descriptor of standard error, the crash handler's log.
_LOG = 2
#: At most this many vanished servers of one host get an incident, the latest ones.
_MAX_VANISHED = 16


def finish_abandoned(incidents: Path, run: Path | None = None, limits: DiskLimits | None = None) -> list[Path]:
    """Finish the incidents in folder `incidents` whose writer died, and return the folders' final names.

    An incident that cannot be finished is logged and left as it is. Incidents that another process writes, or that
    belong to another user, are left alone. Empty spools that no crash handler uses are removed.

    Args:
        incidents: the folder of all incidents of this host.
        run: the parent of the runtime folders of the servers on this host.
        limits: the disk space that a new incident may use.
    """
    finished: list[Path] = []
    for torn in incidents.glob(".*.new"):
        with contextlib.suppress(OSError):
            if time.time() - torn.lstat().st_mtime > AGE_SECS:
                torn.unlink()
    try:
        opened = OwnFolder(incidents, 2) if incidents.is_dir() else None
    except (OSError, CrashkitError) as error:
        logger.warning("the unfinished incidents in %s stay as they are: %s", incidents, error)
        opened = None
    if opened is not None:
        left = _own_folders(opened.path, MAX_FINISHED, PARTIAL, REMOVING)
        folders = [folder for folder in left if parse_name(folder.name.removeprefix(REMOVING)) is not None]
        finished += _finish_each(folders, incidents, time.monotonic() + _ALL_SECS)
        finished += _take_markers(incidents, opened.path, run, limits)
    for spool in _free_folders(incidents, SPOOL):
        # A spool with the record of an exception stays, because rmdir fails.
        if _is_of_a_dead_server(spool.name.removeprefix(SPOOL)) is not False:
            with contextlib.suppress(OSError):
                spool.rmdir()
    return finished


def _finish_each(folders: Sequence[Path], incidents: Path, end: float) -> Iterator[Path]:
    for folder in folders:
        final, secs = incidents / folder.name.removeprefix(PARTIAL), min(_EACH_SECS, end - time.monotonic())
        try:
            if folder.name.startswith(REMOVING):
                shutil.rmtree(folder)
            # In a child with a deadline: any process may have written the incident, and a server waits to be watched.
            # The child keeps two descriptors: the log, and the one by which `folder` is reached.
            elif call_within(max(0.0, secs), partial(_finish, folder, final), keep=[_LOG, int(folder.parent.name)]):
                yield final
        except OSError as error:
            logger.warning("the unfinished incident %s stays as it is: %s", incidents / folder.name, error)


def _take_markers(incidents: Path, opened: Path, run: Path | None, limits: DiskLimits | None) -> Iterator[Path]:
    """Write an incident for each vanished server, remove the server's marker, and yield the incident's folder."""
    ages = {}
    for path in opened.glob(f"{SPOOL}*/{MARKER}"):
        with contextlib.suppress(OSError):
            if path.parent.lstat().st_uid == os.geteuid():
                ages[path.parent] = path.lstat().st_mtime
    for number, spool in enumerate(sorted(ages, key=ages.__getitem__, reverse=True)):
        lock = FolderLock(spool)
        try:
            state = lock.acquire()
            # Without locks, the server's handler may live on another machine.
            if state == "taken" or (state == "unsupported" and time.time() - ages[spool] < _AGE_WITHOUT_LOCKS_SECS):
                continue
            marker = read_marker(spool)
            if marker is not None and _is_of_a_dead_server(spool.name.removeprefix(SPOOL)) is False:
                # Only the handler was killed; the server lives.
                continue
            has_ended = run is not None and (run / spool.name.removeprefix(SPOOL) / ENDED).exists()
            if marker is None or has_ended or number >= _MAX_VANISHED:
                (spool / MARKER).unlink()
            else:
                yield _write_vanished(incidents, spool, marker, limits)
            with contextlib.suppress(OSError):
                # A spool with the record of an exception stays, because rmdir fails.
                spool.rmdir()
        except Exception as error:  # noqa: BLE001 - an error with one server must not cost the others their incidents
            logger.warning("no incident could be written for the server with the marker in %s: %s", spool.name, error)
        finally:
            lock.release()


def _write_vanished(incidents: Path, spool: Path, marker: Marker, limits: DiskLimits | None) -> Path:
    folder = IncidentFolder(incidents, VANISHED, new_id(), marker.touched, limits, marker.server.pid)
    try:
        incident = incident_of(marker, folder.id)
        folder.append(LOG, IncidentLog().lines(incident))
        incident.verdict = judge(incident, None)
        incident.cause = explain(incident, folder.opened)
        folder.save(incident.to_json(), format_summary(incident.shown(), folder.final_path), sync=True)
    except BaseException:
        folder.discard()
        raise
    # In this order, a kill of this process at any point leaves exactly one incident.
    (spool / MARKER).unlink()
    return folder.publish()


def _own_folders(parent: Path, most: int, *prefixes: str) -> Iterator[Path]:
    """Yield this user's folders in `parent` whose names begin with a prefix, among the `most` last names."""
    try:
        names = sorted(entry.name for entry in os.scandir(parent) if entry.name.startswith(prefixes))
    except OSError:
        return
    for name in names[-most:]:
        with contextlib.suppress(OSError):
            status = (parent / name).lstat()
            if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid():
                yield parent / name


def remove_runtime_folders(run: Path) -> None:
    """Remove the runtime folders below `run` of servers in this PID namespace that are gone, as their handlers are."""
    for folder in _free_folders(run, ""):
        if _is_of_a_dead_server(folder.name):
            shutil.rmtree(folder, ignore_errors=True)


def _free_folders(parent: Path, prefix: str) -> Iterator[Path]:
    """Yield this user's folders in `parent` that no other process has locked, each locked until the next is taken."""
    for folder in _own_folders(parent, _MAX_FREE, prefix):
        lock = FolderLock(folder)
        try:
            with contextlib.suppress(OSError):
                if time.time() - folder.lstat().st_mtime > AGE_SECS and lock.acquire() == "held":
                    yield folder
        finally:
            lock.release()


def _is_of_a_dead_server(key: str) -> bool | None:
    """Return whether the server with this key is gone; None if this process can't see it."""
    numbers = key.split("-")
    if len(numbers) != 3 or not all(number.isascii() and number.isdigit() for number in numbers):
        return None
    pid, start_ticks, namespace = map(int, numbers)
    return None if namespace != procfs.own_namespace() else not procfs.is_running(pid, start_ticks)


def _finish(folder: Path, final: Path) -> bytes:
    """Finish an incident and name its folder `final`; return empty bytes if it was removed, or may still be written."""
    lock = FolderLock(folder)
    state = lock.acquire()
    try:
        incident = _read(folder)
        least = _AGE_WITHOUT_LOCKS_SECS if state != "held" else AGE_SECS if incident is None else 0.0
        if state == "taken" or time.time() - folder.lstat().st_mtime < least:
            return b""
        name = parse_name(folder.name)
        is_of_marker = name is not None and name.kind == VANISHED
        if incident is None and any(not path.name.startswith(".") for path in folder.iterdir()):
            if name is None or time.time() - folder.lstat().st_mtime < _AGE_UNREADABLE_SECS:
                raise OSError(errno.EIO, "its log cannot be read")
            # The files are kept as long as those of any other incident.
            trigger = Trigger("unknown", iso_time(name.seconds), 0, "unknown")
            incident = Incident(name.id, name.kind, trigger, ServerInfo(0, "unknown", "unknown", "unknown"))
        if incident is None or (is_of_marker and (_spool_of(incident, folder) / MARKER).exists()):
            # The folder is empty, or its incident will be written again from the marker.
            shutil.rmtree(folder)
            return b""
        (folder / RESERVE).unlink(missing_ok=True)
        for torn in folder.rglob(".*.new"):
            torn.unlink(missing_ok=True)
        if not incident.complete:
            _mark_incomplete(incident, folder)
            write_json(folder / "incident.json", incident.to_json(), sync=True)
            summary = format_summary(incident.shown(), final)
            write_private(folder / SUMMARY, summary.encode(errors="backslashreplace"))
            # This incident covers the server's end.
            (_spool_of(incident, folder) / MARKER).unlink(missing_ok=True)
        folder.rename(folder.with_name(final.name))
        sync_folder(folder.parent)
    finally:
        lock.release()
    return b"finished"


def _read(folder: Path) -> Incident | None:
    try:
        document = read_json(folder / "incident.json", MAX_JSON)
    except FileNotFoundError:
        return read_log(folder)
    if not isinstance(document, dict) or document.get("schema_version") != SCHEMA_VERSION:
        raise ValueError(f"its incident.json is not of schema_version {SCHEMA_VERSION}")
    return Incident.of(document)


def _mark_incomplete(incident: Incident, folder: Path) -> None:
    """Note in an incident that it is not complete and why; add the evidence that its log lacks."""
    spool = _spool_of(incident, folder)
    for process in incident.processes:
        # The rank's own record of its failure, if no incident adopted it.
        pid = process.pid
        record = spool / f"exception-{pid}.json"
        if not record.is_symlink() and record.is_file():
            data, taken = read_adopted(record), list(folder.glob(_PIECES["exception"].format(pid)))
            # If one is equal, the handler was killed after it had copied the record and before it removed it here.
            if not any(one.is_file() and one.read_bytes() == data for one in taken):
                make_private_folder(folder / "ranks")
                name = f"ranks/rank-{pid}.exception{len(taken) or ''}.json"
                write_private(folder / name, data)
                if taken:
                    # The earlier record, of an exception that SGLang caught, is listed as evidence already.
                    process.evidence.append(Evidence("exception", "captured", name))
            record.unlink()
        for kind, pattern in _PIECES.items():
            # The file may exist although the log does not list it.
            path = next(folder.glob(pattern.format(pid)), None)
            if any(piece.kind == kind for piece in process.evidence) or (path is None and kind != "stack"):
                continue
            found = None if path is None else str(path.relative_to(folder))
            process.evidence.append(Evidence(kind, "captured" if found else "failed", found, None if found else REASON))
    if incident.requests.path is None:
        incident.requests.reason = REASON
    incident.remarks.append(_WORDS)
    if incident.verdict is None or incident.failures or incident.peers:
        incident.verdict = judge(incident, folder)
        incident.cause = explain(incident, folder)
    else:
        # Without failures and lost peers, no event after the logged verdict changes it.
        incident.verdict.text = f"{incident.verdict.text} {_WORDS}".strip()
        incident.verdict.basis.append(_WORDS)
    incident.note(time.time(), "finished_by_another_handler")


def _spool_of(incident: Incident, folder: Path) -> Path:
    server = incident.server
    return folder.parent / f"{SPOOL}{server.pid}-{server.start_ticks}-{server.pid_namespace}"
