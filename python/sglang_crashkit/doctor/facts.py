"""Gather what the doctor's rules judge: of this machine, this user, the installation and the servers that run."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sglang_crashkit.capture.cuda_core.trigger import CoreRequest, NoCoreError
from sglang_crashkit.capture.debugger import find_debugger
from sglang_crashkit.capture.environment import read_place
from sglang_crashkit.capture.gpu_facts import GpuFacts, GpuFactsReader, Library, find_library
from sglang_crashkit.capture.pyspy import find_pyspy, sample_all
from sglang_crashkit.capture.tools import run_tool
from sglang_crashkit.doctor.folder_facts import FolderFacts, file_system_of, read_folder
from sglang_crashkit.errors import CrashkitError
from sglang_crashkit.incident.exit_status import termination_log
from sglang_crashkit.kernel import procfs, shared_memory
from sglang_crashkit.kernel.discovery import FoundProcess, runs_sglang
from sglang_crashkit.kernel.server_arguments import value_of
from sglang_crashkit.policy import Mode
from sglang_crashkit.settings import Settings, fallback_folder

_TOOL_SECS = 3.0
_GPU_SECS = 5.0
_CAP_SYS_PTRACE = 19
_PR_SET_PTRACER = 0x59616D61
#: It sleeps until it is killed; its tracer may be anyone, as the ranks let the crash handler trace them.
_TARGET = f"""
import ctypes, time
ctypes.CDLL(None).prctl({_PR_SET_PTRACER}, ctypes.c_ulong(-1), 0, 0, 0)
print("ready", flush=True)
time.sleep(60)
"""
_UNIT = re.compile(r"/([\w@.\\:-]+\.service)(?:/|$)", re.MULTILINE)
_UNIT_SECS = re.compile(r"(\d+(?:\.\d+)?)(min|ms|us|s|h)")
_IN_SECS = {"h": 3600.0, "min": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6}
_KILL_WAIT = re.compile(r"^KillWait\s*=\s*(\d+)", re.MULTILINE)


@dataclass(frozen=True)
class Installation:
    """The SGLang that a python imports."""

    state: str  # as `installer.status.Overall` has it; empty where there is none
    words: str  # which release it is, for a person; or why none was found
    next: str | None = None  # what to run
    supported: bool = True  # the kit knows the release; `range` is what it knows
    range: str = ""


@dataclass(frozen=True)
class ServerFacts:
    """A server that runs on this host."""

    pid: int  # its main process
    arguments: tuple[str, ...]  # the command line of that
    mode: Mode  # what the kit does about its crashes follows from it
    handler: int | None  # the pid of its crash handler; None where it has none
    problem: str = ""  # why it has none
    is_starting: bool = False  # none of its ranks runs yet, so that nobody can know of a handler
    is_elsewhere: bool = False  # it runs in another container than this command
    is_others: bool = False  # it runs as another user
    #: Why the driver of a rank takes no request for a core, by its title.
    without_pipe: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class TracingFacts:
    """Whether py-spy can look at another process of this user."""

    executable: str | None  # py-spy's; None where there is none
    version: str = ""  # what it says of itself
    problem: str = ""  # why it could not look at a process that lets everybody trace it; empty where it could
    ptrace_scope: int | None = None  # Yama's; None where the kernel has no Yama
    has_capability: bool = False  # this process has CAP_SYS_PTRACE
    has_seccomp: bool = False  # a seccomp filter holds for this process


@dataclass(frozen=True)
class SharedMemoryFacts:
    """``/dev/shm``: its size and what is free in bytes, its file system, and what dead processes left there."""

    total: int = 0
    free: int = 0
    file_system: str = ""
    left: tuple[str, ...] = ()
    left_bytes: int = 0


@dataclass(frozen=True)
class EndFacts:
    """Who ends a server that was asked to end and does not."""

    grace_secs: float | None = None  # after how long, in seconds; None where that is not known
    who: str = ""  # ``Kubernetes``, ``Slurm``, ``systemd``, ``--grace-secs``; empty where nobody is known
    unit: str = ""  # systemd's name of the service
    termination_log: str = ""  # the file of the container's termination message; empty where it is switched off
    has_termination_log: bool = False  # it can be written to


@dataclass(frozen=True)
class Facts:
    """All of it."""

    installation: Installation
    servers: tuple[ServerFacts, ...]
    environ: Mapping[str, str]
    arguments: tuple[str, ...]
    settings: Settings
    tracing: TracingFacts
    has_gpu: bool
    gpu: GpuFacts | None
    debugger: str | None
    debugger_missing: str
    folder: FolderFacts
    has_own_folder: bool
    shared_memory: SharedMemoryFacts
    end: EndFacts
    #: Where it runs: ``container``, ``kubernetes`` and ``slurm``, as far as anything tells.
    place: Mapping[str, object]


def gather(
    installation: Installation,
    servers: Sequence[ServerFacts],
    *,
    crash_folder: Path | None = None,
    grace_secs: float | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Facts:
    """Gather the facts; takes a few seconds at most.

    Args:
        installation: what the installer says.
        servers: those that are looked at; the settings are the first one's.
        crash_folder: where incidents go; by default what the first server was given.
        grace_secs: how long a server has that is asked to end, in seconds, where that is known.
        environ: this process's environment, which counts where there is no server, or its own cannot be read.
    """
    first = servers[0] if servers else None
    settings_of = (procfs.read_environ(first.pid) if first is not None else {}) or dict(environ)
    arguments = list(first.arguments) if first is not None else []
    given = value_of(arguments, "--crash-dump-folder")
    folder = crash_folder or (Path(given) if given else None)
    if crash_folder is not None and given is None:
        # What the server is about to be given.
        arguments += ["--crash-dump-folder", str(crash_folder)]
    library = find_library(settings_of)
    debugger, missing = find_debugger(settings_of)
    place = read_place(first.pid if first is not None else os.getpid(), settings_of)
    return Facts(
        installation=installation,
        servers=tuple(servers),
        environ=settings_of,
        arguments=tuple(arguments),
        settings=Settings.from_environ(settings_of),
        tracing=_read_tracing(),
        has_gpu=library is not None,
        gpu=_ask_driver(library) if library is not None else None,
        debugger=debugger.name if debugger is not None else None,
        debugger_missing=missing,
        folder=read_folder((folder or fallback_folder()).absolute(), dict(settings_of)),
        has_own_folder=folder is not None,
        shared_memory=_read_shared_memory(),
        end=_read_end(place, settings_of, grace_secs, first.pid if first is not None else os.getpid()),
        place=place,
    )


def server_facts(
    processes: Sequence[FoundProcess], handlers: Mapping[int, tuple[int | None, str]]
) -> list[ServerFacts]:
    """Return the servers of these processes; `handlers` has a worker's crash handler, and why it has none, by pid."""
    servers: dict[int, list[FoundProcess]] = {}
    for one in processes:
        if one.server is not None:
            servers.setdefault(one.server, []).append(one)
    found = []
    for pid, members in servers.items():
        arguments = members[0].server_arguments
        known = next((handlers[one.pid] for one in members if one.pid in handlers), None)
        handler, problem = known or (None, "it was started without the kit, or switched it off")
        pipes = {one.title: why for one in members if one.role == "scheduler" and (why := _why_no_pipe(one.pid))}
        is_others = any(one.user != os.geteuid() for one in members)
        is_starting = known is None and all(one.way == "command line" for one in members)
        mode, is_elsewhere = _mode_of(arguments), _is_elsewhere(pid)
        found.append(ServerFacts(pid, arguments, mode, handler, problem, is_starting, is_elsewhere, is_others, pipes))
    return sorted(found, key=lambda server: server.pid)


