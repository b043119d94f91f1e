"""Find the processes of the SGLang servers on this host, without SGLang's help.

SGLang sets the titles of its workers (see `titles`). A server may have no titled scheduler: setproctitle is missing,
its ranks have not set their titles yet, or it has encoders. Then its processes are the Python processes that run
SGLang, and the children that multiprocessing spawned for them.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from sglang_crashkit.kernel import procfs, titles

#: The role of the kit's crash handler, which watches the server and is not a part of it.
_HANDLER = "crash_handler"

#: Matches the module or script that Python runs: ``sglang.launch_server``, ``dynamo.sglang``, ``bin/sglang serve``.
_NAME = re.compile(r"(?<![a-z])sglang(?![a-z])")
_FILE = re.compile(r"(?:^|/)sglang/(?:launch_server|bench_\w+|srt/.+|cli/.+)\.py$")
#: Words in the names of programs without a model: routers and proxies, clients, tests, and this kit.
_NO_MODEL = re.compile(
    r"(?<![a-z])(?:crashkit|router|gateway|proxy|(?:launch_|mini_)?lb|clients?|bench_serving|tests?|eval\w*|check_env)"
    r"(?![a-z])"
)
_PYTHON = re.compile(r"(?:python|pypy)[\d.]*")

#: SGLang's two names of the option, the older name last.
_RENDEZVOUS = ("--dist-init-addr", "--nccl-init-addr")
#: The port of a server that was started without ``--port``.
_DEFAULT_PORT = 30000

#: How a process was recognized: by its title, or by its command line if no scheduler of its server has a title.
Way = Literal["title", "command line"]


@dataclass(frozen=True)
class Place:
    """Where Slurm runs a process: the job, and Slurm's name of the node.

    Several jobs of a user may share a node, and in tests several nodes share a machine. In a container of ``srun
    --container`` the environment does not name the node; `node` is empty then.
    """

    job_id: str
    node: str

    @classmethod
    def of_environ(cls, environ: Mapping[str, str]) -> Place | None:
        """Return the place that the environment of a job step names; None outside a step."""
        job_id, node = environ.get("SLURM_JOB_ID", ""), environ.get("SLURMD_NODENAME", "")
        return cls(job_id, node) if job_id and (node or "SLURM_CONTAINER" in environ) else None


@dataclass(frozen=True)
class FoundProcess:
    """A process of a server."""

    pid: int
    start_ticks: int  # see `procfs.ProcStat`
    title: str  # see `procfs.title_of`
    role: str  # as `titles.role_of` returns it
    ranks: Mapping[str, int]  # as `titles.rank_of` returns them
    server: int | None  # pid of the process that launched its server, None if that process has ended
    server_arguments: tuple[str, ...]  # the command line of that process, empty if it may not be read
    user: int  # the effective user id of the process
    way: Way

    @property
    def rendezvous(self) -> str | None:
        """The address at which the processes of its server on all hosts meet; None if its command line has none."""
        return value_of(self.server_arguments, *_RENDEZVOUS)

    @property
    def side(self) -> Literal["prefill", "decode"] | None:
        """The side of its server in a prefill and decode pair; None if the server is not in a pair."""
        value = value_of(self.server_arguments, "--disaggregation-mode")
        return "prefill" if value == "prefill" else "decode" if value == "decode" else None

    @property
    def port(self) -> int:
        """The port on which its server answers HTTP; SGLang's default if its command line has no valid port."""
        value = value_of(self.server_arguments, "--port") or ""
        return int(value) if value.isascii() and value.isdigit() and int(value) < 1 << 16 else _DEFAULT_PORT


def value_of(arguments: Sequence[str], *names: str) -> str | None:
    """Return the value of the first option on a command line that has one of `names`; None without a value."""
    for argument, following in zip(arguments, [*arguments, ""][1:], strict=True):
        name, equals, value = argument.partition("=")
        if name in names:
            return (value if equals else following) or None
    return None


