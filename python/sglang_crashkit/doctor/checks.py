"""Check this machine, this user and the servers here for what would keep a crash from being recorded."""

from __future__ import annotations

import contextlib
import ctypes
import difflib
import json
import os
import re
import shlex
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from sglang_crashkit.capture.debugger import NO_CUDA_GDB, find_cuda_gdb
from sglang_crashkit.capture.environment import read_place
from sglang_crashkit.capture.gpu_facts import GpuFacts, ask_driver, facts_of, has_gpu
from sglang_crashkit.capture.pyspy import find_pyspy, sample_all
from sglang_crashkit.capture.tools import run_tool
from sglang_crashkit.errors import CrashkitError
from sglang_crashkit.incident.exit_status import termination_log
from sglang_crashkit.incident.retention import limits_on, size_of, space_of
from sglang_crashkit.kernel import procfs, shared_memory
from sglang_crashkit.kernel.discovery import FoundProcess, value_of
from sglang_crashkit.kernel.forked import call_within
from sglang_crashkit.settings import VARIABLES, DiskLimits, Settings, fallback_folder, unknown_variables

_MB = 1 << 20
_TOOL_SECS, _GPU_SECS, FOLDER_SECS = 3.0, 5.0, 5.0
#: Bytes of an incident of a few ranks with little evidence; bytes of ``/dev/shm`` in a container by Docker's default.
_LEAST_INCIDENT, _DOCKER_SHM = 4 * _MB, 64 * _MB
#: SGLang's own default of ``--watchdog-timeout``, in seconds.
_WATCHDOG_SECS = 300.0
_PR_SET_PTRACER = 0x59616D61
_OPTION = "--crash-dump-folder FOLDER"
_ATTACH = """\
where kernel.yama.ptrace_scope is 2 or 3, on the host: sysctl kernel.yama.ptrace_scope=1
Docker: docker run --cap-add=SYS_PTRACE ..., where Seccomp is 2 also --security-opt seccomp=unconfined
Kubernetes: securityContext: {capabilities: {add: ["SYS_PTRACE"]}, seccompProfile: {type: Unconfined}}, of the container
Slurm/pyxis: srun --container-remap-root ... (root of the container's user namespace has it)"""
_MORE_SHM = "Docker: --shm-size=16g or --ipc=host; Kubernetes: an emptyDir volume with medium: Memory at /dev/shm"
_ON_DISK = f"{_OPTION}, on a disk of the host: docker run -v, a Kubernetes volumeMount of a hostPath or a claim"


class Result(NamedTuple):
    """The result of one check."""

    ok: bool | None  # None: some evidence will be missing; False: there will be no incident, or only a part of one
    words: str  # what was found, and why it matters if it is wrong
    command: str = ""  # commands or lines that fix it, one per line


@dataclass(frozen=True)
class Target:
    """What is checked: the servers that run, or one that is about to be started."""

    pid: int  # main process of the first server, else this process; its container and pod are checked
    servers: Mapping[int, Sequence[FoundProcess]]  # main process of a server → its processes
    #: Pid of one of a server's processes → its crash handler or None, and why it has none.
    handlers: Mapping[int, tuple[int | None, str]]
    environ: Mapping[str, str]  # the first server's; this shell's if there is no server
    arguments: Sequence[str] = ()  # of the first server
    crash_folder: Path | None = None  # where incidents go; None where no folder was given
    python: str | None = None  # the interpreter or environment whose SGLang is checked; None for this one

    @property
    def settings(self) -> Settings:
        """The kit's settings in `environ`."""
        return Settings.from_environ(self.environ)


