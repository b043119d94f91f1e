"""Read what ``/proc`` shows of processes.

Fields are described in proc_pid_stat(5) and proc_pid_status(5). A process may end between any two reads, so every
function returns None (or an empty value) for a process that is gone. Files whose read a process can block are read by
`guarded_read`; if the read does not finish in time, the result is the same, except for `read_maps`.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from sglang_crashkit.kernel.guarded_read import read_guarded
from sglang_crashkit.redact import redact_text

_PROC = Path("/proc")
_MAX_TITLE = 120
#: The kernel keeps this many bytes of a process's name (``comm``).
COMM_BYTES = 15
#: linux/sched.h
_PF_EXITING = 0x4
_INTERPRETERS = ("python", "pypy")
_PART_OF_MULTIPROCESSING = re.compile(r"(?:from )?(multiprocessing\.\w+)(?: import |$)")
#: The PID namespace of the host has this inode in every kernel; include/linux/proc_ns.h.
_HOST_NAMESPACE = 0xEFFFFFFC


@dataclass(frozen=True)
class ProcStat:
    """One line of ``/proc/PID/stat``."""

    pid: int
    comm: str  # name of the executable, at most 15 bytes
    state: str  # ``Z`` for a zombie, ``T`` for a stopped, ``D`` for an uninterruptible process
    ppid: int
    start_ticks: int  # start time in clock ticks since boot; with the pid it identifies a process
    threads: int
    wait_status: int  # as waitpid(2) would return it; meaningful for a zombie only, 0 where it may not be read
    cpu_ticks: int = 0  # CPU time of all its threads since its start
    flags: int = 0  # the kernel's ``PF_*``


def started_at(start_ticks: int) -> float:
    """Convert a process's start time in clock ticks since boot to seconds since the epoch."""
    since_boot = start_ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + since_boot


def _read(pid: int, *path: str) -> bytes:
    """Return the content of a file of a process whose read does not block; empty if it cannot be read."""
    try:
        return (_PROC / str(pid)).joinpath(*path).read_bytes()
    except OSError:
        return b""


def read_stat(pid: int, start_ticks: int | None = None) -> ProcStat | None:
    """Return the stat line of `pid`; None if there is no such process, or it did not start at `start_ticks`."""
    raw = _read(pid, "stat")
    if not raw:
        return None
    # The name is in parentheses and may contain parentheses and spaces itself.
    opened, closed = raw.find(b"("), raw.rfind(b")")
    fields = raw[closed + 2 :].split()
    if start_ticks not in (None, int(fields[19])):
        return None
    return ProcStat(
        pid=pid,
        comm=raw[opened + 1 : closed].decode(errors="replace"),
        state=fields[0].decode(),
        ppid=int(fields[1]),
        threads=int(fields[17]),
        start_ticks=int(fields[19]),
        wait_status=int(fields[49]) if len(fields) > 49 else 0,
        cpu_ticks=int(fields[11]) + int(fields[12]),
        flags=int(fields[6]),
    )


def _read_guarded(pid: int, name: str) -> bytes:
    try:
        return read_guarded(_PROC / str(pid) / name)
    except OSError:
        return b""


def read_cmdline(pid: int) -> list[str]:
    """Return the command line of `pid`; empty for a zombie or a kernel thread, or if the read fails or times out."""
    raw = _read_guarded(pid, "cmdline")
    return [part.decode(errors="replace") for part in raw.rstrip(b"\0").split(b"\0")] if raw else []


def read_environ(pid: int) -> dict[str, str]:
    """Return the environment that `pid` was started with, without what setproctitle has overwritten with a title."""
    entries = _read_guarded(pid, "environ").decode(errors="replace").split("\0")
    pairs = (entry.partition("=") for entry in entries)
    return {name: value for name, _equals, value in pairs if name}


def read_maps(pid: int) -> bytes:
    """Return the memory mappings of `pid`, see proc_pid_maps(5); empty for a zombie and a kernel thread.

    Raises OSError if they may not be read, the read does not finish in time, or the process is gone.
    """
    return read_guarded(_PROC / str(pid) / "maps")


