"""The processes of a server that is watched from outside: which they are, where it listens, and how they are now."""

from __future__ import annotations

import ipaddress
import os
import socket
import time
from collections.abc import Iterable

import psutil

from sglang_crashkit.capture.pyspy import sample_all
from sglang_crashkit.capture.server_arguments import port_of, serves_tls
from sglang_crashkit.kernel import procfs
from sglang_crashkit.kernel.discovery import FoundProcess, find_processes
from sglang_crashkit.kernel.pidfd import ProcessHandle
from sglang_crashkit.kernel.sglang_command import runs_sglang
from sglang_crashkit.model.stacks import Frame, main_thread
from sglang_crashkit.watch.deaths import Death, DeathWatch
from sglang_crashkit.watch.health_probe import Address
from sglang_crashkit.watch.standstill import RankLook

_TICKS_PER_SEC = os.sysconf("SC_CLK_TCK")
#: The longest that one round of stacks may take, in seconds.
_STACKS_SECS = 4.0
#: From one search for its processes to the next, in seconds: until this long after the first rank was seen, and
#: afterwards.
_SEARCH_SECS, _SEARCH_SELDOM_SECS, _SETTLED_SECS = 2.0, 30.0, 60.0
#: What its workers are called; the kit's own processes are no part of it.
_TITLE, _KIT = "sglang::", "sglang::crash"
_LOOPBACK = "127.0.0.1"


class WatchedServer:
    """One server on this host.

    Args:
        pid: any of its processes.

    Attributes:
        pid: its main process.
        start_ticks: start time of that; see `procfs.ProcStat`.
        arguments: the command line of that.
        processes: its processes, the main one included, as far as they were found by now.
        is_known: whether it is a server of SGLang, as far as can be seen.

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
        self._ranks: dict[int, FoundProcess] = {}
        self._searched_at = -_SEARCH_SELDOM_SECS
        self._settles_at: float | None = None
        self.processes = found
        self.start_ticks = self._handle.start_ticks
        self.is_known = bool(found)
        self._ends = DeathWatch(self.pid)
        self._ends.follow({self.pid: procfs.read_title(self.pid)} | _unreaped(self.pid))

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

    def look(self, *, stacks: bool) -> tuple[RankLook, ...]:
        """Return how its ranks are now.

        Args:
            stacks: take their stacks, too, without a pause.
        """
        self._search()
        frames = self._frames() if stacks and self._ranks else {}
        return tuple(self._look_at(rank, frames.get(rank.pid, ())) for rank in self._ranks.values())

    @property
    def deaths(self) -> tuple[Death, ...]:
        """Which of its processes have ended while they were followed, or had before and are not reaped; first first."""
        return tuple(self._ends.deaths)

    def wait(self, secs: float) -> None:
        """Wait for `secs` seconds, or until one of its processes has ended."""
        self._ends.wait(secs)

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
        """Let go of it."""
        self._handle.close()
        self._ends.close()

    def _search(self) -> None:
        now = time.monotonic()
        is_settled = self._settles_at is not None and now >= self._settles_at
        if now < self._searched_at + (_SEARCH_SELDOM_SECS if is_settled else _SEARCH_SECS):
            return
        self._searched_at = now
        found = find_processes(pid=self.pid, everything=True).processes
        self.processes = found or self.processes
        ranks = {one.pid: one for one in found if one.role == "scheduler" and one.way == "title"}
        # One that has ended is no longer found, which must not make it one that never was.
        self._ranks = {**self._ranks, **ranks}
        if ranks and self._settles_at is None:
            self._settles_at = now + _SETTLED_SECS
        self._ends.follow({one.pid: one.title for one in found if one.title.startswith(_TITLE)})

    def _frames(self) -> dict[int, tuple[Frame, ...]]:
        frames = {}
        for photograph in sample_all(self._ranks, _STACKS_SECS):
            thread = main_thread(photograph.threads or (), photograph.pid)
            frames[photograph.pid] = thread.frames if thread is not None else ()
        return frames

    def _look_at(self, rank: FoundProcess, frames: tuple[Frame, ...]) -> RankLook:
        at, stat = time.monotonic(), procfs.read_stat(rank.pid)
        if stat is None or stat.start_ticks != rank.start_ticks:
            return RankLook(at, rank.pid, rank.title, "X")
        switches = procfs.read_status(rank.pid).get("voluntary_ctxt_switches", "0")
        return RankLook(
            at,
            rank.pid,
            rank.title,
            stat.state,
            stat.cpu_ticks / _TICKS_PER_SEC,
            int(switches),
            procfs.read_wchan(rank.pid),
            frames,
        )


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
