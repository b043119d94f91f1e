"""Find a server's processes in ``/proc`` and end them, and only them.

A process is identified by its pid and its start time, so that no other process with a reused pid is ever signalled.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
POLL_S = 0.05
_GONE = (FileNotFoundError, ProcessLookupError)


@dataclass(frozen=True)
class Process:
    """One process, as ``/proc/<pid>/stat`` has it."""

    pid: int
    started: int  # in clock ticks since boot
    parent: int
    session: int
    state: str  # one letter; Z of a process that is dead and not yet reaped

    @property
    def key(self) -> tuple[int, int]:
        """Identifies the process until the machine is restarted."""
        return self.pid, self.started


def read_process(pid: int) -> Process | None:
    """Return the process `pid`, or None if it is gone."""
    try:
        text = (PROC / str(pid) / "stat").read_text(errors="replace")
    except _GONE:
        return None
    # The name in parentheses may hold spaces and parentheses of its own.
    fields = text[text.rindex(")") + 2 :].split()
    return Process(pid, int(fields[19]), int(fields[1]), int(fields[3]), fields[0])


def all_processes() -> list[Process]:
    """Return every process of the machine."""
    found = (read_process(int(entry.name)) for entry in PROC.iterdir() if entry.name.isdigit())
    return [process for process in found if process is not None]


def tree_of(root: int) -> list[Process]:
    """Return the living processes in the tree of `root`, with `root` itself, and in its session.

    Children whose parent has died are found by their session.
    """
    everything = all_processes()
    pids = {process.pid for process in everything if root in (process.pid, process.session)}
    while more := {process.pid for process in everything if process.parent in pids} - pids:
        pids |= more
    return sorted((p for p in everything if p.pid in pids and p.state != "Z"), key=lambda p: p.pid)


def title_of(pid: int) -> str:
    """Return the title or command line of `pid`; empty when it is gone."""
    try:
        raw = (PROC / str(pid) / "cmdline").read_bytes()
    except _GONE:
        return ""
    return raw.replace(b"\0", b" ").decode(errors="replace").strip()


def watchers_of(pids: Iterable[int]) -> list[Process]:
    """Return the processes, other than `pids`, that hold a pidfd of one of `pids`."""
    watched = set(pids)
    return [p for p in all_processes() if p.pid not in watched and watched & _watched_by(p.pid)]


def _watched_by(pid: int) -> set[int]:
    pids = set()
    folder = PROC / str(pid)
    with suppress(*_GONE, PermissionError):  # gone meanwhile, or another user's
        for descriptor in (folder / "fd").iterdir():
            if str(descriptor.readlink()) == "anon_inode:[pidfd]":
                text = (folder / "fdinfo" / descriptor.name).read_text()
                pids |= {int(line[4:]) for line in text.splitlines() if line.startswith("Pid:")}
    return pids


def alive(processes: Iterable[Process]) -> list[Process]:
    """Return those of `processes` that still run."""
    return [one for one in processes if (now := read_process(one.pid)) and now.key == one.key and now.state != "Z"]


def wait_gone(processes: Iterable[Process], timeout_s: float) -> list[Process]:
    """Wait up to `timeout_s` seconds for `processes` to end; return those that have not."""
    deadline, left = time.monotonic() + timeout_s, list(processes)
    while (left := alive(left)) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return left


def send(process: Process, number: signal.Signals) -> None:
    """Send a signal to exactly this process; do nothing if it is gone."""
    with suppress(ProcessLookupError):
        descriptor = os.pidfd_open(process.pid)
        try:
            if (now := read_process(process.pid)) and now.key == process.key:
                signal.pidfd_send_signal(descriptor, number)
        finally:
            os.close(descriptor)
