"""Finish the incidents that a killed crash handler left half-written, from their logs.

What is there stays as it is, the incident says that it is not complete and why, and the folder gets its final name.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from sglang_crashkit.errors import CrashkitError
from sglang_crashkit.incident.folder import RESERVE
from sglang_crashkit.incident.judging import explain, judge, read_log
from sglang_crashkit.incident.store import MAX_JSON, PARTIAL, REMOVING, parse_name
from sglang_crashkit.kernel import procfs
from sglang_crashkit.kernel.private_files import (
    FolderLock,
    OwnFolder,
    read_json,
    sync_folder,
    write_json,
    write_private,
)
from sglang_crashkit.model import SCHEMA_VERSION
from sglang_crashkit.model.incident import Evidence, EvidenceKind, Incident, ServerInfo, Trigger, iso_time
from sglang_crashkit.view.markdown import format_summary

logger = logging.getLogger(__name__)

REASON = "the crash handler was killed"
SPOOL = ".spool-"

#: Where a process has these in the folder.
_PIECES: dict[EvidenceKind, str] = {"stack": "stacks/*-{}.txt", "exception": "ranks/*-{}.exception.json"}
_WORDS = "The crash handler was killed before it was done."
#: A folder without an owner may be one that its owner is about to lock, for this long, in seconds.
_AGE_SECS = 10.0
#: Where there are no locks, a writer may be on another machine; it is done after this long, in seconds.
_AGE_WITHOUT_LOCKS_SECS, _AGE_UNSEEN_SECS = 300.0, 3600.0
MAX_FINISHED = 100


def finish_abandoned(incidents: Path) -> list[Path]:
    """Finish the incidents in folder `incidents` whose writer died, and return the folders' final names.

    An incident that cannot be finished is named in the log and left as it is. Those that another process writes are
    left alone, and so is what is not this user's.
    """
    finished = []
    for torn in incidents.glob(".*.new"):
        with contextlib.suppress(OSError):
            if time.time() - torn.lstat().st_mtime > _AGE_SECS:
                torn.unlink()
    try:
        opened = OwnFolder(incidents, 2) if incidents.is_dir() else None
    except (OSError, CrashkitError) as error:
        logger.warning("the unfinished incidents in %s stay as they are: %s", incidents, error)
        return []
    for folder in _own_folders(opened.path) if opened is not None else ():
        try:
            if folder.name.startswith(REMOVING):
                shutil.rmtree(folder)
            elif _finish(folder, final := incidents / folder.name.removeprefix(PARTIAL)):
                finished.append(final)
        except (OSError, ValueError, RecursionError) as error:
            logger.warning("the unfinished incident %s stays as it is: %s", incidents / folder.name, error)
    return finished


def _own_folders(incidents: Path) -> Iterator[Path]:
    try:
        names = sorted(entry.name for entry in os.scandir(incidents) if entry.name.startswith((PARTIAL, REMOVING)))
    except OSError:
        return
    for name in names[-MAX_FINISHED:]:
        with contextlib.suppress(OSError):
            status = (incidents / name).lstat()
            is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
            if is_own and parse_name(name.removeprefix(REMOVING)) is not None:
                yield incidents / name


def _finish(folder: Path, final: Path) -> bool:
    """Finish one incident unless somebody writes it; say whether it is finished, and called `final` then."""
    lock = FolderLock(folder)
    state = lock.acquire()
    try:
        incident = _read(folder)
        if state == "taken" or not _is_abandoned(folder, incident, has_locks=state == "held"):
            return False
        (folder / RESERVE).unlink(missing_ok=True)
        for torn in folder.rglob(".*.new"):
            torn.unlink(missing_ok=True)
        if incident is None or not incident.complete:
            incident = incident or _empty(folder)
            _mark_incomplete(incident, folder)
            write_json(folder / "incident.json", incident.to_json(), sync=True)
            summary = format_summary(incident.shown(), final)
            write_private(folder / "summary.md", summary.encode(errors="backslashreplace"))
        folder.rename(folder.with_name(final.name))
        sync_folder(folder.parent)
    finally:
        lock.release()
    return True


def _read(folder: Path) -> Incident | None:
    try:
        document = read_json(folder / "incident.json", MAX_JSON)
    except FileNotFoundError:
        return read_log(folder)
    if not isinstance(document, dict) or document.get("schema_version") != SCHEMA_VERSION:
        raise ValueError(f"its incident.json is not of schema_version {SCHEMA_VERSION}")
    return Incident.of(document)


def _is_abandoned(folder: Path, incident: Incident | None, *, has_locks: bool) -> bool:
    age = time.time() - folder.lstat().st_mtime
    if incident is None:
        return age > _AGE_SECS
    if has_locks:
        return True
    if incident.server.pid_namespace not in (None, procfs.own_namespace()):
        # Of another container, or an earlier one: its processes cannot be seen.
        return age > _AGE_UNSEEN_SECS
    handler = incident.handler
    writer = procfs.read_stat(handler.pid) if handler is not None else None
    is_alive = writer is not None and handler is not None and writer.start_ticks == handler.start_ticks
    return not is_alive and age > _AGE_WITHOUT_LOCKS_SECS


def _empty(folder: Path) -> Incident:
    """Return what is known of an incident whose handler had written nothing of it."""
    name = parse_name(folder.name)
    assert name is not None
    trigger = Trigger("unknown", iso_time(name.seconds), 0, "unknown")
    return Incident(name.id, name.kind, trigger, ServerInfo(0, "unknown", "unknown", "unknown"))


def _mark_incomplete(incident: Incident, folder: Path) -> None:
    """Say in an incident that it is not complete, and why."""
    _adopt_records(incident, folder)
    for process in incident.processes:
        for kind, pattern in _PIECES.items():
            # It may be there, and not among what the log has.
            path = next(folder.glob(pattern.format(process.pid)), None)
            if any(piece.kind == kind for piece in process.evidence) or (path is None and kind != "stack"):
                continue
            name = None if path is None else str(path.relative_to(folder))
            process.evidence.append(Evidence(kind, "captured" if name else "failed", name, None if name else REASON))
    if incident.requests.path is None:
        incident.requests.reason = REASON
    incident.remarks.append(_WORDS)
    if incident.verdict is None or incident.failures or incident.peers:
        incident.verdict = judge(incident, folder)
        incident.cause = explain(incident, folder)
    else:
        # An older kit's, which kept no failures.
        incident.verdict.text = f"{incident.verdict.text} {_WORDS}".strip()
        incident.verdict.basis.append(_WORDS)
    incident.note(time.time(), "finished_by_another_handler")


def _adopt_records(incident: Incident, folder: Path) -> None:
    """Move in what failing ranks of that server wrote of themselves and nobody took in."""
    server = incident.server
    spool = folder.parent / f"{SPOOL}{server.pid}-{server.start_ticks}-{server.pid_namespace}"
    for pid in [process.pid for process in incident.processes]:
        record = spool / f"exception-{pid}.json"
        if record.is_symlink() or not record.is_file():
            continue
        if any(folder.glob(_PIECES["exception"].format(pid))):
            # The handler was killed when it had taken it in and not yet removed it here.
            record.unlink()
        else:
            (folder / "ranks").mkdir(mode=0o700, exist_ok=True)
            record.replace(folder / "ranks" / f"rank-{pid}.exception.json")
