"""``sglang-crashkit incidents``: list the incidents below a crash folder, newest first."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from sglang_crashkit.core.incident_store import StoredIncident, find_incidents
from sglang_crashkit.errors import CrashkitError, ExitCode, NothingToDoError

HELP = "list the incidents below a crash folder, newest first"


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
    if args.json:
        print(json.dumps([_as_json(incident) for incident in incidents], indent=2))
        return ExitCode.DONE if incidents else ExitCode.NOTHING
    if not incidents:
        raise NothingToDoError(
            f"no incident below {args.folder}",
            next_step="name the folder given as --crash-dump-folder",
        )
    for incident in incidents:
        print(_as_line(incident))
    return ExitCode.DONE


def _as_json(incident: StoredIncident) -> dict[str, Any]:
    document = incident.document or {}
    fields = {name: document.get(name) for name in ("id", "kind", "trigger", "server", "requests", "peers", "verdict")}
    return {
        "path": str(incident.path),
        "finished": incident.finished,
        "problem": incident.problem or None,
        **fields,
    }


def _as_line(incident: StoredIncident) -> str:
    mark = "" if incident.finished else " (not finished)"
    if incident.document is None:
        return f"{incident.path}{mark}\n    {incident.problem}"
    verdict = incident.document.get("verdict")
    verdict = verdict if isinstance(verdict, dict) else {}
    return f"{incident.path}{mark}\n    {verdict.get('text', 'no verdict')} [{verdict.get('level', 'unknown')}]"
