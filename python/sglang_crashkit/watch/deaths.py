"""See the processes of a server end, one after the other, without being their parent.

Which one was first is known for a moment only: who started it reaps it, and ends the others. What tells a failure from
an end that was wanted is how it ended, and whether the others were still meant to live when it did: whoever ends a
server kills all of them within a few milliseconds.
"""

from __future__ import annotations

import select
import time
from collections.abc import Mapping
from dataclasses import dataclass

from sglang_crashkit.kernel import procfs
from sglang_crashkit.kernel.pidfd import ExitStatus, ProcessHandle

#: Whoever kills all processes of a server has sent the last signal this much after the first end, in seconds.
_ALL_KILLED_SECS = 0.05


@dataclass(frozen=True)
class Death:
    """The end of one process.

    Attributes:
        pid: its process id.
        title: its title.
        at: when it was noticed, in seconds of the monotonic clock.
        end: how it ended, as far as the kernel tells.
        alone: the others were not about to end.
    """

    pid: int
    title: str
    at: float
    end: ExitStatus
    alone: bool = True

    def __str__(self) -> str:
        who = f"{self.title} (pid {self.pid})"
        if self.end.signal is not None:
            return f"{who} was killed by {self.end.signal}"
        return f"{who} ended " + ("by itself" if self.end.code is None else f"with exit status {self.end.code}")


class DeathWatch:
    """Follows processes until each has ended.

    Args:
        root: who started them; where it ended in the same moment as another, it was not the first.

    Attributes:
        deaths: who has ended, the first one first.
    """

    def __init__(self, root: int) -> None:
        self.deaths: list[Death] = []
        self._root = root
        self._alive: dict[int, tuple[ProcessHandle, str]] = {}
        self._known: set[tuple[int, int]] = set()

    def follow(self, processes: Mapping[int, str]) -> None:
        """Follow more processes.

        Args:
            processes: their titles by pid; those that are followed already may be among them.
        """
        for pid, title in processes.items():
            if pid in self._alive:
                continue
            try:
                handle = ProcessHandle(pid)
            except OSError:
                # Gone already, or no descriptor is left: then its end is not seen here.
                continue
            if (pid, handle.start_ticks) in self._known:
                handle.close()
                continue
            self._known.add((pid, handle.start_ticks))
            self._alive[pid] = (handle, title)

    def wait(self, secs: float) -> None:
        """Wait for `secs` seconds, or until somebody has ended; who has is then among the deaths."""
        poller = select.poll()
        for handle, _title in self._alive.values():
            poller.register(handle, select.POLLIN)
        if not poller.poll(secs * 1000):
            return
        # How it ended is read before its parent reaps it.
        at = time.monotonic()
        ended = [(pid, handle.exit_status()) for pid, (handle, _title) in self._alive.items() if handle.has_exited()]
        followed = {pid: self._alive.pop(pid) for pid, _end in ended}
        time.sleep(_ALL_KILLED_SECS)
        alone = not any(handle.has_exited() or procfs.is_ending(pid) for pid, (handle, _title) in self._alive.items())
        for pid, end in sorted(ended, key=lambda one: one[0] == self._root):
            handle, title = followed[pid]
            handle.close()
            self.deaths.append(Death(pid, title, at, end, alone=alone and bool(self._alive)))

    def close(self) -> None:
        """Let go of those that live."""
        for handle, _title in self._alive.values():
            handle.close()
        self._alive.clear()