def _mode_of(arguments: Sequence[str]) -> Mode:
    # As `policy.mode_of` has it; of upstream's coming fault tolerance only the server itself knows.
    backend = value_of(arguments, "--elastic-ep-backend")
    if backend not in (None, "", "none"):
        return Mode.ELASTIC
    return Mode.SERVER if runs_sglang(arguments) else Mode.LIBRARY


def _is_elsewhere(pid: int) -> bool:
    names = ("mnt", "pid")
    with contextlib.suppress(OSError):
        return any(
            Path(f"/proc/{pid}/ns/{name}").stat().st_ino != Path(f"/proc/self/ns/{name}").stat().st_ino
            for name in names
        )
    return False


def _why_no_pipe(pid: int) -> str:
    with contextlib.suppress(OSError):
        try:
            CoreRequest(pid, {"CUDA_ENABLE_USER_TRIGGERED_COREDUMP": "1"}).find_pipes()
        except NoCoreError as error:
            return str(error)
    return ""


def _read_tracing() -> TracingFacts:
    executable = find_pyspy()
    status = procfs.read_status(os.getpid())
    scope: int | None = None
    with contextlib.suppress(OSError, ValueError):
        scope = int(Path("/proc/sys/kernel/yama/ptrace_scope").read_text())
    has_capability = bool(int(status.get("CapEff", "0"), 16) >> _CAP_SYS_PTRACE & 1)
    has_seccomp = status.get("Seccomp", "0").strip() == "2"
    if executable is None or shutil.which(executable) is None:
        return TracingFacts(None, "", "", scope, has_capability, has_seccomp)
    version = run_tool([executable, "--version"], _TOOL_SECS).text.strip()
    return TracingFacts(executable, version, _try_pyspy(), scope, has_capability, has_seccomp)


