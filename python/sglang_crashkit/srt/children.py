"""Processes that this one started for its server, and one wait for the ends of all of them.

Nothing else in SGLang's processes waits for such an end. Each is known by pid and start time. What an end means is up
to the phase:

- `startup.Startup`: ranks that are to say that they are ready. An end is an error, which names who died and of what.
- `entrypoints.engine.Following`: the schedulers of a node of a rank above 0, which ends with any of them.
- `supervisor.Serving`: a server program that serves.
"""

from __future__ import annotations

import contextlib
import threading
import time
from _thread import allocate_lock, start_new_thread
from collections.abc import Collection, Iterable, Sequence
from multiprocessing import connection
from typing import Any

from sglang_crashkit.kernel import cgroup, procfs, signals, titles
from sglang_crashkit.kernel.pidfd import ExitStatus, ProcessHandle, wait_status_of

#: A child whose end no descriptor tells is looked at so often, and so is all that has no event. Seconds.
LOOK_SECS = 1.0
#: How a child ended is known this long after its end at the latest, in seconds.
STATUS_SECS = 1.0
#: A title that is not set yet is looked for so often, in seconds.
TITLE_SECS = 0.25
_PREFIX = "sglang::"
#: It is read within this time, in seconds, or not at all: the read waits for the process where its driver hangs.
_READ_SECS = 1.0
_NEVER = float("inf")


class Clock:
    """The time and all waiting; a test has its own."""

    def now(self) -> float:
        """Return the time by the monotonic clock, in seconds."""
        return time.monotonic()

    def wait(self, descriptors: Collection[int], seconds: float | None) -> set[int]:
        """Return which descriptors are readable, as soon as one is; None waits for ever."""
        return set(connection.wait(list(descriptors), seconds))  # type: ignore[arg-type]

    def join(self, thread: threading.Thread, seconds: float) -> None:
        """Wait for the end of a thread."""
        thread.join(seconds)


class Child:
    """A process that is watched.

    Args:
        name: what it is called, such as ``Rank 1 scheduler``; empty where only its title tells.
        process: ``pid``, ``sentinel`` and ``exitcode`` as of `multiprocessing.Process`; the pid of another's child;
            None where it is not known.
        reader: ``recv`` and ``fileno`` as of `multiprocessing.connection.Connection`, for the pipe that it will say
            "ready" on; None where nothing is expected.
        title: its title, where it is known.

    Attributes:
        info: what it sent when it was ready.
        ready: it said so, or nothing is expected of it.
        title: its title, once SGLang has set one; the last known one after its death.
        exit: how it ended; see `learn_exit`.
        ended_at: when its end was noticed, by the clock of who watches; infinite before.
    """

    def __init__(self, name: str = "", process: Any = None, reader: Any = None, title: str = "") -> None:
        self.name, self.reader, self.title = name, reader, title
        self.process = None if isinstance(process, int) else process
        self.pid: int | None = process if isinstance(process, int) else getattr(process, "pid", None)
        stat = procfs.read_stat(self.pid) if self.pid is not None else None
        self.start_ticks = stat.start_ticks if stat is not None else 0
        self.info: Any = None
        self.ready = reader is None
        self.exit, self.ended_at = ExitStatus(), _NEVER
        self._oom: cgroup.OomCounter | None = None
        self._is_held = self._gave_up_title = False
        self._handle: ProcessHandle | None = None

    def hold(self) -> bool:
        """Open a pidfd, once, where the kernel gives one; say whether the process was there then, dead or alive."""
        if not self._is_held and self.pid is not None and self.stat() is not None:
            self._is_held = True
            with contextlib.suppress(OSError):
                self._handle = ProcessHandle(self.pid)
            if self._handle is not None and self._handle.start_ticks != self.start_ticks:
                self.close()
            self._oom = cgroup.find_counter(self.pid)
        return self._is_held

    def close(self) -> None:
        """Close the pidfd."""
        if self._handle is not None:
            self._handle.close()
            self._handle = None

    def descriptors(self) -> list[int]:
        """Return the descriptors that become readable when it ends; the sentinel does where there is no pidfd."""
        sentinel = [self.process.sentinel] if self.process is not None else []
        return sentinel + ([self._handle.fd] if self._handle is not None else [])

    def stat(self) -> procfs.ProcStat | None:
        """Return what the kernel says of it, dead or alive; None where it is gone."""
        stat = procfs.read_stat(self.pid) if self.pid is not None else None
        return stat if stat is not None and stat.start_ticks == self.start_ticks else None

    def has_ended(self) -> bool:
        """Say whether it has ended, reaped or not, where no descriptor tells."""
        stat = self.stat()
        return stat is None or (stat.state in "ZX" and stat.threads <= 1)

    def tell(self) -> None:
        """Send it SIGQUIT, on which it saves its requests and ends."""
        if self._handle is not None:
            signals.tell(self._handle)

    def learn_exit(self) -> ExitStatus:
        """Return how it ended, as far as that is known, without reaping it: the crash handler reads the zombie."""
        if not self.exit.known and self.pid is not None:
            try:
                self.exit = ExitStatus.from_wait_status(wait_status_of(self.pid, self.process))
            except ChildProcessError:
                if self._handle is not None:
                    self.exit = self._handle.exit_status()
            except ValueError:
                # It lives: its end is noticed a moment before the kernel tells how it ended.
                pass
        return self.exit

    @property
    def has_title(self) -> bool:
        """Whether its title is known, or will never be."""
        return bool(self.title) or self.pid is None or self._gave_up_title

    def look_up_title(self) -> None:
        """Read the title, which SGLang sets some seconds after the start and which is gone with the process."""
        stat = None if self.has_title else self.stat()
        if stat is not None and stat.comm.startswith(_PREFIX):
            title = read_title(stat.pid)
            self._gave_up_title = title is None
            self.title = title if title is not None and title.startswith(_PREFIX) else ""

    def label(self) -> str:
        """Return its name, title and pid as far as they are known."""
        if self.pid is None:
            return self.name
        pid = f"pid {self.pid}"
        if self.name and titles.role_of(self.title) in ("scheduler", "helper"):
            return f"{self.name} ({f'{self.title}, ' if self.title else ''}{pid})"
        return f"{self.title or 'a process of the server'} ({pid})"

    def how_it_ended(self) -> str:
        """Return its end in words, with what the memory cgroup's counter says of a SIGKILL."""
        if not self.exit.known:
            return "ended, not known how"
        if self.exit.signal is None:
            return f"ended with exit status {self.exit.code}"
        if self.exit.signal != "SIGKILL":
            core = ", the kernel wrote a core file" if self.exit.core_dumped else ""
            return f"was killed by {self.exit.signal}{core}"
        kills = self._oom.grown_by() if self._oom is not None else None
        if kills is None or self._oom is None:
            what = "no OOM counter could be read; `dmesg -T | grep -i oom` may tell"
        elif kills <= 0:
            what = "its memory cgroup counts no OOM kill since the wait began"
        else:
            what = f"{self._oom.path} counts {kills} OOM kill(s) since the wait began"
        return f"was killed by SIGKILL ({what})"