def _kit(target: Target) -> Iterator[Result]:
    from sglang_crashkit.installer.environment import open_session
    from sglang_crashkit.installer.status import read_tree

    try:
        environment, _patches, lock = open_session(target.python)
        tree = read_tree(environment, lock.find(environment.version))
    except CrashkitError as error:
        yield Result(False, error.message, error.next_step or "name the server's python with --python PATH")
        return
    state, found, command = tree.overall.value, tree.environment, tree.next_step or ""
    words, known = f"SGLang {found.version} in {found.package}", f"one of {lock.supported_range()}"
    if tree.locked is None:
        command = command or f"pip install sglang==RELEASE, with {known}"
        yield Result(False, f"{words} cannot be patched: it is not {known}", command)
    elif state == "patched":
        # There is a next step where SGLang's python imports another kit than the one of this command.
        yield Result(None if command else True, f"applied and intact: {words}, {known}", command)
    else:
        lost = "no crash of it leaves an incident" if state == "pristine" else "what a crash leaves is uncertain"
        yield Result(False, f"{state}: {words}; {lost}", command or "sglang-crashkit apply")


def _servers(target: Target) -> Iterator[Result]:
    if not target.servers:
        yield Result(True, "no server of this user runs here: the settings are those of this shell")
    for pid, members in target.servers.items():
        pids = [pid, *(one.pid for one in members)]
        known = next((target.handlers[one] for one in pids if one in target.handlers), None)
        handler, problem = known or (None, "it was started without the kit, or switched it off")
        if handler is not None and not problem:
            yield Result(True, f"server {pid} is watched by crash handler {handler}")
        elif known is None and all(one.way == "command line" for one in members):
            words = f"server {pid} is still starting; whether a crash handler watches it shows when its ranks run"
            yield Result(True, words, f"sglang-crashkit doctor --pid {pid}   # once it serves")
        else:
            words = f"server {pid} has no crash handler, so that a crash of it leaves no incident: {problem}"
            yield Result(False, words, "restart the server, with the kit applied")
        with contextlib.suppress(OSError):
            own, its = ([os.stat(f"/proc/{one}/ns/{ns}").st_ino for ns in ("mnt", "pid")] for one in ("self", pid))  # noqa: PTH116
            if own != its:
                words = f"server {pid} runs in another container than this command, which sees its own surroundings"
                yield Result(None, words, "run this command in that container: docker exec, kubectl exec")


def _pyspy(target: Target) -> Iterator[Result]:
    executable, lost = find_pyspy(), "of a rank that is stuck outside of Python there may be no stack"
    if not target.settings.stacks:
        yield Result(True, "not used: SGLANG_PYSPY_DUMP_BEFORE_CRASH is off, so no stacks are taken")
        return
    if executable is None or shutil.which(executable) is None:
        yield Result(False, f"it is not installed: {lost}", "pip install py-spy")
        return
    # py-spy, a child, may then trace this process, as the ranks let the crash handler trace them.
    ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(-1), 0, 0, 0)
    sample = sample_all([os.getpid()], _TOOL_SECS)[0]
    if sample.threads:
        yield Result(True, f"{run_tool([executable, '--version'], _TOOL_SECS).text.strip()} looks at processes")
        return
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    status = procfs.read_status(os.getpid())
    facts = {name: status.get(name, "").strip() for name in ("CapEff", "Seccomp")}
    facts["kernel.yama.ptrace_scope"] = scope.read_text().strip() if scope.exists() else ""
    yield Result(None, f"it cannot look at processes: {sample.problem}; {facts}; {lost}", _ATTACH)


def _gpu(target: Target) -> Iterator[Result]:
    if not has_gpu(target.environ):
        yield Result(True, "no GPU here: the devices of NVIDIA's driver are not there")
        return
    reader, deadline = ask_driver(_GPU_SECS), time.monotonic() + _GPU_SECS + 1
    while (answer := reader.look()) is None and time.monotonic() < deadline:
        time.sleep(0.02)
    facts = facts_of(answer) if answer is not None else GpuFacts(reason="it did not answer")
    words = f"driver {facts.driver.get('version')} reports {facts.driver.get('gpus')} GPUs"
    if facts.reason:
        words = f"Xid events, memory and processes of the GPUs will be missing: the driver: {facts.reason}"
    yield Result(None if facts.reason else True, words, "nvidia-smi" if facts.reason else "")
    if find_cuda_gdb(target.environ) is None:
        words, _, command = NO_CUDA_GDB.partition("; next: ")
        yield Result(True, f"{words}: native stacks and kernels that hang need it", command)
    yield from check_cores(target) if target.settings.cores else ()


