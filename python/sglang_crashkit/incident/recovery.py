"""Finish the incidents that a killed crash handler left half-written.

What is there stays as it is; what is missing is listed as failed, with the reason. The folder gets its final name.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sglang_crashkit.incident.folder import RESERVE
from sglang_crashkit.incident.name import PARTIAL, REMOVING, IncidentName, parse_name
from sglang_crashkit.incident.remains import journal_remains, unlisted_pieces
from sglang_crashkit.incident.summary import format_summary
from sglang_crashkit.kernel import procfs
from sglang_crashkit.kernel.folder_lock import FolderLock
from sglang_crashkit.kernel.private_files import sync_folder, write_json, write_private
from sglang_crashkit.model.incident import SCHEMA_VERSION, iso_time

logger = logging.getLogger(__name__)

REASON = "the crash handler was killed"
SPOOL = ".spool-"

#: A folder without an owner may be one that its owner is about to lock, for this long, in seconds.
_AGE_SECS = 10.0
#: Where there are no locks, a writer may be on another machine; it is done after this long, in seconds.
_AGE_WITHOUT_LOCKS_SECS = 300.0
_MOST = 100


def finish_abandoned(incidents: Path) -> list[Path]:
    """Finish the incidents in folder `incidents` whose writer died, and return the folders' final names.

    An incident that cannot be finished is named in the log and left as it is. Those that another process writes are
    left alone, and so is what is not this user's.

    Args:
        incidents: the folder of all incidents of this host; it may be missing.
    """
    finished = []
    for folder in _own_folders(incidents):
        try:
            if folder.name.startswith(REMOVING):
                shutil.rmtree(folder)
            elif _finish(folder):
                finished.append(folder.with_name(folder.name.removeprefix(PARTIAL)))
        except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
            # The last ones for a document of another shape than any kit writes.
            logger.warning("the unfinished incident %s stays as it is: %s", folder, error)
    return finished


def _own_folders(incidents: Path) -> Iterator[Path]:
    try:
        names = sorted(entry.name for entry in os.scandir(incidents) if entry.name.startswith((PARTIAL, REMOVING)))
    except OSError:
        return
    for name in names[-_MOST:]:
        if parse_name(name.removeprefix(REMOVING)) is None:
            continue
        with contextlib.suppress(OSError):
            status = (incidents / name).lstat()
            if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid():
                yield incidents / name


def _finish(folder: Path) -> bool:
    """Finish one incident unless somebody writes it; say whether it is finished."""
    lock = FolderLock(folder)
    state = lock.acquire()
    try:
        document = _read(folder)
        if state == "taken" or not _is_abandoned(folder, document, has_locks=state == "held"):
            return False
        name = parse_name(folder.name)
        assert name is not None
        (folder / RESERVE).unlink(missing_ok=True)
        for torn in folder.rglob(".*.new"):
            torn.unlink(missing_ok=True)
        if document is None or not document.get("complete"):
            document = _complete(document or _empty(name), folder)
            write_json(folder / "incident.json", document, sync=True)
            write_private(folder / "summary.md", format_summary(document).encode(errors="backslashreplace"))
        folder.rename(folder.with_name(str(folder.name.removeprefix(PARTIAL))))
        sync_folder(folder.parent)
    finally:
        lock.release()
    return True


def _read(folder: Path) -> dict[str, Any] | None:
    try:
        document = json.loads((folder / "incident.json").read_text())
    except FileNotFoundError:
        return None
    if not isinstance(document, dict):
        raise ValueError("its incident.json is not an object")
    if document.get("schema_version") != SCHEMA_VERSION:
        raise ValueError(f"its schema_version is {document.get('schema_version')}, not {SCHEMA_VERSION}")
    return document


def _is_abandoned(folder: Path, document: dict[str, Any] | None, *, has_locks: bool) -> bool:
    age = time.time() - folder.lstat().st_mtime
    if document is None:
        return age > _AGE_SECS
    if has_locks:
        return True
    handler = document.get("handler") or {}
    writer = procfs.read_stat(handler["pid"]) if isinstance(handler.get("pid"), int) else None
    is_alive = writer is not None and writer.start_ticks == handler.get("start_ticks")
    return not is_alive and age > _AGE_WITHOUT_LOCKS_SECS


def _empty(name: IncidentName) -> dict[str, Any]:
    """Return what is known of an incident whose handler had written nothing of it."""
    return {
        "schema_version": SCHEMA_VERSION,
        "id": name.id,
        "kind": name.kind,
        "trigger": {"event": "unknown", "time": iso_time(name.seconds), "pid": 0, "title": "unknown"},
        "server": {"pid": 0, "sglang_version": "unknown", "kit_version": "unknown", "hostname": "unknown"},
        "processes": [],
        "requests": {"finished": None, "unfinished": None, "path": None, "reason": REASON},
        "timeline": [],
        "verdict": None,
        "handler": None,
    }


def _complete(document: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the document with everything that is missing named in it, and with what the folder holds beside it."""
    document["complete"] = False
    processes = [process for process in document.get("processes") or [] if isinstance(process, dict)]
    _adopt_records(document, folder)
    for process in processes:
        evidence = process.setdefault("evidence", [])
        found = unlisted_pieces(folder, process.get("pid", 0), {piece.get("path") for piece in evidence})
        evidence += [_piece(kind, "captured", path=name) for kind, name in found]
        if not any(piece.get("kind") == "stack" for piece in evidence):
            evidence.append(_piece("stack", "failed", reason=REASON))
    document["requests"] = _requests_of(document, folder)
    words = "The crash handler was killed before it was done."
    verdict = document.get("verdict") or {"kind": "unknown", "first_failure": None, "level": "unknown"}
    verdict["text"] = f"{verdict.get('text') or ''} {words}".strip()
    verdict["basis"] = [*(verdict.get("basis") or ()), words]
    document["verdict"] = verdict
    document.setdefault("timeline", []).append({"time": iso_time(time.time()), "event": "finished_by_another_handler"})
    return document