@dataclass(frozen=True)
class Discovery:
    """What `find_processes` found on this host."""

    processes: tuple[FoundProcess, ...] = ()  # the requested processes, sorted by server and pid
    #: Pids of processes that were left out because they belong to another user, by user id.
    others: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    #: Pids of processes that were left out because they belong to another Slurm job or node, or to no job (None).
    elsewhere: Mapping[Place | None, tuple[int, ...]] = field(default_factory=dict)


def find_processes(
    *, pid: int | None = None, user: int | None = None, everything: bool = False, here: Place | None = None
) -> Discovery:
    """Find the schedulers on this host.

    Args:
        pid: any process of a server, or an ancestor of the server; None for all servers.
        user: the user whose processes are returned; None for all users.
        everything: also the servers' other processes: main process, tokenizers, detokenizer, controller.
        here: leave out the processes of another Slurm job or node. A process whose job is not known, as in some
            containers, is returned only if no process is known to belong to this job and node.
    """
    host = _Host()
    members = host.members_of(pid) if pid is not None else None
    wanted: dict[int, FoundProcess] = {}

    @functools.cache
    def place(pid: int) -> Place | None:
        found = place_of(pid) if here is not None else None
        # A container does not name its node.
        return here if here and found == Place(here.job_id, "") else found

    for candidates in host.groups(members, place):
        for one in host.find(candidates, everything=everything):
            wanted.setdefault(one.pid, one)
    wanted.pop(os.getpid(), None)
    mine: list[FoundProcess] = []
    others: dict[int, tuple[int, ...]] = {}
    elsewhere: dict[Place | None, tuple[int, ...]] = {}
    accepted = {here} if any(place(pid) == here for pid in wanted) else {here, None}
    for pid, one in wanted.items():
        is_mine = user in (None, one.user)
        if place(pid) in accepted and is_mine:
            mine.append(one)
        elif place(pid) in accepted:
            others[one.user] = (*others.get(one.user, ()), pid)
        elif is_mine:
            elsewhere[place(pid)] = (*elsewhere.get(place(pid), ()), pid)
    mine.sort(key=lambda one: (one.server or 0, one.pid))
    return Discovery(tuple(mine), others, elsewhere)


class _Entry:
    def __init__(self, stat: procfs.ProcStat) -> None:
        self.pid, self.ppid, self.start_ticks = stat.pid, stat.ppid, stat.start_ticks
        self.cmdline = procfs.read_cmdline(stat.pid)
        self.title = procfs.title_of(self.cmdline, stat.comm)
        self.is_titled = bool(self.cmdline) and self.cmdline[0].startswith(titles.PREFIX)
        self.is_scheduler = self.is_titled and titles.role_of(self.title) == "scheduler"

    @property
    def is_of_sglang(self) -> bool:
        return self.is_titled or titles.role_of(self.title) == "starting" or runs_sglang(self.cmdline)


