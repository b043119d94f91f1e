"""The folder of an incident that cannot be written anywhere: it is gathered, judged and told of nonetheless."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sglang_crashkit.incident.folder import IncidentFolder, new_id
from sglang_crashkit.incident.retention import NoRoomError

_MOST_REASON = 1000


class NowhereFolder(IncidentFolder):
    """Takes the place of an `IncidentFolder`, and nothing on disk; each piece of evidence is refused.

    Args:
        reason: why there is no folder; cut to what fits an answer.
    """

    def __init__(self, reason: str) -> None:
        self.id = new_id()
        self.path = Path("nowhere")
        self.problem = reason[:_MOST_REASON]

    def rename(self, kind: str) -> None:
        """Do nothing."""

    def make_room_beside(self, folder: Path, size: int) -> str:
        """Return that there is none."""
        return f"{self.problem} (there would be {size} bytes in {folder})"

    def save(self, document: Mapping[str, Any], summary: str, *, sync: bool = False) -> None:
        """Do nothing."""

    def publish(self) -> Path:
        """Return a path that nothing lies below."""
        return self.path

    def discard(self) -> None:
        """Do nothing."""

    def _write(self, name: str, data: bytes) -> None:
        raise NoRoomError(errno.ENOSPC, f"{self.problem} ({name} would take {len(data)} bytes)")