def title_of(cmdline: Iterable[str], comm: str) -> str:
    """Return a name of the process for people to read.

    A title set by setproctitle is returned without secrets. Of an ordinary command line only the program and, if that
    is Python, its module or script are returned, because other arguments may be secrets.
    """
    arguments = list(cmdline)
    if not arguments or not arguments[0]:
        return comm
    if "::" in arguments[0]:
        return redact_text(arguments[0].strip()[:_MAX_TITLE])
    if len(arguments) == 1:
        # Once a process has called setproctitle, its whole command line may be a single argument.
        arguments = arguments[0].split() or [comm]
    kept = [Path(arguments[0]).name]
    option, program = program_of(arguments) if kept[0].startswith(_INTERPRETERS) else ("", "")
    if option == "-c":
        # Keep the module of multiprocessing that the code imports, and nothing of any other code.
        found = _PART_OF_MULTIPROCESSING.match(program)
        kept += ["-c", found[1] if found else "..."]
    elif option and program:
        kept += [option, program]
    elif program and Path(program).suffix in {".py", ""} and "=" not in program:
        kept.append(Path(program).name)
    return " ".join(kept)[:_MAX_TITLE]


def program_of(arguments: Sequence[str]) -> tuple[str, str]:
    """Return what a Python command line runs: ``-m`` and a module, ``-c`` and code, or an empty text and a script."""
    rest = iter(arguments[1:])
    for argument in rest:
        if argument == "-m":
            return "-m", next(rest, "")
        if argument.startswith("-c"):
            return "-c", " ".join((argument[2:], *rest)).strip()
        if argument in {"-W", "-X"}:
            next(rest, None)
        elif not argument.startswith("-"):
            return "", argument
    return "", ""


def read_title(pid: int) -> str:
    """Return the title of a process (see `title_of`), or its ``comm`` if the command line is empty; empty if gone."""
    cmdline = read_cmdline(pid)
    if cmdline and cmdline[0]:
        return title_of(cmdline, "")
    stat = read_stat(pid)
    return stat.comm if stat else ""


def is_python(pid: int) -> bool:
    """Say whether `pid` runs a Python interpreter, by the name of its executable.

    Without permission to trace it, go by its title (every process that SGLang titles is Python) or its command line.
    """
    try:
        executable = (_PROC / str(pid) / "exe").readlink()
    except PermissionError:
        words = read_cmdline(pid)
        return bool(words) and ("::" in words[0] or Path(words[0]).name.startswith(_INTERPRETERS))
    except OSError:
        return False
    return executable.name.startswith(_INTERPRETERS)


def is_running(pid: int, start_ticks: int | None = None) -> bool:
    """Say whether a process with the pid `pid`, and the start time `start_ticks` if given, is alive."""
    stat = read_stat(pid, start_ticks)
    return stat is not None and stat.state not in "ZX"


def may_inspect(pid: int) -> bool:
    """Say whether this process may read what only a tracer of `pid` may read, such as its exit status."""
    try:
        (_PROC / str(pid) / "cwd").readlink()
    except PermissionError:
        return False
    except OSError:
        # A zombie has no ``cwd``, but without the right to trace it the error is PermissionError.
        return True
    return True


def main_thread_cpu_secs(pid: int) -> float:
    """Return the CPU time that the main thread of `pid` has used since its start, in seconds; 0 when it is gone."""
    fields = _read(pid, "task", str(pid), "stat").rpartition(b")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") if len(fields) > 12 else 0.0


def thread_states(pid: int) -> dict[int, str]:
    """Return the state letter of each thread of `pid`, by kernel thread id; empty when the process is gone."""
    try:
        threads = os.listdir(_PROC / str(pid) / "task")  # noqa: PTH208
    except OSError:
        return {}
    lines = {int(thread): _read(pid, "task", thread, "stat") for thread in threads}
    return {thread: line[line.rfind(b")") + 2 :][:1].decode() for thread, line in lines.items() if line}


def read_status(pid: int, thread: int | None = None) -> dict[str, str]:
    """Return the fields of ``/proc/PID/status``, or of the status of a thread of `pid`, by name; empty when gone."""
    text = _read(pid, "status") if thread is None else _read(pid, "task", str(thread), "status")
    pairs = (line.partition(":") for line in text.decode(errors="replace").splitlines())
    return {name: value.strip() for name, colon, value in pairs if colon}


def catches_signal(pid: int, signum: int) -> bool:
    """Say whether the process has installed a handler for the signal `signum` (field ``SigCgt``)."""
    return in_mask(read_status(pid).get("SigCgt"), signum)


def in_mask(mask: str | None, signum: int) -> bool:
    """Say whether a signal is in a signal mask of ``/proc/PID/status``."""
    return mask is not None and bool(int(mask, 16) >> (signum - 1) & 1)


def read_tracer(pid: int, thread: int | None = None) -> int:
    """Return the pid of the process that traces `pid`'s main thread, or its thread `thread`; 0 without a tracer."""
    tracer = read_status(pid, thread).get("TracerPid", "0")
    return int(tracer) if tracer.isdigit() else 0


