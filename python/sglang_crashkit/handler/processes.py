"""Track the processes of one server, each by a pidfd from when it is first seen, and how each of them ended."""

from __future__ import annotations

import logging
import os
import re
import select
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang_crashkit.capture.responder import ask_exit
from sglang_crashkit.kernel import cgroup, clock, procfs, titles
from sglang_crashkit.kernel.pidfd import ExitStatus, ProcessHandle
from sglang_crashkit.kernel.stack_hooks import HookFiles

logger = logging.getLogger(__name__)

OOM_AGE_SECS = 30.0
#: Seconds within which most processes get their title, and between two reads of the titles of older processes.
_YOUNG_SECS, _REREAD_SECS = 60.0, 4.0
#: Seconds without any new process, or without a new process of the server itself, after which the server has started.
_QUIET_SECS, _LONG_SECS = 30.0, 300.0
#: The most ancestors that are searched for the process of the server that started a process.
_MAX_ANCESTORS = 8
#: Seconds within which an incident that opens includes a child that died without a title; seconds for which such a
#: child is kept, because the server may report that it failed; and the most such children that are kept.
_UNEXPLAINED_SECS, _KEPT_SECS, _MAX_UNEXPLAINED = 60.0, 3600.0, 64
_PID = re.compile(r"[1-9][0-9]{0,9}", re.ASCII)
#: More ranks than a server waits for on one machine; a number above every exit status and signal.
_MAX_RANKS, _MAX_CODE = 1024, 256
#: An exit of unknown time is dated this long before the events that followed it, in seconds.
_A_MOMENT_SECS = 0.001
#: Seconds within which a process is gone after its main thread, and after SIGKILL; and within which a parent answers
#: how its child ended.
_LAST_THREAD_SECS, _KILLED_SECS, ASK_SECS = 0.2, 1.0, 0.3


@dataclass(eq=False)
class TrackedProcess:
    """One process of the server."""

    handle: ProcessHandle
    title: str  # as last read; after its death, the last known title
    is_root: bool  # it is the process that launched the server
    is_python: bool  # it runs a Python interpreter, so it has a stack to capture
    oom_counter: cgroup.OomCounter | None  # of its memory cgroup, at an earlier time
    newer_oom_counter: cgroup.OomCounter | None = None  # replaces `oom_counter` once it is old enough
    is_nameless: bool = False  # its command line was always empty, because it was dead or in execve(2)
    is_awaited: bool = False  # the server waits for it, and gave it a title, which it has until it sets its own
    parent: TrackedProcess | None = None  # a process of the server; None for the root, and if the parent was gone
    is_own: bool = False  # it was registered as a process of this server
    hosts_server: bool = False  # it is another server: it started workers that are not this server's
    gpu: str | None = None  # the UUID of its GPU, as it reported
    is_stuck: bool = False  # asked how a child of it had ended, it did not answer in time
    exited_at: float | None = None  # when its exit was noticed, by `kernel.clock`; None while it lives
    seen_at: float = field(default_factory=time.monotonic)  # when it was first seen

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.handle.pid

    @property
    def role(self) -> str:
        """Its role; see `titles.role_of`."""
        role = titles.role_of(self.title, is_root=self.is_root)
        # An unregistered process with a worker's title is its helper, or another server's; so is a scheduler's child.
        is_early = role == "starting" and (self.parent is None or self.parent.role != "scheduler")
        return role if self.is_own or self.is_root or is_early else "helper"

    @property
    def state(self) -> str:
        """The letter of its state in the kernel; X if it is gone."""
        stat = procfs.read_stat(self.pid)
        return stat.state if stat is not None else "X"

    @property
    def rank(self) -> dict[str, int]:
        """Its ranks; see `titles.rank_of`."""
        return titles.rank_of(self.title)

    @property
    def matters(self) -> bool:
        """Whether it belongs to the server itself, which its unexpected exit affects."""
        return self.is_awaited or self.is_own or self.is_root

    @property
    def is_unknown(self) -> bool:
        """Whether its role is not known yet: between fork and exec it has the title of its parent."""
        return self.role == "starting" or (not self.matters and (self.is_nameless or self.has_parents_title))

    @property
    def has_parents_title(self) -> bool:
        """Whether its title equals that of its known parent, as after a fork."""
        return self.parent is not None and self.title == self.parent.title

    @property
    def is_ignorable(self) -> bool:
        """Whether it is dead and was only a helper, as far as is known."""
        return self.exited_at is not None and not self.matters and self.role != "starting"

    @property
    def is_foreign(self) -> bool:
        """Whether it belongs to another server that a process of this one started, or is a crash handler."""
        if self.is_own or self.is_root:
            return False
        is_handler = titles.role_of(self.title) == "crash_handler"
        return self.hosts_server or is_handler or (self.parent is not None and self.parent.is_foreign)

    @property
    def ended_with_parent(self) -> bool:
        """Whether SIGKILL ended it after its parent exited, which upstream requests by ``PR_SET_PDEATHSIG``."""
        if self.is_root or self.exited_at is None or self.handle.exit_status().signal != "SIGKILL":
            return False
        parent = self.parent
        return parent is not None and parent.exited_at is not None and parent.exited_at <= self.exited_at

    def mark_exited(self) -> None:
        """Set when its exit was noticed to now, unless it is set already."""
        self.exited_at = self.exited_at or clock.now()


