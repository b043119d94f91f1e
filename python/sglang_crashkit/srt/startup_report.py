"""What there is to say of the ranks of a server that starts: who died and of what, who is silent and in what state."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from typing import Any

from sglang_crashkit.kernel import cgroup, procfs, titles
from sglang_crashkit.kernel.pidfd import ExitStatus, ProcessHandle, signal_name

_MOST_CHILDREN = 16
_PREFIX = "sglang::"


class Member:
    """A process that is waited for or watched, with the pipe that it will say "ready" on.

    Args:
        name: what it is called, such as ``Rank 1 scheduler``; empty where only its title tells.
        process: ``pid``, ``sentinel`` and ``exitcode`` as of `multiprocessing.Process`; None where it is not known.
        reader: ``recv`` and ``fileno`` as of `multiprocessing.connection.Connection`; None where nothing is expected.

    Attributes:
        info: what it sent when it was ready.
        ready: it said so, or nothing is expected of it.
        exit: how it ended.
        title: its title, once SGLang has set one; the last known one after its death.
    """

    def __init__(self, name: str, process: Any, reader: Any) -> None:
        self.name = name
        self.process = process
        self.reader = reader
        self.info: Any = None
        self.ready = reader is None
        self.exit = ExitStatus()
        self.title = ""
        self._handle: ProcessHandle | None = None
        self._oom: cgroup.OomCounter | None = None
        if process is not None and process.pid is not None:
            # Without descriptors left the sentinel has to do.
            with contextlib.suppress(OSError):
                self._handle = ProcessHandle(process.pid)
            self._oom = cgroup.find_counter(process.pid)

    @property
    def has_title(self) -> bool:
        """Whether SGLang's title of the process is known, or will never be."""
        return bool(self.title) or self.process is None

    def look_up_title(self) -> None:
        """Read the title, which SGLang sets some seconds after the start and which is gone with the process."""
        if not self.has_title:
            # Not the executable's name, which a dying process still has: the title's first 15 bytes, without a rank.
            title = procfs.title_of(procfs.read_cmdline(self.process.pid), "")
            self.title = title if title.startswith(_PREFIX) else ""

    def signs_of_death(self) -> list[Any]:
        """Return what becomes readable when it ends."""
        if self.process is None:
            return []
        return [self.process.sentinel] + ([self._handle] if self._handle is not None else [])

    def label(self) -> str:
        """Return its name, title and pid as far as they are known."""
        if self.process is None:
            return self.name
        pid = f"pid {self.process.pid}"
        if self.name and titles.role_of(self.title) in ("scheduler", "helper"):
            return f"{self.name} ({f'{self.title}, ' if self.title else ''}{pid})"
        return f"{self.title or 'a process of the server'} ({pid})"

    def short(self) -> str:
        """Return the first words of `label`."""
        return self.label().partition(" (")[0]

    def read_exit(self, patience_secs: float) -> None:
        """Learn how it ended without reaping it: the crash handler reads the same of the zombie."""
        deadline = time.monotonic() + patience_secs
        while not self.exit.known:
            self.exit = self._peek()
            if time.monotonic() >= deadline:
                break
            if not self.exit.known:
                time.sleep(0.001)

    def _peek(self) -> ExitStatus:
        try:
            result = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        except ChildProcessError:
            # Another's child, or reaped already by whoever asked `multiprocessing` for its exit code.
            return self._remembered() or (self._handle.exit_status() if self._handle else ExitStatus())
        if result is None:
            return ExitStatus()
        if result.si_code == os.CLD_EXITED:
            return ExitStatus(code=result.si_status)
        return ExitStatus(signal=signal_name(result.si_status), core_dumped=result.si_code == os.CLD_DUMPED)

    def _remembered(self) -> ExitStatus | None:
        code = self.process.exitcode
        return ExitStatus.from_exit_code(code) if code is not None else None

    @property
    def exit_code(self) -> int | None:
        """Its exit code as `multiprocessing` writes it, negative for a signal; None where nobody knows."""
        if self.exit.signal is None:
            return self.exit.code
        number = getattr(signal, self.exit.signal, None)
        return -int(number) if number is not None else -int(self.exit.signal.removeprefix("SIG"))

    def how_it_ended(self) -> str:
        """Return its end in words, with what the memory cgroup's counter says of a SIGKILL."""
        if not self.exit.known:
            return "ended, nobody can tell how"
        if self.exit.signal is None:
            return f"ended with exit status {self.exit.code}"
        core = ", the kernel wrote a core file" if self.exit.core_dumped else ""
        if self.exit.signal != "SIGKILL":
            return f"was killed by {self.exit.signal}{core}"
        kills = self._oom.grown_by() if self._oom is not None else None
        if kills is None or self._oom is None:
            return "was killed by SIGKILL (no OOM counter could be read; `dmesg -T | grep -i oom` may tell)"
        if kills <= 0:
            return "was killed by SIGKILL (its memory cgroup counts no OOM kill since the wait began)"
        return f"was killed by SIGKILL ({self._oom.path} counts {kills} OOM kill(s) since the wait began)"

    def state(self) -> str:
        """Return what ``/proc`` says that it is doing."""
        if self.process is None:
            return "its process is not known"
        status = procfs.read_status(self.process.pid)
        if not status:
            return "gone"
        wchan = procfs.read_wchan(self.process.pid)
        parts = [status.get("State", "?") + (f" in {wchan}" if wchan else "")]
        parts += [f"{name} {status[name]}" for name in ("Threads", "VmRSS") if name in status]
        if titles.role_of(self.title) == "data_parallel_controller":
            parts.append(f"below it {_schedulers_below(self.process.pid)}")
        return ", ".join(parts)

    def let_go(self) -> None:
        """Close the pidfd."""
        if self._handle is not None:
            self._handle.close()
            self._handle = None