def is_ending(pid: int) -> bool:
    """Say whether `pid` has ended, was killed or is exiting; it may keep its resources for a while then."""
    pending = read_status(pid)
    if any(in_mask(pending.get(name), signal.SIGKILL) for name in ("SigPnd", "ShdPnd")):
        return True
    stat = read_stat(pid)
    return stat is None or stat.state in "ZX" or bool(stat.flags & _PF_EXITING)


def read_wchan(pid: int) -> str:
    """Return the kernel function in which the main thread sleeps; empty if it does not sleep or may not be read."""
    return _read(pid, "wchan").decode(errors="replace").strip("\0 \n0")


def owner_of(pid: int) -> int | None:
    """Return the user id of a process; None if the process is gone."""
    try:
        return (_PROC / str(pid)).stat().st_uid
    except OSError:
        return None


def open_files(pid: int) -> Iterator[tuple[Path, Path]]:
    """Yield for each open file of `pid` the kernel's link to it (``/proc/PID/fd/N``) and the target of that link."""
    with contextlib.suppress(OSError):
        for entry in (_PROC / str(pid) / "fd").iterdir():
            # The process may close the file between the two reads.
            with contextlib.suppress(OSError):
                yield entry, entry.readlink()


def available_bytes() -> int | None:
    """Return how much memory new programs may take before the host swaps, in bytes; None if it is not known."""
    with contextlib.suppress(OSError, ValueError):
        for line in (_PROC / "meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return None


class TreeScanner:
    """Finds the descendants of a process, again and again, at low cost.

    Not every kernel has ``/proc/PID/task/TID/children``, so the parent comes from the stat line of each process. It is
    read once for each process; every 16th scan reads all again, because a pid may have been recycled and an orphan has
    a new parent. The process `without` and its descendants are left out.
    """

    def __init__(self, root_pid: int, *, without: int | None = None) -> None:
        self._root_pid = root_pid
        self._without = without
        self._scans = 0
        self._parents: dict[int, int] = {}

    def scan(self) -> set[int]:
        """Return the pids of the root and all its descendants that exist at present, zombies included."""
        if self._scans % 16 == 0:
            self._parents.clear()
        self._scans += 1
        present = {int(name) for name in os.listdir(_PROC) if name.isdigit()}  # noqa: PTH208
        for pid in self._parents.keys() - present:
            del self._parents[pid]
        for pid in present - self._parents.keys():
            if (stat := read_stat(pid)) is not None:
                self._parents[pid] = stat.ppid
        children: dict[int, list[int]] = {}
        for pid, parent in self._parents.items():
            children.setdefault(parent, []).append(pid)
        members: set[int] = set()
        waiting = [self._root_pid] if self._root_pid in present else []
        while waiting:
            pid = waiting.pop()
            if pid not in members and pid != self._without:
                members.add(pid)
                waiting += children.get(pid, [])
        return members


def boot_id() -> str:
    """Return the id of this boot of this machine, the same in every container; see proc_sys_kernel(5)."""
    return (_PROC / "sys/kernel/random/boot_id").read_text().strip()


def server_key(pid: int, start_ticks: int) -> str:
    """Return the name of a process of this PID namespace in shared folders: ``<pid>-<start ticks>-<PID namespace>``.

    The pid and a host name do not suffice: each container's main process may be process 1, and hosts may share a name.
    """
    return f"{pid}-{start_ticks}-{own_namespace()}"


def key_of(pid: int, start_ticks: int) -> str:
    """Return the `server_key` that a process computes for itself, maybe in another PID namespace; `pid` is of this one.

    If the process is gone, or may not be inspected, assume that it is in this PID namespace.
    """
    try:
        namespace = (_PROC / str(pid) / "ns" / "pid").stat().st_ino
    except OSError:
        return server_key(pid, start_ticks)
    # NSpid has the pid of the process in each of its PID namespaces, the innermost last; proc_pid_status(5).
    numbers = read_status(pid).get("NSpid", "").split()
    return f"{numbers[-1] if numbers else pid}-{start_ticks}-{namespace}"


def is_host_namespace() -> bool:
    """Say whether this process sees the host's processes by the host's own pids."""
    return own_namespace() == _HOST_NAMESPACE


def own_namespace() -> int:
    """Return the inode number of this process's PID namespace; 0 where there is no ``/proc``."""
    try:
        return (_PROC / "self" / "ns" / "pid").stat().st_ino
    except OSError:
        return 0
