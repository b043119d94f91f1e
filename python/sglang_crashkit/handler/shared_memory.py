"""What a killed server leaves in shared memory."""

from __future__ import annotations

import contextlib
import logging
import os
import time

from sglang_crashkit.handler.processes import ProcessTree
from sglang_crashkit.kernel import procfs, shared_memory
from sglang_crashkit.kernel.shared_memory import OrphanedSegment, Segment

logger = logging.getLogger(__name__)

#: Segments come while the server starts and with large requests; the mappings of all processes take tens of ms to read.
_MAPS_SECS, _MAPS_AFTER_A_CHANGE_SECS = 60.0, 10.0


class SharedMemory:
    """The segments of one server: noted while it lives, cleared or reported when it is gone."""

    def __init__(self, tree: ProcessTree) -> None:
        self._tree = tree
        self._segments: set[Segment] = set()
        self._own: dict[int, int] = {}  # start times by pid
        self._noted_at = time.monotonic()

    def act_on_time(self) -> None:
        """Look at what the processes map, where that is due."""
        interval = _MAPS_SECS if self._tree.settled else _MAPS_AFTER_A_CHANGE_SECS
        if time.monotonic() >= self._noted_at + interval:
            self.note()

    def note(self) -> None:
        """Look at what the living processes map now."""
        self._noted_at = time.monotonic()
        for process in self._tree.alive():
            if not process.matters:
                # What a program runs beside its server is its own affair.
                continue
            self._own[process.pid] = process.handle.start_ticks
            with contextlib.suppress(OSError):
                self._segments |= shared_memory.mapped_by(process.pid)
        if any(process.role == "tokenizer_worker" for process in self._tree):
            # By its name alone it may be another container's, whose processes have the same pids.
            self._segments |= shared_memory.of_server(self._tree.root.pid)

    def clear(self) -> tuple[list[str], list[OrphanedSegment]]:
        """Remove what was the server's alone, unless one of its processes lives; see `shared_memory.clear`."""
        lives = any(process.exited_at is None and process.matters for process in self._tree)
        lives = lives or any(procfs.is_running(pid, ticks) for pid, ticks in self._own.items())
        removed, left = shared_memory.clear(self._segments, {} if lives else self._own)
        if removed:
            logger.info("removed from %s what the server left: %s", shared_memory.FOLDER, " ".join(removed))
        if left:
            named = ", ".join(f"{one.name} ({one.why})" for one in left)
            logger.info("the server left in %s: %s", shared_memory.FOLDER, named)
        return removed, left


def left_by_others() -> str:
    """Return in one line what processes that are gone left, servers among them; empty where nothing is there.

    Whose it was is not certain, and so nothing is removed.
    """
    try:
        left = [segment for segment in shared_memory.of_gone() if not segment.why]
    except OSError:
        return ""
    if not left:
        return ""
    count, size = len(left), sum(segment.bytes for segment in left) / (1 << 30)
    largest = max(left, key=lambda segment: segment.bytes)
    return (
        f"{count} segment{'s' if count > 1 else ''} of user {os.geteuid()} in {shared_memory.FOLDER} "
        f"({size:.2f} GiB; the largest is {largest.name}) {'are' if count > 1 else 'is'} of processes that are gone; "
        "next: sglang-crashkit doctor"
    )
