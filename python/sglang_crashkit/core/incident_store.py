"""Find the incidents on disk, newest first; `incident_folder` writes them."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_crashkit.core.incident_name import PARTIAL, parse_name
from sglang_crashkit.errors import NothingToDoError


@dataclass(frozen=True)
class StoredIncident:
    """An incident found on disk.

    Attributes:
        path: its folder.
        finished: False for a folder that was left half-written.
        document: what its ``incident.json`` holds, None where that is missing or unreadable.
        problem: why `document` is None; empty otherwise.
    """

    path: Path
    finished: bool
    document: dict[str, Any] | None
    problem: str = ""

    @property
    def name(self) -> str:
        """The folder's name without the mark of an unfinished one."""
        return self.path.name.removeprefix(PARTIAL)


def find_incidents(folder: Path) -> list[StoredIncident]:
    """Return the incidents below `folder`, newest first.

    Args:
        folder: a crash folder, a host's folder in it, its ``incidents`` folder, or one incident's folder.

    Raises:
        NothingToDoError: there is no such folder.
    """
    if not folder.is_dir():
        raise NothingToDoError(
            f"{folder} is not a folder",
            next_step="name the folder that the server was given as --crash-dump-folder",
        )
    if parse_name(folder.absolute().name):
        found = [folder]
    else:
        patterns = ("*", "incidents/*", "*/incidents/*")
        found = [path for pattern in patterns for path in folder.glob(pattern)]
    incidents = [_read(path) for path in found if parse_name(path.absolute().name) and path.is_dir()]
    return sorted(incidents, key=lambda incident: incident.name, reverse=True)


def _read(path: Path) -> StoredIncident:
    finished = not path.absolute().name.startswith(PARTIAL)
    try:
        document = json.loads((path / "incident.json").read_text())
    except FileNotFoundError:
        return StoredIncident(path, finished, None, "has no incident.json")
    except (OSError, ValueError, RecursionError) as error:
        return StoredIncident(path, finished, None, f"incident.json cannot be read: {error}")
    if not isinstance(document, dict):
        return StoredIncident(path, finished, None, "incident.json is not an object")
    return StoredIncident(path, finished, document)


def wait_for_incident(folder: Path, timeout_secs: float) -> StoredIncident | None:
    """Wait until there is a finished incident below `folder` and return the newest; None at the end of the time."""
    deadline = time.monotonic() + timeout_secs
    while True:
        if folder.is_dir():
            for incident in find_incidents(folder):
                if incident.finished and incident.document is not None:
                    return incident
        if time.monotonic() >= deadline:
            return None
        time.sleep(0.02)