def _requests_of(document: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return what is known of the requests, with those that the killed handler had written and not yet counted."""
    requests: dict[str, Any] = document.get("requests") or {}
    if requests.get("path") is None:
        requests = requests | {"reason": REASON}
    if requests.get("journal") is not None:
        return requests
    # It may be cut off. The journals themselves were the handler's memory.
    journal = journal_remains(folder, REASON)
    if journal:
        requests = requests | {"journal": journal}
        if requests.get("source") is None:
            counts = {name: journal[name] for name in ("finished", "unfinished")}
            requests = requests | counts | {"source": "journal"}
    return requests


def _adopt_records(document: dict[str, Any], folder: Path) -> None:
    """Move in what failing ranks of that server wrote of themselves and nobody took in."""
    server = document.get("server") or {}
    numbers = [server.get(name) for name in ("pid", "start_ticks", "pid_namespace")]
    if not all(isinstance(number, int) and number > 0 for number in numbers):
        return
    known = {process.get("pid") for process in document["processes"]}
    for record in folder.parent.glob(f"{SPOOL}{'-'.join(map(str, numbers))}/exception-*.json"):
        pid = record.stem.removeprefix("exception-")
        if not pid.isdigit() or int(pid) not in known or record.is_symlink():
            continue
        if any(folder.glob(f"ranks/*-{pid}.exception.json")):
            # The handler was killed when it had taken it in and not yet removed it here.
            record.unlink()
        else:
            (folder / "ranks").mkdir(mode=0o700, exist_ok=True)
            record.replace(folder / "ranks" / f"rank-{pid}.exception.json")


def _piece(kind: str, status: str, *, path: str | None = None, reason: str | None = None) -> dict[str, Any]:
    return {"kind": kind, "status": status, "path": path, "reason": reason, "seconds": None}