class _Host:
    """All processes of this host, read once."""

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}
        self._children: dict[int, list[int]] = {}
        for name in os.listdir("/proc"):  # noqa: PTH208
            stat = procfs.read_stat(int(name)) if name.isdigit() else None
            # A process whose main thread has ended is a zombie in its stat line while its other threads run.
            if stat is not None and (stat.state not in "ZX" or stat.threads > 1):
                self._entries[stat.pid] = _Entry(stat)
                self._children.setdefault(stat.ppid, []).append(stat.pid)

    def groups(self, within: set[int] | None, place: Callable[[int], Place | None]) -> list[list[_Entry]]:
        """Return the processes that may be of SGLang, a group for each user and place."""
        groups: dict[tuple[int | None, Place | None], list[_Entry]] = {}
        for pid, entry in self._entries.items():
            if (within is None or pid in within) and (entry.is_titled or runs_sglang(entry.cmdline)):
                groups.setdefault((_user_of(pid), place(pid)), []).append(entry)
        return list(groups.values())

    def find(self, candidates: Sequence[_Entry], *, everything: bool) -> Iterator[FoundProcess]:
        schedulers = [entry for entry in candidates if entry.is_scheduler]
        # All entries, not only the candidates: the schedulers of a server may run as another user.
        titled = {self.server_of(pid) for pid, entry in self._entries.items() if entry.is_scheduler}
        roots = [entry.pid for entry in candidates if not entry.is_titled and self.server_of(entry.pid) not in titled]
        untitled = {pid for root in roots for pid in self._tree(root, lambda entry: entry.is_of_sglang)}
        yield from self._describe(untitled, "command line")
        chosen = {entry.pid for entry in schedulers}
        if everything:
            chosen |= {entry.pid for entry in candidates if entry.is_titled}
            chosen |= {server for entry in schedulers if (server := self.server_of(entry.pid)) is not None}
        yield from self._describe(chosen, "title")

    def server_of(self, pid: int) -> int | None:
        """Return the process that launched the server of `pid`: its topmost ancestor, or itself, that runs SGLang.

        A program that uses SGLang's Engine may have any name: then return the parent of the topmost titled process.
        """
        known = [
            one
            for one in map(self._entries.__getitem__, (pid, *self._above(pid)))
            if (one.is_titled and titles.role_of(one.title) != _HANDLER) or runs_sglang(one.cmdline)
        ]
        if not known:
            return None
        top = known[-1]
        if not top.is_titled:
            return top.pid
        parent = self._entries.get(top.ppid)
        return parent.pid if parent is not None and parent.pid != 1 and procfs.is_python(parent.pid) else None

    def members_of(self, pid: int) -> set[int]:
        """Return the processes of the server of `pid`, or `pid` and its descendants; empty if `pid` is gone."""
        if pid not in self._entries:
            return set()
        return set(self._tree(self.server_of(pid) or pid))

    def _above(self, pid: int) -> Iterator[int]:
        seen = {pid}
        parent = self._entries[pid].ppid
        # Entries are read one after the other: a pid that is recycled in between could make a cycle of parents.
        while parent in self._entries and parent not in seen:
            seen.add(parent)
            yield parent
            parent = self._entries[parent].ppid

    def _tree(self, root: int, belongs: Callable[[_Entry], bool] = lambda _entry: True) -> Iterator[int]:
        waiting, seen = [root], {root}
        while waiting:
            pid = waiting.pop()
            yield pid
            below = [one for one in self._children.get(pid, []) if one not in seen and belongs(self._entries[one])]
            seen.update(below)
            waiting += below

    def _describe(self, pids: set[int], way: Way) -> Iterator[FoundProcess]:
        servers = {pid: self.server_of(pid) for pid in pids}
        for pid in pids:
            entry = self._entries[pid]
            # Only its descendants show that a program which uses SGLang's Engine launched a server.
            server = pid if pid in servers.values() else servers[pid]
            role = titles.role_of(entry.title, is_root=pid == server)
            user = _user_of(pid)
            if role == _HANDLER or user is None:
                continue
            arguments = procfs.read_cmdline(server) if server is not None else []
            ranks = titles.rank_of(entry.title)
            yield FoundProcess(pid, entry.start_ticks, entry.title, role, ranks, server, tuple(arguments), user, way)


def _user_of(pid: int) -> int | None:
    """Return the effective user id of `pid`, None when it is gone."""
    words = procfs.read_status(pid).get("Uid", "").split()
    return int(words[1]) if len(words) > 1 else None


def runs_sglang(cmdline: Sequence[str]) -> bool:
    """Say whether a command line is of a Python process whose module or script is SGLang's or has SGLang's name."""
    words = cmdline[0].split() if len(cmdline) == 1 else cmdline
    if not words or not _PYTHON.fullmatch(Path(words[0]).name):
        return False
    option, program = procfs.program_of(words)
    # The folder of a script is no evidence, except the folder of the sglang package itself.
    name = Path(program).name
    return option != "-c" and bool(_NAME.search(name) or _FILE.search(program)) and not _NO_MODEL.search(name)


def place_of(pid: int) -> Place | None:
    """Return the place of process `pid`; None if neither its environment nor an ancestor's names a place.

    A process that sets its title overwrites the environment that ``/proc`` shows. So the nearest ancestor whose
    environment names a place gives the answer.
    """
    seen: set[int] = set()
    while pid > 1 and pid not in seen:
        seen.add(pid)
        if (place := Place.of_environ(procfs.read_environ(pid))) is not None:
            return place
        stat = procfs.read_stat(pid)
        pid = stat.ppid if stat is not None else 0
    return None
