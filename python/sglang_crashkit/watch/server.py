"""The processes of a server that is watched from outside: which they are, where it listens, and how they are now."""

from __future__ import annotations

import ipaddress
import select
import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import psutil

from sglang_crashkit.analysis.verdict import FailureEvent, order_failures
from sglang_crashkit.collect.observing import observe
from sglang_crashkit.incident.summary import mapping_of, mappings_of
from sglang_crashkit.kernel import procfs
from sglang_crashkit.kernel.discovery import FoundProcess, find_processes, runs_sglang
from sglang_crashkit.kernel.pidfd import ExitStatus, ProcessHandle
from sglang_crashkit.kernel.server_arguments import port_of, serves_tls
from sglang_crashkit.model.sample import Sample
from sglang_crashkit.watch.health import Address

#: The longest that one round of stacks may take, in seconds.
_STACKS_SECS = 4.0
#: From one search for its processes to the next, in seconds: until this long after the first rank was seen, and
#: afterwards.
_SEARCH_SECS, _SEARCH_SELDOM_SECS, _SETTLED_SECS = 2.0, 30.0, 60.0
#: What its workers are called; the kit's own processes are no part of it.
_TITLE, _KIT = "sglang::", "sglang::crash"
_LOOPBACK = "127.0.0.1"
#: Without these no request is answered.
_NEEDED = frozenset({"server", "scheduler", "detokenizer", "detokenizer_router", "data_parallel_controller"})
#: Whoever kills all processes of a server has sent the last signal this much after the first end, in seconds.
_ALL_KILLED_SECS = 0.05


@dataclass(frozen=True)
class Death:
    """The end of one process."""

    pid: int
    title: str
    at: float  # when it was noticed, in seconds of the monotonic clock
    end: ExitStatus  # how it ended, as far as the kernel tells
    alone: bool = True  # the others were not about to end

    def __str__(self) -> str:
        who = f"{self.title} (pid {self.pid})"
        if self.end.signal is not None:
            return f"{who} was killed by {self.end.signal}"
        return f"{who} ended " + ("by itself" if self.end.code is None else f"with exit status {self.end.code}")


def first_death(document: Mapping[str, Any]) -> Death | None:
    """Return whose end an incident's document names as the first failure, None where it does not name one.

    What the handler did not see of its end is unknown.
    """
    first = mapping_of(mapping_of(document.get("verdict")).get("first_failure"))
    pid, title = first.get("pid"), first.get("title")
    if not isinstance(pid, int) or not isinstance(title, str):
        return None
    found = [mapping_of(one.get("exit")) for one in mappings_of(document.get("processes")) if one.get("pid") == pid]
    code, name = (found[0].get("code"), found[0].get("signal")) if found else (None, None)
    end = ExitStatus(code if isinstance(code, int) else None, name if isinstance(name, str) else None)
    return Death(pid, title, time.monotonic(), end)


class DeathWatch:
    """Sees processes end, one after the other, without being their parent.

    Which one was first is known for a moment only: who started it reaps it, and ends the others. What tells a failure
    from an end that was wanted is how it ended, and whether the others were still meant to live when it did: whoever
    ends a server kills all of them within a few milliseconds. Where `root`, who started them, ended in the same moment
    as another, it was not the first.
    """

    def __init__(self, root: int) -> None:
        self.deaths: list[Death] = []  # who has ended, the first one first
        self._root = root
        self._alive: dict[int, tuple[ProcessHandle, str]] = {}
        self._known: set[tuple[int, int]] = set()

    def follow(self, processes: Mapping[int, str]) -> None:
        """Follow more processes, given with their titles; those that are followed already may be among them."""
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
        ends = dict(ended)
        # What started them ends for the end of another.
        events = [FailureEvent(pid, at, "exit", is_answer=pid == self._root) for pid in ends]
        for event in order_failures(events):
            handle, title = followed[event.pid]
            handle.close()
            self.deaths.append(Death(event.pid, title, at, ends[event.pid], alone=alone and bool(self._alive)))

    def close(self) -> None:
        """Follow no more processes."""
        for handle, _title in self._alive.values():
            handle.close()
        self._alive.clear()


