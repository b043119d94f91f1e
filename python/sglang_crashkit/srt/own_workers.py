"""The workers of the server that this process is the main process of, each held by pidfd from when it is first seen."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass

from sglang_crashkit.kernel import procfs, titles
from sglang_crashkit.kernel.pidfd import ExitStatus, ProcessHandle

_TITLES = ("sglang::scheduler", "sglang::detokenizer", "sglang::data_parallel_controller")
#: What the kernel keeps of a title, which is all that there is of a process that has ended.
_NAME_CHARS = 15
_NAMES = frozenset(title[:_NAME_CHARS] for title in _TITLES)


@dataclass(eq=False)
class Worker:
    """One worker.

    Attributes:
        pid: its process id.
        title: its title when it was first seen, the first 15 characters of it where it had ended by then.
        start_ticks: see `procfs.ProcStat`.
        handle: None where the kernel gave no pidfd.
        ended_at: when its end was noticed, by the monotonic clock; None before.
        done: its end needs no further look.
    """

    pid: int
    title: str
    start_ticks: int
    handle: ProcessHandle | None
    ended_at: float | None = None
    done: bool = False

    def has_ended(self) -> bool:
        """Say whether it has ended, reaped or not."""
        if self.handle is not None:
            return self.handle.has_exited()
        stat = procfs.read_stat(self.pid)
        return stat is None or stat.start_ticks != self.start_ticks or (stat.state in "ZX" and stat.threads <= 1)

    def exit_status(self) -> ExitStatus:
        """Return how it ended; `ExitStatus.known` is false while it lives and where nobody can tell."""
        with contextlib.suppress(OSError):
            # A child of this process, which stays to be reaped by whoever started it.
            result = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if result is not None:
                by_itself = result.si_code == os.CLD_EXITED
                return ExitStatus.from_wait_status(result.si_status << 8 if by_itself else result.si_status)
        return self.handle.exit_status() if self.handle is not None else ExitStatus()

    def close(self) -> None:
        """Close the pidfd."""
        if self.handle is not None:
            self.handle.close()


class OwnWorkers:
    """The schedulers, detokenizers and data-parallel controllers below this process, dead ones included.

    Neither another server's, which this process may have started, nor what a worker runs under its own title.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._scanner = procfs.TreeScanner(self._pid)
        self._workers: dict[int, Worker] = {}

    def __iter__(self) -> Iterator[Worker]:
        return iter(list(self._workers.values()))

    def find(self) -> list[Worker]:
        """Look for new ones, and return them; those that are gone and done with are dropped."""
        present, new = self._scanner.scan() - {self._pid}, []
        for worker in self:
            if worker.done and worker.pid not in present:
                self._drop(worker)
        for pid in present:
            stat, known = procfs.read_stat(pid), self._workers.get(pid)
            if known is not None and stat is not None and known.done and known.start_ticks != stat.start_ticks:
                self._drop(known)
            held = self._hold(stat) if pid not in self._workers and stat is not None else None
            if held is not None:
                self._workers[pid] = held
                new.append(held)
        return new

    def close(self) -> None:
        """Close all pidfds."""
        for worker in self:
            self._drop(worker)

    def _drop(self, worker: Worker) -> None:
        del self._workers[worker.pid]
        worker.close()

    def _hold(self, stat: procfs.ProcStat) -> Worker | None:
        title = procfs.read_title(stat.pid)
        if not (_is_workers(title) and self._is_own(stat, title)):
            return None
        handle = None
        with contextlib.suppress(OSError):
            handle = ProcessHandle(stat.pid)
        if handle is not None and handle.start_ticks != stat.start_ticks:
            handle.close()
            return None
        return Worker(stat.pid, title, stat.start_ticks, handle)

    def _is_own(self, stat: procfs.ProcStat, title: str) -> bool:
        above: procfs.ProcStat | None = stat
        # A program that is no Python may be in between, such as one that binds memory to a socket.
        while above is not None and above.ppid:
            if above.ppid == self._pid:
                return True
            parent = procfs.read_title(above.ppid)
            if titles.role_of(parent) == "data_parallel_controller":
                # One that it has just forked has its own title still.
                if parent == title:
                    return False
            elif procfs.is_python(above.ppid):
                return False
            above = procfs.read_stat(above.ppid)
        return False


def _is_workers(title: str) -> bool:
    return title[:_NAME_CHARS] in _NAMES