def check_cores(target: Target) -> Iterator[Result]:
    """Yield a result for each setting that keeps the CUDA driver from writing cores, or one that none does."""
    wrong = []
    if target.crash_folder is None:
        words = "CUDA's core variables are set with --crash-dump-folder alone: a GPU exception leaves no core"
        wrong.append(Result(None, words, _OPTION))
    wanted = {"CUDA_ENABLE_COREDUMP_ON_EXCEPTION": "1", "CUDA_ENABLE_USER_TRIGGERED_COREDUMP": "1"}
    for name, value in (wanted | {"CUDA_ENABLE_CPU_COREDUMP_ON_EXCEPTION": "0"}).items():
        if (given := target.environ.get(name, value)) != value:
            lost = "no such core is written" if value == "1" else "the driver aborts a rank before it says what failed"
            wrong.append(Result(None, f"{name}={given} was set: {lost}", f"unset {name}"))
    yield from wrong or [Result(True, "the driver is told to write GPU cores")]


def _crash_folder(target: Target) -> Iterator[Result]:
    path = (target.crash_folder or fallback_folder()).absolute()
    if target.crash_folder is None:
        words = f"none is set: incidents go to {path}, requests are not saved, and a container takes all with it"
        yield Result(None, words, _OPTION)
    try:
        # Looked at in a child with a deadline, because the disk may not answer.
        said = call_within(FOLDER_SECS, lambda: json.dumps(list(look_at_folder(path, target.settings.disk))).encode())
        yield from (Result(*one) for one in json.loads(said))
    except OSError as error:
        words = f"incidents of {path} go to the temporary folder: {error.strerror}"
        yield Result(False, words, f"df -h {shlex.quote(str(path))}\n{_OPTION}, that this user may write to")