def read_title(pid: int) -> str | None:
    """Return the title of a process, empty where it is gone; None where it does not come in time.

    The name that the kernel keeps of it would always come, but without the rank.
    """
    found, is_read = [""], allocate_lock()
    is_read.acquire()

    def read() -> None:
        found[0] = procfs.title_of(procfs.read_cmdline(pid), "")
        is_read.release()

    try:
        # Not threading.Thread: its start waits for a lock that the code which a signal interrupted may hold.
        start_new_thread(read, ())
    except RuntimeError:
        return None
    return found[0] if is_read.acquire(timeout=_READ_SECS) else None


class Supervisor:
    """Some children, and one wait for the end of any of them.

    Args:
        children: who is watched; may grow.
        clock: tells the time, and waits.
    """

    def __init__(self, children: Sequence[Child] = (), clock: Clock | None = None) -> None:
        self.children = children
        self.clock = clock or Clock()
        for child in list(children):
            child.hold()

    def living(self) -> list[Child]:
        """Return the children whose end was not noticed yet."""
        return [child for child in list(self.children) if child.ended_at == _NEVER]

    def ended(self) -> list[Child]:
        """Return the others, in the order of their ends."""
        ended = [child for child in list(self.children) if child.ended_at < _NEVER]
        return sorted(ended, key=lambda child: child.ended_at)

    def wait(self, seconds: float | None, others: Iterable[int] = ()) -> set[int]:
        """Wait until a child ends, or one of `others` is readable; note the ends, and return which of `others` are.

        It takes `seconds` at most; None waits for ever.
        """
        living, others = self.living(), set(others)
        unseen = [child for child in living if child.pid is not None and not child.descriptors()]
        if unseen:
            gone = any(child.has_ended() for child in unseen)
            seconds = 0.0 if gone else min(LOOK_SECS, LOOK_SECS if seconds is None else seconds)
        readable = self.clock.wait(others | {sign for child in living for sign in child.descriptors()}, seconds)
        now = self.clock.now()
        for child in living:
            if readable.intersection(child.descriptors()) or (child in unseen and child.has_ended()):
                child.ended_at = now
        return others & readable

    def wait_for_all(self, seconds: float) -> None:
        """Wait until all children have ended, at most `seconds`."""
        deadline = self.clock.now() + seconds
        while self.living() and (left := deadline - self.clock.now()) > 0:
            self.wait(left)

    def learn_exits(self, children: Iterable[Child], seconds: float) -> None:
        """Learn how `children` ended; the kernel tells it a moment after the end."""
        deadline = self.clock.now() + seconds
        for child in children:
            while not child.learn_exit().known and self.clock.now() < deadline:
                self.clock.wait((), 0.001)

    def close(self) -> None:
        """Close all pidfds."""
        for child in self.children:
            child.close()