def of_deaths(dead: Sequence[Member], first: int, seconds: Sequence[float], living: Sequence[Member]) -> str:
    """Describe deaths during the start.

    Args:
        dead: the one seen first first.
        first: how many of them were seen at the same moment, before the others.
        seconds: when each was seen, since the wait began.
        living: the others.
    """
    names = [member.short() for member in dead]
    codes = ", ".join(str(member.exit_code) for member in dead)
    subject = names[0] if len(dead) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
    lines = [f"{subject} died during initialization (exit code: {codes})."]
    for position, (member, when) in enumerate(zip(dead, seconds, strict=True)):
        order = ""
        if len(dead) > 1 and position < first:
            order = ", first" if first == 1 else ", at the same moment as the first"
        lines.append(f"{member.label()} {member.how_it_ended()}, {when:.1f} s after the wait began{order}.")
    lines += _who_is_ready(living)
    return " ".join(lines)


def of_silence(silent: Sequence[Member], ready: Sequence[Member], seconds: float) -> str:
    """Describe whom is waited for, and in what state they are."""
    total = len(silent) + len(ready)
    states = "; ".join(f"{member.label()}: {member.state()}" for member in silent)
    return f"not ready after {seconds:.0f} s: {len(silent)} of {total} ({states}); ready: {_names(ready)}"


def of_timeout(silent: Sequence[Member], ready: Sequence[Member], seconds: float) -> str:
    """Describe the end of the time that the server had to start."""
    return (
        f"{_names(silent)} not ready within {seconds:g} s (SGLANG_CRASHKIT_STARTUP_TIMEOUT_SECS). "
        + " ".join(f"{member.label()}: {member.state()}." for member in silent)
        + f" Ready: {_names([member for member in ready if member.reader is not None])}."
    )


def _who_is_ready(members: Sequence[Member]) -> list[str]:
    waited = [member for member in members if member.reader is not None]
    if not waited:
        return []
    ready = [member for member in waited if member.ready]
    return [f"Ready: {_names(ready)}; not ready: {_names([member for member in waited if not member.ready])}."]


def _names(members: Sequence[Member]) -> str:
    return ", ".join(member.short() for member in members) or "none"


def _schedulers_below(pid: int) -> str:
    found = []
    for child in sorted(procfs.TreeScanner(pid).scan() - {pid}):
        title, stat = procfs.read_title(child), procfs.read_stat(child)
        if stat is not None and title.startswith(f"{_PREFIX}scheduler"):
            found.append(f"{title} (pid {child}, {stat.state})")
    return ", ".join(found[:_MOST_CHILDREN]) or "no scheduler has its title yet"