class ProcessTree:
    """All processes of the server, including dead ones, but not those of another server that one of them started.

    Raises:
        ProcessLookupError: there is no process `root_pid`.
    """

    def __init__(self, root_pid: int) -> None:
        self.scanner = procfs.TreeScanner(root_pid, without=os.getpid())
        self._epoll = select.epoll()
        self._processes: dict[int, TrackedProcess] = {}
        self._unwatched: set[int] = set()
        self._forgotten: dict[int, int] = {}  # start times of forgotten zombies by pid
        self.root = self._add(root_pid, is_root=True)
        self._changed_at = self._registered_at = self._aged_at = self._reread_at = time.monotonic()

    def fileno(self) -> int:
        """Return the descriptor that is readable when `ended` has something to return."""
        return self._epoll.fileno()

    def __iter__(self) -> Iterator[TrackedProcess]:
        return iter([process for process in self._processes.values() if not process.is_foreign])

    def __contains__(self, pid: int) -> bool:
        return pid in self._processes

    def get(self, pid: int) -> TrackedProcess | None:
        """Return the process `pid`; None if it is not the server's."""
        return self._processes.get(pid)

    def alive(self) -> list[TrackedProcess]:
        """Return the processes whose exit has not been noticed yet, schedulers first."""
        living = [process for process in self if process.exited_at is None]
        return sorted(living, key=lambda process: (process.role != "scheduler", process.pid))

    def ended(self) -> list[TrackedProcess]:
        """Return the processes whose exit the kernel has reported since the last call, in the order of its reports."""
        by_descriptor = {process.handle.fd: process for process in self._processes.values()}
        found = (by_descriptor.get(descriptor) for descriptor, _events in self._epoll.poll(0))
        return [process for process in found if process is not None]

    def close(self) -> None:
        """Close all pidfds."""
        for process in self._processes.values():
            process.handle.close()
        self._epoll.close()

    @property
    def settled(self) -> bool:
        """Whether the server has started; a user's program may start other processes at any time after that."""
        now = time.monotonic()
        return now > self._changed_at + _QUIET_SECS or now > self._registered_at + _LONG_SECS

    def refresh(self) -> list[TrackedProcess]:
        """Look for new processes and new titles; return the new processes."""
        new = []
        present = self.scanner.scan()
        self._forgotten = {pid: start for pid, start in self._forgotten.items() if pid in present}
        self._unwatched &= present
        for pid in present:
            self._forget_earlier(pid)
            if pid not in self._processes and not self._is_forgotten(pid):
                try:
                    new.append(self._add(pid, is_root=False))
                except ProcessLookupError:
                    continue
                except OSError as error:
                    if pid not in self._unwatched:
                        logger.warning("process %d cannot be watched: %s", pid, error)
                    self._unwatched.add(pid)
        for process in new:
            # Only after all were added: the scan may find a child before its parent.
            stat = procfs.read_stat(process.pid)
            process.parent = self._processes.get(stat.ppid) if stat is not None else None
        # Don't read each title at each scan: a user's program may have thousands of processes beside its server.
        young_since = time.monotonic() - _YOUNG_SECS
        if time.monotonic() >= self._reread_at + _REREAD_SECS:
            self._reread_at, young_since = time.monotonic(), 0.0
        for process in self.alive():
            # SGLang sets its titles once. If a title could not be read, only its first `COMM_BYTES` bytes are known.
            is_titled = process.title.startswith("sglang::") and len(process.title) != procfs.COMM_BYTES
            if (process.has_parents_title or not is_titled) and process.seen_at >= young_since:
                self.reread_title(process)
            above = process.parent
            if process.title.startswith("sglang::") and above is not None and not (above.is_root or above.is_own):
                above.hosts_server = True
        self._age_oom_counters()
        if new:
            self._changed_at = time.monotonic()
        return new

    def reread_title(self, process: TrackedProcess) -> None:
        """Update the title of a process, which may have changed since the last scan."""
        cmdline = procfs.read_cmdline(process.pid)
        process.is_nameless &= not cmdline
        title = procfs.title_of(cmdline, process.title)
        if title != process.title and (title.startswith("sglang::") or not process.is_awaited):
            process.title = title
            process.is_python = procfs.is_python(process.pid)
            self._changed_at = time.monotonic()

    def register(self, pid: int, start_ticks: int) -> TrackedProcess | None:
        """Register a process as the server's own; `start_ticks` is 0 if the process itself reports it, not the launch.

        Returns the process if it died before and its exit was handled as that of a helper.
        """
        process = self._processes.get(pid)
        if process is None or process.is_root or start_ticks not in (0, process.handle.start_ticks):
            return None
        was_ignorable = process.is_ignorable
        if not process.is_own:
            process.is_own = True
            self._changed_at = self._registered_at = time.monotonic()
        self.reread_title(process)
        return process if was_ignorable else None

    def adopt(self, pid: int, title: str) -> None:
        """Add a process that itself reports its role; `title` is its title until it sets one of SGLang's.

        Raises:
            OSError: the process cannot be watched, or is gone.
        """
        process = self._processes.get(pid) or self._add(pid, is_root=False)
        # The root may also be such a process: if an actor started the handler, it is a rank, not a user's program.
        process.title, process.is_own, process.is_awaited, process.parent = title, True, True, None
        self._changed_at = self._registered_at = time.monotonic()

    def started_by_own(self, process: TrackedProcess) -> bool:
        """Return whether the server itself started a process, directly or through programs that are not Python."""
        above, seen = procfs.read_stat(process.pid), 0
        while above is not None and above.ppid and seen < _MAX_ANCESTORS:
            parent = self._processes.get(above.ppid)
            if parent is not None and (parent.is_root or parent.is_own):
                return True
            if procfs.is_python(above.ppid):
                return False
            above, seen = procfs.read_stat(above.ppid), seen + 1
        return False

    def add_reaped(self, pid: int, title: str, status: ExitStatus, seconds: float) -> TrackedProcess:
        """Add a rank that was reaped before a scan found it; its exit was noticed at `seconds`, by `kernel.clock`."""
        process = TrackedProcess(
            handle=ProcessHandle.of_reaped(pid, status),
            title=title,
            is_root=False,
            is_python=True,
            # All processes of a server are in the same memory cgroup.
            oom_counter=self.root.oom_counter,
            is_awaited=True,
            is_own=True,
            parent=self.root,
            exited_at=seconds,
        )
        self._processes[pid] = process
        return process

    def forget(self, process: TrackedProcess) -> None:
        """Stop tracking a process, and close its pidfd."""
        process.handle.close()
        self._processes.pop(process.pid, None)
        # Scans find it until its parent reaps it.
        self._forgotten[process.pid] = process.handle.start_ticks

    def forget_dead(self) -> None:
        """Stop tracking the processes whose exit was noticed, except the root."""
        for process in self:
            if process.exited_at is not None and not process.is_root:
                self.forget(process)

    def keep(self, process: TrackedProcess) -> None:
        """Keep a child that died before its role was known, and forget the earliest of more than `_MAX_UNEXPLAINED`."""
        # The pidfd is no longer needed: the exit status was read, as far as the kernel reports it.
        process.handle.close()
        kept = [process for process in self if process.exited_at is not None and process.is_unknown]
        for process in kept[:-_MAX_UNEXPLAINED]:
            self.forget(process)

    def recent_unexplained(self) -> list[TrackedProcess]:
        """Return the children that died recently before their role was known; forget those that died long ago."""
        now, recent = clock.now(), []
        for process in self:
            if process.exited_at is None or not (process.is_unknown or process.is_awaited):
                continue
            age = now - process.exited_at
            if age >= _KEPT_SECS:
                self.forget(process)
            elif age < _UNEXPLAINED_SECS and (process.role == "starting" or process.is_awaited):
                recent.append(process)
        # Tokenizer workers start once the ranks are ready. The dead child is then such a worker, which is restarted.
        return [] if any(process.role == "tokenizer_worker" for process in self) else recent

    def _forget_earlier(self, pid: int) -> None:
        """Forget a dead process of unknown role that is in no incident, if another process has its pid by now."""
        known = self._processes.get(pid)
        if known is not None and known.handle.fd < 0 and known.is_unknown:
            stat = procfs.read_stat(pid)
            if stat is not None and stat.start_ticks != known.handle.start_ticks:
                self.forget(known)

    def _age_oom_counters(self) -> None:
        """Keep OOM counts of half a minute to a minute ago to compare with; exclude the kills of other processes.

        A newer count may already include the kill in question, because a large process takes seconds to die. If a count
        grew but none of these processes is dying, the OOM killer ended another process in the container.
        """
        living = self.alive()
        if time.monotonic() >= self._aged_at + OOM_AGE_SECS:
            self._aged_at = time.monotonic()
            for process in living:
                process.oom_counter = process.newer_oom_counter or process.oom_counter
                process.newer_oom_counter = cgroup.find_counter(process.pid)
        # Read the counts before the processes: then no count includes a process that is killed in between.
        now = {counter.path: counter.read_again() for process in living if (counter := process.oom_counter)}
        behind = [process for process in living if (counter := process.oom_counter) and now[counter.path] != counter]
        if behind and not any(procfs.is_ending(process.pid) for process in living):
            for process in behind:
                assert process.oom_counter is not None
                newest = now[process.oom_counter.path] or process.oom_counter
                process.oom_counter = process.newer_oom_counter = newest

    def _is_forgotten(self, pid: int) -> bool:
        stat = procfs.read_stat(pid) if pid in self._forgotten else None
        return stat is not None and stat.start_ticks == self._forgotten[pid]

    def _add(self, pid: int, *, is_root: bool) -> TrackedProcess:
        handle, cmdline = ProcessHandle(pid), procfs.read_cmdline(pid)
        process = TrackedProcess(
            handle=handle,
            title=procfs.title_of(cmdline, "") or procfs.read_title(pid),
            is_nameless=not cmdline,
            is_root=is_root,
            is_python=procfs.is_python(pid),
            oom_counter=cgroup.find_counter(pid),
        )
        self._processes[pid] = process
        # One shot: an exit that was noticed before the kernel reports it must not be reported at each poll.
        self._epoll.register(process.handle, select.EPOLLIN | select.EPOLLONESHOT)
        return process