def look_at_folder(path: Path, limits: DiskLimits) -> Iterator[Result]:
    """Yield the results for a crash folder, or its nearest parent that exists; OSError: it cannot be written to."""
    there, quoted = next(folder for folder in (path, *path.parents) if folder.exists()), shlex.quote(str(path))
    with tempfile.TemporaryDirectory(prefix=".doctor-", dir=there) as trial:
        # Write more than a block: a full disk still takes an empty file.
        (Path(trial) / "trial").write_bytes(bytes(1 << 16))
    kind = "".join(run_tool(["df", "--output=fstype", str(there)], _TOOL_SECS).text.split()[-1:])
    (total, free), (max_use, keep_free) = space_of(there), limits_on(there, limits)
    needed = min(limits.max_incident, max_use)
    words = f"{path} ({kind or 'unknown'}), {_size(free)} of {_size(total)} free"
    if free < max(needed // 16, _LEAST_INCIDENT):
        yield Result(False, f"{words}: an incident has no room", f"du -xsh {quoted}")
    elif free < keep_free + needed:
        lost = f"SGLANG_CRASHKIT_KEEP_FREE_MB ({_size(keep_free)}) leaves less than one incident may take"
        yield Result(None, f"{words}: {lost}", f"du -xsh {quoted}")
    else:
        yield Result(True, f"{words}; incidents take {_size(size_of(path))} of {_size(max_use)}")
    if kind in ("tmpfs", "ramfs", "overlay", "aufs") and path != fallback_folder():
        yield Result(None, f"it is on {kind}: incidents are gone with the container or the machine", _ON_DISK)


def _shared_memory(_target: Target) -> Iterator[Result]:
    folder = shared_memory.FOLDER
    try:
        (total, free), left = space_of(folder), shared_memory.of_gone()
    except OSError:
        yield Result(None, f"{folder} is not there: NCCL and the tokenizers need it", _MORE_SHM)
        return
    words, is_short = f"{folder}: {_size(free)} of {_size(total)} free", total <= _DOCKER_SHM or free < total // 10
    lost = ": a rank that finds no room there dies of SIGBUS"
    yield Result(None, words + lost, _MORE_SHM) if is_short else Result(True, words)
    for why in sorted({segment.why for segment in left}):
        found = [segment for segment in left if segment.why == why]
        paths = " ".join(shlex.quote(str(folder / segment.name)) for segment in found[:3])
        words = f"{len(found)} left ({_size(sum(segment.bytes for segment in found))}), such as {paths}"
        if why:
            yield Result(True, f"{words}: whether a process uses them cannot be told from here: {why}")
        else:
            yield Result(None, f"{words}: their processes are gone, and they take memory", f"rm {paths}")


def _end(target: Target) -> Iterator[Result]:
    log = termination_log(target.environ)
    if read_place(target.pid, target.environ).get("kubernetes") and not (log and os.access(log, os.W_OK)):
        words = f"termination log {log}: it cannot be written to: kubectl describe pod does not say what happened"
        mend = "terminationMessagePath: /dev/termination-log, and run as a user who may write to it"
        yield Result(None, words, mend)
    secs = target.settings.exit_secs
    yield Result(True, f"evidence holds up the end of a server by {secs:g} s at most: SGLANG_CRASHKIT_EXIT_SECS")


def _settings(target: Target) -> Iterator[Result]:
    environ, settings, wrong = target.environ, target.settings, []
    for name in unknown_variables(environ):
        close = difflib.get_close_matches(name, VARIABLES, 1)
        command = f"{close[0]}=..." if close else f"unset {name}"
        wrong.append(Result(None, f"{name} is no variable of the kit, and has no effect", command))
    for name, pattern in VARIABLES.items():
        value = environ.get(name, "").strip()
        if value and not re.fullmatch(pattern, value, re.DOTALL):
            wrong.append(Result(None, f"{name} cannot be read, and counts as not set", f"unset {name}"))
    if not settings.enabled:
        words = "SGLANG_CRASHKIT_ENABLED switches the kit off: a crash leaves no incident"
        wrong.append(Result(False, words, "unset SGLANG_CRASHKIT_ENABLED"))
    elif not settings.diagnostics and target.crash_folder is None:
        words = "no crash handler is started: upstream's diagnostics are off, and there is no --crash-dump-folder"
        wrong.append(Result(False, words, f"unset SGLANG_PYSPY_DUMP_BEFORE_CRASH\n{_OPTION}"))
    given_secs = value_of(target.arguments, "--watchdog-timeout") or ""
    watchdog = float(given_secs) if re.fullmatch(r"\d+(\.\d*)?", given_secs) else _WATCHDOG_SECS
    if settings.hang_secs >= watchdog > 0:
        words = f"SGLang's --watchdog-timeout ({watchdog:g} s) ends a server that hangs before the kit looks at it"
        wrong.append(Result(None, words, f"SGLANG_CRASHKIT_HANG_SECS={max(2.0, watchdog / 2):g}"))
    yield from wrong or [Result(True, "every variable of the kit is known and can be read")]


def _size(number: int) -> str:
    return f"{number / (_MB << 10):.1f} GB" if number >= _MB << 10 else f"{number / _MB:.0f} MB"


#: Topic → check, in the order in which the results are printed.
CHECKS: dict[str, Callable[[Target], Iterator[Result]]] = {
    "kit": _kit,
    "server": _servers,
    "py-spy": _pyspy,
    "GPU": _gpu,
    "crash folder": _crash_folder,
    "shared memory": _shared_memory,
    "end": _end,
    "settings": _settings,
}