def _try_pyspy() -> str:
    """Have py-spy look at a process made for it, and return why it could not."""
    try:
        started = subprocess.Popen(
            [sys.executable, "-c", _TARGET], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
    except OSError as error:
        # A container's limit of processes, or an interpreter that only another user may start.
        return f"the process to be looked at could not be started: {error.strerror}"
    with started as target:
        try:
            assert target.stdout is not None
            # It says so at once, or ends.
            if not target.stdout.readline():
                return "the process to be looked at did not start"
            sample = sample_all([target.pid], _TOOL_SECS)[0]
            return "" if sample.threads else sample.problem
        finally:
            target.kill()


def _ask_driver(library: Library) -> GpuFacts:
    reader = GpuFactsReader(library, _GPU_SECS, time.time())
    deadline = time.monotonic() + _GPU_SECS + 1
    while (facts := reader.look()) is None and time.monotonic() < deadline:
        time.sleep(0.02)
    return facts or GpuFacts(reason="the driver did not answer")


def _read_shared_memory() -> SharedMemoryFacts:
    folder = shared_memory.FOLDER
    try:
        space = os.statvfs(folder)
        left = [segment for segment in shared_memory.of_gone() if not segment.why]
    except OSError:
        return SharedMemoryFacts()
    return SharedMemoryFacts(
        total=space.f_blocks * space.f_frsize,
        free=space.f_bavail * space.f_frsize,
        file_system=file_system_of(folder),
        left=tuple(segment.name for segment in left),
        left_bytes=sum(segment.bytes for segment in left),
    )


def _read_end(place: Mapping[str, object], environ: Mapping[str, str], grace_secs: float | None, pid: int) -> EndFacts:
    log, unit, secs, who = termination_log(environ), _unit_of(pid), grace_secs, ""
    if grace_secs is not None:
        who = "--grace-secs"
    elif place.get("kubernetes"):
        # A pod is not told how long it has.
        who = "Kubernetes"
    elif place.get("slurm"):
        match = _KILL_WAIT.search(run_tool(["scontrol", "show", "config"], _TOOL_SECS).text)
        secs, who = float(match[1]) if match else None, "Slurm"
    elif unit:
        text = run_tool(["systemctl", "show", "-p", "TimeoutStopUSec", "--value", unit], _TOOL_SECS).text.strip()
        secs, who = seconds_of(text), "systemd"
    return EndFacts(secs, who, unit, log, bool(log) and os.access(log, os.W_OK))


def seconds_of(text: str) -> float | None:
    """Return a time span as systemd writes it, such as ``1min 30s``, in seconds; None for ``infinity`` and others."""
    parts = _UNIT_SECS.findall(text)
    return sum(float(number) * _IN_SECS[unit] for number, unit in parts) if parts else None


def _unit_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        match = _UNIT.search(Path(f"/proc/{pid}/cgroup").read_text(errors="replace"))
        return match[1] if match else ""
    return ""


def read_installation(python: str | None) -> Installation:
    """Return what the SGLang is that a python imports: an interpreter or virtual environment, or this one."""
    from sglang_crashkit.installer.environment import open_session
    from sglang_crashkit.installer.status import read_status

    try:
        session = open_session(python)
        status = read_status(session.environment, session.lock)
    except CrashkitError as error:
        return Installation("", error.message, error.next_step)
    environment, tree = status.tree.environment, status.tree
    words = f"SGLang {environment.version} in {environment.package}"
    return Installation(tree.overall.value, words, status.next_step, tree.locked is not None, status.supported_range)
