"""Processes that end because the one that started them did: the stacks that they wrote, and those that live on.

See `srt.parent_death` for their side.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import time
from collections.abc import Callable, Collection
from pathlib import Path

from sglang_crashkit.core.armed import DEFAULT_PARENT_SIGNAL, ArmedFiles, read_armed
from sglang_crashkit.core.pidfd import signal_name
from sglang_crashkit.handler.tree import ProcessTree, TrackedProcess

logger = logging.getLogger(__name__)

#: What outlives its parent this long, in seconds, does not end by itself.
_OUTLIVE_SECS = 2.0


def orphan_file(process: TrackedProcess, runtime: Path) -> Path:
    """Return where a process writes its stacks when its parent ends; see `core.armed`."""
    return ArmedFiles.of(runtime, process.pid, process.handle.start_ticks).orphan


def ended_with_parent(process: TrackedProcess, runtime: Path) -> bool:
    """Say whether a dead process ended because its parent had.

    Args:
        process: dead.
        runtime: where the server's processes say what they armed.
    """
    status = process.exit_status()
    if process.outlived_parent and (status.signal == "SIGKILL" or not status.known):
        # One that was ending by itself already, of which a thread was left, has a status of its own.
        return True
    armed = read_armed(runtime, process.pid, process.handle.start_ticks)
    signum = armed.parent_signal if armed is not None else DEFAULT_PARENT_SIGNAL
    if status.signal == signal_name(signum):
        return True
    # Whatever its end was in the end, it wrote its stacks because its parent had ended.
    with contextlib.suppress(OSError):
        return orphan_file(process, runtime).stat().st_size > 0
    return False


class Outliving:
    """Ends those of the server's own processes that live on without their parent, as upstream has the kernel do.

    Args:
        tree: the server's processes.
        spared: those that are not to be killed at the moment.
        is_needed: says whether they are still to be looked at.
    """

    def __init__(
        self,
        tree: ProcessTree,
        spared: Callable[[], Collection[int]] = tuple,
        is_needed: Callable[[], bool] = lambda: True,
    ) -> None:
        self._tree = tree
        self._spared = spared
        self._is_needed = is_needed
        self._due: dict[TrackedProcess, float] = {}

    def next_due(self) -> float:
        """Return when `act_on_time` has something to do, by the monotonic clock."""
        return min((self._due.get(process, 0.0) for process in self._orphans()), default=float("inf"))

    def act_on_time(self) -> None:
        """Kill those whose time has come."""
        now = time.monotonic()
        for process in self._orphans():
            due = self._due.setdefault(process, now + (_OUTLIVE_SECS if self._is_needed() else 0.0))
            if now >= due:
                self._due[process] = now + _OUTLIVE_SECS
                process.outlived_parent = True
                logger.info("%s (pid %d) outlives its parent: SIGKILL sent", process.title, process.pid)
                with contextlib.suppress(OSError):
                    process.handle.send_signal(signal.SIGKILL)

    def _orphans(self) -> list[TrackedProcess]:
        root, spared = self._tree.root, self._spared()
        return [
            process
            for process in self._tree.alive()
            if process.pid not in spared
            and process.matters
            and not process.is_root
            and (_is_gone(process.parent) or _is_gone(root))
        ]


def _is_gone(process: TrackedProcess | None) -> bool:
    return process is not None and process.exited_at is not None
