"""Incidents on disk as a crash handler leaves them."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from sglang_crashkit.incident.folder import IncidentFolder, new_id
from sglang_crashkit.model.incident import Incident, ServerInfo, Trigger
from sglang_crashkit.model.incident_log import LOG, IncidentLog
from sglang_crashkit.settings import DiskLimits
from unit.support.waiting import LONG

NOON = 1_700_000_000.25
#: Incidents of real servers, with other names of hosts and folders.
DATA = Path(__file__).parents[1] / "incident" / "data"
#: What the kit itself reads again, or looks up.
_KEPT = {"kind", "status", "time", "began", "arrived", "path", "schema_version", "role"}
_LOG_ONE = """
import json, logging, sys
from pathlib import Path
from sglang_crashkit.handler.__main__ import LogFile
path, text = json.load(sys.stdin)
LogFile(Path(path)).emit(logging.LogRecord("x", logging.INFO, "x.py", 1, "%s", (text,), None))
"""


def make_incident(
    incidents: Path,
    *,
    seconds: float = NOON,
    kind: str = "killed",
    publish: bool = True,
    pieces: dict[str, str] | None = None,
    limits: DiskLimits | None = None,
    **fields: Any,
) -> Path:
    """Write an incident into folder `incidents` and return its folder.

    Args:
        incidents: the folder of all incidents of a host.
        seconds: when it was opened.
        kind: its kind.
        publish: give it its final name.
        pieces: files in it by name.
        limits: see `IncidentFolder`.
        fields: what the document has beside the usual, or `golden` has but for the id.
    """
    trigger, server = Trigger("process_exited", "2023", 7, "sglang::x"), ServerInfo(1, "0.5.23", "0.1", "h")
    incident = Incident(new_id(), kind, trigger, server)
    folder = IncidentFolder(incidents, kind, incident.id, seconds, limits)
    for name, text in (pieces or {}).items():
        folder.write_text(name, text)
    document = incident.to_json() | fields | {"id": incident.id}
    if publish or fields.get("complete"):
        folder.save(document, "words \udcff\n")
    else:
        folder.append(LOG, IncidentLog().lines(Incident.of(document)))
    if publish:
        return folder.publish()
    # As if its writer had died.
    folder.ownership.release()
    return folder.path


def finish_at_once(incidents: Path) -> int:
    """Have three processes at once finish what was left in a folder, and return how many incidents they finished."""
    code = "import sys; from pathlib import Path; from sglang_crashkit.handler.unfinished import finish_abandoned\n"
    code += "print(len(finish_abandoned(Path(sys.argv[1]))))"
    command = [sys.executable, "-c", code, str(incidents)]
    starts = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    return sum(int(start.communicate(timeout=LONG)[0]) for start in starts)


def golden(name: str) -> dict[str, Any]:
    """Return the document of a real incident."""
    document: dict[str, Any] = json.loads((DATA / f"{name}.json").read_text())
    return document


#: In place of a value: the field is left out.
GONE = object()


def changed(document: Any, path: str, value: object) -> Any:
    """Return a copy of a document with another value at a path such as ``entries.0.state``."""
    result = place = copy.deepcopy(document)
    *folders, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    for folder in folders:
        place = place[folder]
    if value is GONE:
        del place[last]
    else:
        place[last] = value
    return result


def stacks_of(document: dict[str, Any], *frames: dict[str, Any]) -> dict[str, str]:
    """Return the stack files that the processes of a document name, with these frames of each main thread."""
    other = {"name": "Thread-1", "native_id": 1, "frames": [{"function": "sleeps", "file": "t.py", "line": 1}]}
    return {
        str(Path(piece["path"]).with_suffix(".json")): json.dumps(
            {"threads": [other, {"name": "MainThread", "native_id": process["pid"], "frames": frames}]}
        )
        for process in document["processes"]
        for piece in process["evidence"]
        if piece["kind"] == "stack" and piece["path"]
    }


def poisoned(value: Any, sign: str, name: str = "") -> Any:
    """Return a JSON value in which every text ends with a sign, and each object has one for a name."""
    if isinstance(value, dict):
        return {key: poisoned(one, sign, key) for key, one in value.items()} | {f"key{sign}": sign}
    if isinstance(value, list):
        return [poisoned(one, sign, name) for one in value]
    return f"{value}{sign}" if isinstance(value, str) and name not in _KEPT else value


def handler_log(folder: Path, text: str) -> str:
    """Return what the crash handler's log holds of a record with this text."""
    path = folder / "crash_handler.log"
    subprocess.run(
        [sys.executable, "-c", _LOG_ONE], input=json.dumps([str(path), text]), text=True, timeout=60, check=True
    )
    return path.read_text()