class WatchedServer:
    """The server on this host that process `pid` belongs to.

    Raises:
        ProcessLookupError: there is no such process.
        OSError: it cannot be watched.
    """

    def __init__(self, pid: int) -> None:
        found = find_processes(pid=pid, everything=True).processes
        roots = {one.server for one in found if one.server is not None}
        self.pid = roots.pop() if len(roots) == 1 else pid
        self._handle = ProcessHandle(self.pid)
        self.arguments = procfs.read_cmdline(self.pid)
        self._needed: dict[int, FoundProcess] = {}
        self._searched_at = -_SEARCH_SELDOM_SECS
        self._settles_at: float | None = None
        self.processes = found
        self.is_known = bool(found)
        #: Of its processes, also of those that had ended before and are not reaped.
        self.ends = DeathWatch(self.pid)
        self.ends.follow({self.pid: procfs.read_title(self.pid)} | _unreaped(self.pid))

    @property
    def is_gone(self) -> bool:
        """Whether its main process has ended."""
        return self._handle.has_exited()

    @property
    def state(self) -> str:
        """State letter of its main process."""
        stat = procfs.read_stat(self.pid)
        return stat.state if stat is not None else "X"

    @property
    def serves_http(self) -> bool:
        """Whether it answers HTTP, or will: a program of its own that uses SGLang's Engine need not."""
        return runs_sglang(self.arguments) or self.address() is not None

    def sample(self, *, stacks: bool) -> tuple[Sample, ...]:
        """Return what its ranks, and the processes that they need, are doing now."""
        self._search()
        found = observe([*self._needed.values()], "", _STACKS_SECS if stacks else 0.0)
        return tuple(one if one.state else replace(one, state="X") for one in found)

    def address(self) -> Address | None:
        """Return where it answers HTTP, None where it does not listen (yet)."""
        ports = sorted(port for port, pid in _listening() if pid == self.pid)
        port = port_of(self.arguments)
        if port not in ports:
            # A program of its own that uses SGLang may serve anywhere; which of several it is, cannot be told.
            if len(ports) != 1:
                return None
            port = ports[0]
        return Address("https" if serves_tls(self.arguments) else "http", _LOOPBACK, port)

    def close(self) -> None:
        """Close what is held open of it."""
        self._handle.close()
        self.ends.close()

    def _search(self) -> None:
        now = time.monotonic()
        is_settled = self._settles_at is not None and now >= self._settles_at
        if now < self._searched_at + (_SEARCH_SELDOM_SECS if is_settled else _SEARCH_SECS):
            return
        self._searched_at = now
        found = find_processes(pid=self.pid, everything=True).processes
        self.processes = found or self.processes
        needed = {one.pid: one for one in found if (one.role in _NEEDED and one.way == "title") or one.pid == self.pid}
        # One that has ended is no longer found, which must not make it one that never was.
        self._needed = {**self._needed, **needed}
        if self._settles_at is None and any(one.role == "scheduler" for one in needed.values()):
            self._settles_at = now + _SETTLED_SECS
        self.ends.follow({one.pid: one.title for one in found if one.title.startswith(_TITLE)})


def _unreaped(server: int) -> dict[int, str]:
    """Return the workers below a server that have ended and were not reaped: what is left of their titles by pid."""
    stats = [procfs.read_stat(pid) for pid in procfs.TreeScanner(server).scan() - {server}]
    dead = [stat for stat in stats if stat is not None and stat.state == "Z" and stat.threads <= 1]
    return {stat.pid: stat.comm for stat in dead if stat.comm.startswith(_TITLE) and not stat.comm.startswith(_KIT)}


def find_listener(address: Address) -> int | None:
    """Return a process on this host that listens at `address`, None where none is known.

    Another user's is not known without the permission to see its descriptors.
    """
    if not is_here(address):
        return None
    return next((pid for port, pid in _listening() if port == address.port), None)


def is_here(address: Address) -> bool:
    """Say whether `address` is on this host, as far as names can be looked up."""
    try:
        wanted = {str(info[4][0]) for info in socket.getaddrinfo(address.host, None, type=socket.SOCK_STREAM)}
    except OSError:
        return False
    own = {each.address.partition("%")[0] for some in psutil.net_if_addrs().values() for each in some}
    return bool(wanted & own) or any(ipaddress.ip_address(one).is_unspecified for one in wanted)


def _listening() -> Iterable[tuple[int, int]]:
    """Yield port and process of what listens for TCP connections on this host."""
    for connection in psutil.net_connections("tcp"):
        address = connection.laddr
        if connection.status == psutil.CONN_LISTEN and connection.pid is not None and address:
            yield address.port, connection.pid
