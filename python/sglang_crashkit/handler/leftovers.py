"""What a server that is killed leaves behind on its machine, noted while it lives and removed when it is gone."""

from __future__ import annotations

import logging
import time

from sglang_crashkit.core import shared_memory
from sglang_crashkit.handler.tree import ProcessTree

logger = logging.getLogger(__name__)

#: Segments come while the server starts and with large requests; the mappings of all processes take tens of ms to read.
_EVERY_SECS = 60.0
_AFTER_A_CHANGE_SECS = 10.0


class Leftovers:
    """The server's shared memory."""

    def __init__(self, tree: ProcessTree) -> None:
        self._tree = tree
        self._segments: set[shared_memory.Segment] = set()
        self._noted_at = time.monotonic()

    def note_on_time(self) -> None:
        """Look at what the processes map, where that is due."""
        interval = _EVERY_SECS if self._tree.settled else _AFTER_A_CHANGE_SECS
        if time.monotonic() >= self._noted_at + interval:
            self.note()

    def note(self) -> None:
        """Look at what the living processes map now."""
        self._noted_at = time.monotonic()
        for process in self._tree.alive():
            self._segments |= shared_memory.mapped_by(process.pid)
        self._segments |= shared_memory.of_server(self._tree.root.pid)

    def remove(self) -> list[str]:
        """Remove what nobody uses any more and return the names."""
        removed = shared_memory.remove_unused(self._segments)
        if removed:
            logger.info("removed from %s what the server left: %s", shared_memory.FOLDER, " ".join(removed))
        return removed
