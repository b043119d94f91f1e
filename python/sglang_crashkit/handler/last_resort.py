"""End a server that does not end by itself after a crash.

A main process that stands still, in a call that never returns, hears of no signal that Python handles: it would keep
its port, its memory and its place at the load balancer. SIGALRM is ignored or handled by nobody in SGLang, leaves no
core file, and as an exit status (142) it is taken for nothing else; SIGKILL follows it. Process 1 of a container is
deaf to both.
"""

from __future__ import annotations

import logging
import signal
import time

from sglang_crashkit.handler.tree import TrackedProcess
from sglang_crashkit.kernel import procfs, signals

logger = logging.getLogger(__name__)

#: After SIGALRM the server has this long to be gone, in seconds.
_ALARM_SECS = 2.0


class LastResort:
    """Sends the signals, once, when their time has come.

    Args:
        root: the server's main process.
        patience_secs: from the end of the incident to the first signal, in seconds.
    """

    def __init__(self, root: TrackedProcess, patience_secs: float) -> None:
        self._root = root
        self._patience_secs = patience_secs
        self._due: float | None = None
        self._signals: list[signal.Signals] = []

    def arm(self, at_the_latest: float) -> None:
        """Begin to wait for the server's end, until `at_the_latest` by the monotonic clock."""
        if self._due is None:
            self._due = min(time.monotonic() + self._patience_secs, at_the_latest)
            self._signals = [signal.SIGALRM, signal.SIGKILL]

    def next_due(self) -> float:
        """Return when `act_on_time` has something to do, by the monotonic clock."""
        return self._due if self._due is not None and self._signals else float("inf")

    def act_on_time(self) -> None:
        """Send what is due by now."""
        if time.monotonic() < self.next_due() or self._root.exited_at is not None:
            return
        stat = procfs.read_stat(self._root.pid)
        if stat is not None and stat.state in "Tt":
            # Somebody holds it, maybe with a debugger.
            self._due = time.monotonic() + self._patience_secs
            return
        signum = self._signals.pop(0)
        self._due = time.monotonic() + _ALARM_SECS
        logger.error("server %d did not end after its incident: %s sent", self._root.pid, signum.name)
        signals.send(self._root.handle, signum)
