"""Find the processes of the SGLang servers on this host, without SGLang's help.

SGLang titles its workers (see `titles`). Where a server has no titled scheduler, because setproctitle is missing, the
ranks have not got that far, or it has encoders, the Python processes that run SGLang are taken, with those that
multiprocessing spawned for them.
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

#: The kit's own are no part of the server; its handler watches the server from beside it.
_HANDLER = "crash_handler"

#: In the module or script that Python runs, as in ``sglang.launch_server``, ``dynamo.sglang`` and ``bin/sglang serve``.
_NAME = re.compile(r"(?<![a-z])sglang(?![a-z])")
_FILE = re.compile(r"(?:^|/)sglang/(?:launch_server|bench_\w+|srt/.+|cli/.+)\.py$")
#: Words in the name of what has no model: what passes requests on, clients, tests, and this kit.
_NO_MODEL = re.compile(
    r"(?<![a-z])(?:crashkit|router|gateway|proxy|(?:launch_|mini_)?lb|clients?|bench_serving|tests?|eval\w*|check_env)"
    r"(?![a-z])"
)
_PYTHON = re.compile(r"(?:python|pypy)[\d.]*")

#: SGLang's names of the option, the older one last.
_RENDEZVOUS = ("--dist-init-addr", "--nccl-init-addr")
#: What a server listens on that names no port.
_DEFAULT_PORT = 30000

#: How a process was known: by its title, or by its command line where no scheduler has one.
Way = Literal["title", "command line"]


@dataclass(frozen=True)
class Place:
    """Where Slurm has put a process: the job, and the node by Slurm's name for it.

    Several jobs of one user may share a node, and in tests several nodes a machine. In a container of ``srun
    --container`` nothing names the node, which is empty then.
    """

    job_id: str
    node: str

    @classmethod
    def of_environ(cls, environ: Mapping[str, str]) -> Place | None:
        """Return the place that a step's environment names, None outside of a step."""
        job_id, node = environ.get("SLURM_JOB_ID", ""), environ.get("SLURMD_NODENAME", "")
        return cls(job_id, node) if job_id and (node or "SLURM_CONTAINER" in environ) else None


@dataclass(frozen=True)
class FoundProcess:
    """A process of a server."""

    pid: int
    start_ticks: int  # see `procfs.ProcStat`
    title: str  # see `procfs.title_of`
    role: str  # as `titles.role_of` has it
    ranks: Mapping[str, int]  # as `titles.rank_of` has them
    server: int | None  # pid of the process that launched its server, None where that has ended
    server_arguments: tuple[str, ...]  # the command line of that process, empty where it may not be read
    user: int  # the user id that it runs as
    way: Way

    @property
    def rendezvous(self) -> str | None:
        """The address at which the processes of its server on all hosts meet, None where none is named."""
        return value_of(self.server_arguments, *_RENDEZVOUS)

    @property
    def side(self) -> Literal["prefill", "decode"] | None:
        """Which side of a prefill and decode pair its server is, None otherwise."""
        value = value_of(self.server_arguments, "--disaggregation-mode")
        return "prefill" if value == "prefill" else "decode" if value == "decode" else None

    @property
    def port(self) -> int:
        """The port on which its server answers HTTP; SGLang's own default where none is named."""
        value = value_of(self.server_arguments, "--port") or ""
        return int(value) if value.isascii() and value.isdigit() and int(value) < 1 << 16 else _DEFAULT_PORT


def value_of(arguments: Sequence[str], *names: str) -> str | None:
    """Return what a command line gives for the option that is called one of `names`; None where it gives nothing."""
    for argument, following in zip(arguments, [*arguments, ""][1:], strict=True):
        name, equals, value = argument.partition("=")
        if name in names:
            return (value if equals else following) or None
    return None


@dataclass(frozen=True)
class Discovery:
    """What there is on this host."""

    processes: tuple[FoundProcess, ...] = ()  # those that were asked for, by server and pid
    #: Pids of processes that would have been, if they were not another user's, by user id.
    others: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    #: Pids of processes that would have been, if they did not belong to another Slurm job or node, or to none (None).
    elsewhere: Mapping[Place | None, tuple[int, ...]] = field(default_factory=dict)


def find_processes(
    *, pid: int | None = None, user: int | None = None, everything: bool = False, here: Place | None = None
) -> Discovery:
    """Find the schedulers on this host.

    Args:
        pid: any process of one server, or one that has the server below it; all servers when None.
        user: whose processes; everybody's when None.
        everything: also the servers' other processes: main process, tokenizers, detokenizer, controller.
        here: leave out what is known to belong to another Slurm job or node. Processes that nothing ties to a job, as
            in some containers, are taken only where none is known to be of this one.
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
    """All processes of this host at one moment."""

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}
        self._children: dict[int, list[int]] = {}
        for name in os.listdir("/proc"):  # noqa: PTH208
            stat = procfs.read_stat(int(name)) if name.isdigit() else None
            # The main thread of a process may have ended before the rest of it.
            if stat is not None and (stat.state not in "ZX" or stat.threads > 1):
                self._entries[stat.pid] = _Entry(stat)
                self._children.setdefault(stat.ppid, []).append(stat.pid)

    def groups(self, within: set[int] | None, place: Callable[[int], Place | None]) -> list[list[_Entry]]:
        """Return those that may be of SGLang, by their users and by their places."""
        groups: dict[tuple[int | None, Place | None], list[_Entry]] = {}
        for pid, entry in self._entries.items():
            if (within is None or pid in within) and (entry.is_titled or runs_sglang(entry.cmdline)):
                groups.setdefault((_user_of(pid), place(pid)), []).append(entry)
        return list(groups.values())

    def find(self, candidates: Sequence[_Entry], *, everything: bool) -> Iterator[FoundProcess]:
        schedulers = [entry for entry in candidates if entry.is_scheduler]
        # Its schedulers may run as another user.
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
        """Return the process that launched the server of `pid`: the highest above it that SGLang runs in.

        That may be any program that uses SGLang's Engine: then it is the parent of the highest one with a title.
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
        """Return the processes of the server that `pid` belongs to, or of those below it; empty without such a pid."""
        if pid not in self._entries:
            return set()
        return set(self._tree(self.server_of(pid) or pid))

    def _above(self, pid: int) -> Iterator[int]:
        seen = {pid}
        parent = self._entries[pid].ppid
        # Entries were read one after the other: a recycled pid could close a circle.
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
            # What uses SGLang's Engine is known by the processes below it only.
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
    """Say whether a command line is that of a Python process whose module or script is of SGLang, or called so."""
    words = cmdline[0].split() if len(cmdline) == 1 else cmdline
    if not words or not _PYTHON.fullmatch(Path(words[0]).name):
        return False
    option, program = procfs.program_of(words)
    # The folders that a script is in say nothing, but for the package's own.
    name = Path(program).name
    return option != "-c" and bool(_NAME.search(name) or _FILE.search(program)) and not _NO_MODEL.search(name)


def place_of(pid: int) -> Place | None:
    """Return the place of process `pid`, None where nothing tells.

    A process that has set its title has overwritten the environment that ``/proc`` shows of it; its nearest ancestor
    that has one is asked then.
    """
    seen: set[int] = set()
    while pid > 1 and pid not in seen:
        seen.add(pid)
        if (place := Place.of_environ(procfs.read_environ(pid))) is not None:
            return place
        stat = procfs.read_stat(pid)
        pid = stat.ppid if stat is not None else 0
    return None
