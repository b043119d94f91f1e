"""``sglang-crashkit incidents``: list the incidents below a crash folder, newest first."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sglang_crashkit.errors import CrashkitError, ExitCode, NothingToDoError
from sglang_crashkit.incident.fingerprint import read_faults
from sglang_crashkit.incident.store import StoredIncident, find_incidents
from sglang_crashkit.incident.summary import headline, mapping_of

#: What the index of each folder has of each fault.
Faults = Mapping[Path, Mapping[str, Mapping[str, Any]]]


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("folder", type=Path, help="what the server was given as --crash-dump-folder")
    parser.add_argument("--json", action="store_true", help="print a JSON list of objects")


def run(args: argparse.Namespace) -> ExitCode:
    """List them.

    Raises:
        NothingToDoError: there is no such folder, or no incident in it.
        CrashkitError: it cannot be read.
    """
    try:
        incidents = find_incidents(args.folder)
    except OSError as error:
        raise CrashkitError(
            f"{args.folder} cannot be read: {error}", next_step="read it as the user whom the server runs as"
        ) from error
    faults = {folder: read_faults(folder) for folder in {incident.path.parent for incident in incidents}}
    if args.json:
        print(json.dumps([_as_json(incident, faults) for incident in incidents], indent=2))
        return ExitCode.DONE if incidents else ExitCode.NOTHING
    if not incidents:
        raise NothingToDoError(
            f"no incident below {args.folder}",
            next_step="name the folder given as --crash-dump-folder",
        )
    told: set[str] = set()
    for incident in incidents:
        print(_as_text(incident, _fault_of(incident, faults), told))
    return ExitCode.DONE


def _fault_of(incident: StoredIncident, faults: Faults) -> dict[str, Any] | None:
    """Return what an incident says of its fault, and when it was last seen and how often in all; None without one."""
    fault = mapping_of((incident.document or {}).get("fault"))
    if not fault:
        return None
    entry = faults[incident.path.parent].get(str(fault.get("key")), {})
    return {**fault, "total": entry.get("count", fault.get("count")), "last": entry.get("last")}


def _as_json(incident: StoredIncident, faults: Faults) -> dict[str, Any]:
    document = incident.document or {}
    fields = {name: document.get(name) for name in ("id", "kind", "trigger", "server", "requests", "peers", "verdict")}
    return {
        "path": str(incident.path),
        "finished": incident.finished,
        "problem": incident.problem or None,
        "headline": headline(document) if document else None,
        **fields,
        "fault": _fault_of(incident, faults),
    }


def _as_text(incident: StoredIncident, fault: dict[str, Any] | None, told: set[str]) -> str:
    """Return an incident in lines; of each fault the newest one, its key then in `told`, says how often it was seen."""
    mark = "" if incident.finished else " (not finished)"
    if incident.document is None:
        return f"{incident.path}{mark}\n    {incident.problem}"
    verdict = incident.document.get("verdict")
    verdict = verdict if isinstance(verdict, dict) else {}
    text = verdict.get("text") or headline(incident.document)
    lines = [f"{incident.path}{mark}", f"{text} [{verdict.get('level', 'unknown')}]"]
    if fault and fault["total"] != 1 and str(fault.get("key")) not in told:
        told.add(str(fault.get("key")))
        lines.append(f"the same fault {fault['total']} times, first {fault.get('first')}, last {fault['last']}")
    if fault and fault.get("repeats"):
        lines.append(f"in short: incident {fault['repeats']} has the stacks of all processes")
    return "\n    ".join(lines)