def learn_ranks(
    tree: ProcessTree, fields: Mapping[str, Any], seconds: float, expected: Collection[int]
) -> list[tuple[TrackedProcess, bool]]:
    """Learn from the main process which ranks failed during its start: ranks without a title, or never seen.

    The fields are ``titles`` and ``exit_codes`` by pid, the latter as `multiprocessing` writes them, reported at
    `seconds` since the epoch; the exits of `expected` were announced. Returns the failed ranks that were not known as
    such, each with True if its exit was not known either.
    """
    codes, found = fields.get("exit_codes", {}), []
    for key, title in list(fields.get("titles", {}).items())[:_MAX_RANKS]:
        if not (isinstance(title, str) and title and _PID.fullmatch(key)):
            continue
        pid, code = int(key), codes.get(key)
        status = ExitStatus.from_exit_code(code) if type(code) is int and abs(code) < _MAX_CODE else None
        title = title[:120].encode(errors="backslashreplace").decode()
        process = tree.get(pid)
        if process is None and status is not None and pid not in expected:
            # It ended before a scan found it. All ranks start together, so it ended before those that scans found.
            ended = [one.exited_at for one in tree if one.exited_at is not None and not one.is_ignorable]
            found.append((tree.add_reaped(pid, title, status, min([seconds, *ended]) - _A_MOMENT_SECS), True))
        elif process is not None and (process.is_unknown or (not process.matters and process.exited_at is not None)):
            was_ignorable = process.is_ignorable
            process.title, process.is_awaited = title, True
            if status is not None and process.handle.has_exited():
                process.handle.take_exit_status(status)
            if was_ignorable:
                found.append((process, False))
    return found


