"""Where incidents lie on disk: written under a temporary name, renamed when whole, listed newest first.

::

    <crash folder>/<hostname>/incidents/<UTC time>-<kind>-<id>/
        incident.json   the incident (``schema_version`` tells the form)
        summary.md      the same for a person
        stacks/         one file a process, as text and as JSON
        ranks/          what a failing rank wrote of itself

A folder that begins with ``.partial-`` was not finished.
"""

from __future__ import annotations

import json
import os
import re
import time
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from sglang_crashkit.core.incident import Incident
from sglang_crashkit.core.private_files import (
    make_private_folder,
    sync_folder,
    write_json,
    write_private,
)
from sglang_crashkit.errors import NothingToDoError

PARTIAL = ".partial-"
_NAME = re.compile(r"(\.partial-)?\d{8}T\d{6}\.\d{3}Z-[a-z_]+-[0-9a-f]{8}")


class IncidentFolder:
    """The folder of one incident while it is written.

    Raises:
        OSError: it cannot be created.
        CrashkitError: a folder on the way is not this user's.
    """

    def __init__(self, incidents: Path, kind: str, incident_id: str, seconds: float) -> None:
        moment = datetime.fromtimestamp(seconds, timezone.utc)
        stamp = moment.strftime("%Y%m%dT%H%M%S.") + f"{moment.microsecond // 1000:03d}Z"
        self._final = incidents / f"{stamp}-{kind}-{incident_id}"
        make_private_folder(incidents)
        self.path = make_private_folder(incidents / f"{PARTIAL}{self._final.name}")

    def write_text(self, name: str, text: str) -> str:
        """Write a file below the folder and return its name relative to it.

        Raises:
            OSError: the disk is full or the folder is gone.
        """
        self._write(name, text.encode(errors="backslashreplace"))
        return name

    def write_json(self, name: str, value: Any) -> str:
        """Write `value` as JSON below the folder and return its name relative to it; see `write_text`."""
        self._write(name, json.dumps(value, indent=1, default=str).encode())
        return name

    def adopt(self, source: Path, name: str) -> str:
        """Move a file of this user's into the folder and return its name relative to it; see `write_text`."""
        self._write(name, source.read_bytes())
        source.unlink()
        return name

    def save(self, incident: Incident, summary: str) -> None:
        """Write ``incident.json`` and ``summary.md`` as they are now, durably; see `write_text`."""
        write_private(self.path / "summary.md", summary.encode(errors="backslashreplace"))
        write_json(self.path / "incident.json", incident.to_json(), sync=True)

    def publish(self) -> Path:
        """Give the folder its final name and return it."""
        if self.path != self._final:
            self.path.rename(self._final)
            self.path = self._final
            sync_folder(self._final.parent)
        return self.path

    def discard(self) -> None:
        """Remove the folder and what is in it."""
        for folder, _folders, files in os.walk(self.path, topdown=False):
            for name in files:
                (Path(folder) / name).unlink()
            Path(folder).rmdir()

    def _write(self, name: str, data: bytes) -> None:
        path = self.path / name
        make_private_folder(path.parent)
        write_private(path, data)


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
    if _NAME.fullmatch(folder.absolute().name):
        found = [folder]
    else:
        patterns = ("*", "incidents/*", "*/incidents/*")
        found = [path for pattern in patterns for path in folder.glob(pattern)]
    incidents = [_read(path) for path in found if _NAME.fullmatch(path.absolute().name) and path.is_dir()]
    return sorted(incidents, key=lambda incident: incident.name, reverse=True)


def _read(path: Path) -> StoredIncident:
    finished = not path.absolute().name.startswith(PARTIAL)
    try:
        document = json.loads((path / "incident.json").read_text())
    except FileNotFoundError:
        return StoredIncident(path, finished, None, "has no incident.json")
    except (OSError, ValueError) as error:
        return StoredIncident(path, finished, None, f"incident.json cannot be read: {error}")
    if not isinstance(document, dict):
        return StoredIncident(path, finished, None, "incident.json is not an object")
    return StoredIncident(path, finished, document)


def new_id() -> str:
    """Return a new incident id: eight hexadecimal digits."""
    return os.urandom(4).hex()


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
