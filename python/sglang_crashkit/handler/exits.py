"""What the kernel, or its parent, says of a process's end: whether another one ended before it, and how it ended."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from sglang_crashkit.capture.responder import ask_exit
from sglang_crashkit.handler.processes import ProcessTree, TrackedProcess
from sglang_crashkit.kernel import procfs
from sglang_crashkit.kernel.stack_hooks import HookFiles

#: Once its main thread is gone, the rest of a process follows within this time, in seconds.
_LAST_THREAD_SECS = 0.2
#: A process that was sent SIGKILL is gone within this time, in seconds.
_KILLED_SECS = 1.0
#: A process that can tell at all how its child ended does it within this time, in seconds.
_ASK_SECS = 0.3


class Exits:
    """The exits of one server's processes, which say in its runtime folder how they are asked."""

    def __init__(self, tree: ProcessTree, runtime: Path) -> None:
        self._tree = tree
        self._runtime = runtime
        self._silent_parents: set[TrackedProcess] = set()

    def before(self, process: TrackedProcess) -> Iterator[TrackedProcess]:
        """Yield those that may have started a process and ended before it, whose exits were not taken in.

        The ranks ask the kernel for a signal when the main process ends, so their end is a consequence.
        """
        for earlier in (self._tree.root, process.parent):
            if earlier is not None and earlier is not process and earlier.exited_at is None and _has_ended(earlier):
                yield earlier

    def learn_status(self, process: TrackedProcess) -> None:
        """Learn from its parent how a process ended, where this one may not know: that takes the right to trace it."""
        parent = process.parent
        if parent is None or parent.exited_at is not None or parent in self._silent_parents:
            return
        if process.exit_status().known:
            return
        socket = HookFiles.of(self._runtime, parent.pid, parent.handle.start_ticks).socket
        began = time.monotonic()
        status = ask_exit(socket, parent.pid, process.pid, _ASK_SECS)
        if status is not None:
            process.handle.take_exit_status(status)
        elif time.monotonic() >= began + _ASK_SECS:
            # The exits of a hundred ranks are not each to wait for a parent that is stuck.
            self._silent_parents.add(parent)


def _has_ended(process: TrackedProcess) -> bool:
    """Say whether a process has ended, of which the kernel may tell only later.

    A child is sent its signal when the thread that started it is gone; a process has ended when its last thread is.
    """
    if process.handle.has_exited():
        return True
    if procfs.is_ending(process.pid):
        return process.handle.has_exited(_KILLED_SECS)
    stat = procfs.read_stat(process.pid)
    # Without one it was reaped since the lines above.
    return (stat is None or stat.state in "ZX") and process.handle.has_exited(_LAST_THREAD_SECS)