def ended_before(tree: ProcessTree, process: TrackedProcess) -> Iterator[TrackedProcess]:
    """Yield the root and the parent if they ended unnoticed: the kernel may have killed the process because of that."""
    for earlier in (tree.root, process.parent):
        if earlier is not None and earlier is not process and earlier.exited_at is None and _has_ended(earlier):
            yield earlier


def learn_exit_status(process: TrackedProcess, runtime: Path) -> None:
    """Ask the parent of a process how it ended, if the kernel does not report it: that takes permission to trace."""
    parent = process.parent
    if parent is None or parent.exited_at is not None or parent.is_stuck or process.handle.exit_status().known:
        return
    socket = HookFiles.of(runtime, parent.pid, parent.handle.start_ticks).socket
    began = time.monotonic()
    status = ask_exit(socket, parent.pid, process.pid, ASK_SECS)
    if status is not None:
        process.handle.take_exit_status(status)
    else:
        # A hundred ranks may exit: don't wait for a stuck parent at each exit.
        parent.is_stuck = time.monotonic() >= began + ASK_SECS


def _has_ended(process: TrackedProcess) -> bool:
    """Return whether a process has ended; wait for its last thread: the kernel may signal its children before."""
    if process.handle.has_exited():
        return True
    if procfs.is_ending(process.pid):
        return process.handle.has_exited(_KILLED_SECS)
    # The state is also X if the process was reaped since the lines above.
    return process.state in "ZX" and process.handle.has_exited(_LAST_THREAD_SECS)
