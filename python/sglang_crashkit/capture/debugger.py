"""Take native stacks and CUDA kernels with cuda-gdb; if it is absent or prints no stack, native stacks with py-spy.

Both stop their target while they read it. cuda-gdb also loads the symbols of torch's libraries, which takes seconds and
gigabytes. A tool is run only on a target that stops at once and that no other tool traces, and the target continues
afterwards, even if the tool fails; see `tracing`. Sources: GDB's manual, "Mode Options" and "Attach"; NVIDIA's CUDA-GDB
manual, "info cuda Commands".
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from sglang_crashkit.capture.pyspy import capture_native
from sglang_crashkit.capture.tools import run_tool
from sglang_crashkit.capture.tracing import ToolGuard, obstacle_of, release
from sglang_crashkit.kernel import procfs
from sglang_crashkit.model.sample import Frame, Thread, format_threads

CUDA_GDB, SUBSTITUTE = "cuda-gdb", "py-spy --native"
#: Where the CUDA toolkit installs cuda-gdb without adding the folder to PATH.
TOOLKITS = ("/usr/local/cuda/bin", "/opt/cuda/bin")
#: Settings: run no script of the target or the user, ask no question, and query no server of symbols.
_BEFORE = ("debuginfod enabled off", "auto-load off", "confirm off", "pagination off", "width 0")
_LISTINGS = ("info cuda devices", "info cuda kernels", "thread apply all bt")
#: Bytes of memory to allow for each debugger: the symbols of torch's libraries alone take more than a gigabyte.
_BYTES_EACH = 4 << 30
GET_CUDA_GDB = "apt-get install cuda-gdb-13-0 (NVIDIA's packages) or nvidia-cuda-gdb (Debian's and Ubuntu's)"
NO_CUDA_GDB = f"cuda-gdb is not installed, so CUDA kernels are not listed; next: {GET_CUDA_GDB}"
MAY_TRACE = "run it as root or with CAP_SYS_PTRACE (docker run --cap-add=SYS_PTRACE)"
#: cuda-gdb asks the servers in this variable for symbols, whatever its settings are.
_SYMBOL_SERVERS = "DEBUGINFOD_URLS"
_REFUSED = "ptrace: Operation not permitted"
_THREAD = re.compile(r'^Thread \d+ \((?:Thread 0x[0-9a-f]+ )?\(?(?:LWP |process )(\d+)\)?(?: "(.*)")?\):$')
_FRAME = re.compile(r"^#\d+ +(?:0x[0-9a-f]+ in )?(.+)$")
_PLACE = re.compile(r"(?s)^(?P<function>.*?)(?: at (?P<file>[^:]+):(?P<line>\d+)| from (?P<library>\S+))?$")
#: A row of the table ends with the dimensions of grid and block (and cluster), then the kernel with its arguments.
_KERNEL = re.compile(r"^[\s*]*\d+\s.*?(?:\(\d+,\d+,\d+\)\s+){2,3}(\S.*)$")
_VALUES = re.compile(r"(?:\((?:[^()]|\([^()]*\))*\)| parms=.*)\s*$")
#: gdb prints a frame's arguments in parentheses after the function's name, which may itself contain parentheses.
_ARGUMENTS = re.compile(r" \((?:.*)\)$")
MAX_NAME = 200
#: Characters of a line to parse: names of templates are long; a longer line is not from a normal program.
_MAX_LINE = 2000


@dataclass(frozen=True)
class Debugged:
    """The result of taking the native stacks of one process."""

    tool: str  # the tool that took them, or was to take them: `CUDA_GDB` or `SUBSTITUTE`
    text: str = ""  # its output
    problem: str = ""  # why the output is incomplete or missing; empty if it is complete
    seconds: float = 0.0  # how long it took; 0 if it was not run
    threads: tuple[Thread, ...] = ()  # the stacks in the output, innermost frame first
    kernels: tuple[str, ...] = ()  # the names of the CUDA kernels in the output


def find_cuda_gdb(environ: Mapping[str, str] | None = None) -> str | None:
    """Return the executable of cuda-gdb by an environment, by default this process's; None if absent."""
    environ = os.environ if environ is None else environ
    homes = [f"{environ[name]}/bin" for name in ("CUDA_HOME", "CUDA_PATH") if environ.get(name)]
    return shutil.which(CUDA_GDB, path=os.pathsep.join([environ.get("PATH", ""), *homes, *TOOLKITS]))


def own_environ() -> dict[str, str]:
    """Return the environment for a debugger: this process's, without the servers of symbols."""
    return {name: value for name, value in os.environ.items() if name != _SYMBOL_SERVERS}


def debug_all(
    cuda_gdb: str | None,
    processes: Mapping[int, int],
    deadline_secs: float,
    take: Callable[[int, Debugged], None],
    within_secs: float = threading.TIMEOUT_MAX,
) -> None:
    """Debug processes, given as start times by pid, as many in parallel as `max_at_once` allows.

    Each may take `deadline_secs` from its own start; after `within_secs` all are cancelled. `take` is called with each
    pid and its result when that is there; on an interrupt, with the output so far.
    """
    stop = threading.Event()
    until = time.monotonic() + within_secs
    left: dict[Future[Debugged], int] = {}
    with contextlib.closing(ToolGuard()) as guard, ThreadPoolExecutor(max_at_once()) as pool:
        try:
            for pid, start_ticks in processes.items():
                left[pool.submit(_debug, cuda_gdb, pid, start_ticks, deadline_secs, stop, guard)] = pid
            while left and (secs := until - time.monotonic()) > 0:
                for future in wait(left, secs, FIRST_COMPLETED).done:
                    take(left.pop(future), future.result())
        finally:
            stop.set()
            for future, pid in left.items():
                take(pid, future.result())


def _debug(
    cuda_gdb: str | None, pid: int, start_ticks: int, deadline_secs: float, stop: threading.Event, guard: ToolGuard
) -> Debugged:
    """Debug a process if it may be stopped; `guard` ends the tool if this process is killed."""
    tool, until = CUDA_GDB if cuda_gdb else SUBSTITUTE, time.monotonic() + deadline_secs
    reason = "called off before its turn" if stop.is_set() else obstacle_of(pid, start_ticks)
    if reason:
        return Debugged(tool, problem=f"not run: {reason}")
    before, seconds, kernels = "", 0.0, tuple[str, ...]()
    if cuda_gdb:
        with guard.over(pid, start_ticks) as on_start:
            run = run_tool(command_of(cuda_gdb, pid), deadline_secs, stop, on_start, environ=own_environ())
            # A debugger that ended by itself has detached by itself.
            left_stopped = run.reason and release({pid: start_ticks})
        problem = f"it may not be traced; next: {MAY_TRACE}" if _REFUSED in run.text else run.reason
        if left_stopped:
            problem += "; it left the process stopped, which was sent SIGCONT"
        threads, kernels = parse_stacks(run.text), parse_kernels(run.text)
        if not threads and not problem:
            problem = f"{CUDA_GDB} printed no stack"
        if threads or _REFUSED in run.text or stop.is_set() or time.monotonic() >= until:
            return Debugged(CUDA_GDB, run.text, problem, run.seconds, threads, kernels)
        # For example Debian's cuda-gdb 11.8, or one that does not start.
        before, seconds = f"{run.text}\n== {problem}; {SUBSTITUTE}:\n", run.seconds
    samples, obstacles = capture_native({pid: start_ticks}, until - time.monotonic(), guard, stop)
    if not samples:
        return Debugged(SUBSTITUTE, before, f"not run: {obstacles[pid]}", seconds, (), kernels)
    (sample,) = samples
    threads = sample.threads
    text = "\n".join(format_threads(procfs.read_title(pid), pid, threads)) if threads else ""
    return Debugged(SUBSTITUTE, before + text, sample.problem, round(seconds + sample.seconds, 3), threads, kernels)


def max_at_once() -> int:
    """Return for how many debuggers this host has the cores and the memory; at least one."""
    cores = len(os.sched_getaffinity(0))
    available = procfs.available_bytes()
    return max(1, cores if available is None else min(cores, available // _BYTES_EACH))


def command_of(cuda_gdb: str, pid: int) -> list[str]:
    """Return the debugger's command line for process `pid`."""
    # Without the arguments of functions, which may be prompts or keys.
    command = [*begin_command(cuda_gdb, "print frame-arguments none"), "-p", str(pid)]
    for listing in _LISTINGS:
        command += ["-ex", f"echo \\n== {listing}\\n", "-ex", listing]
    return command


def begin_command(program: str, *settings: str) -> list[str]:
    """Return the beginning of a debugger's command line, with the common settings and `settings`."""
    return [program, "-nx", "-batch", *(word for one in (*_BEFORE, *settings) for word in ("-iex", f"set {one}"))]


def parse_stacks(text: str) -> tuple[Thread, ...]:
    """Return the stacks in the output of ``thread apply all bt``, innermost frame first; empty if absent."""
    threads: list[tuple[str, int, list[Frame]]] = []
    is_inside = False
    for line in text.splitlines():
        line = line[:_MAX_LINE]
        if started := _THREAD.match(line):
            threads.append((started[2] or "", int(started[1]), []))
        elif is_inside and (found := _FRAME.match(line)):
            place = _PLACE.match(found[1])
            assert place is not None
            function = _ARGUMENTS.sub("", place["function"])[:MAX_NAME]
            frame = Frame(function, place["file"] or place["library"] or "", int(place["line"] or 0))
            threads[-1][2].append(frame)
        # An empty line ends a thread's stack.
        is_inside = bool(started) or (is_inside and bool(line.strip()))
    return tuple(Thread(name, id_, False, False, tuple(frames)) for name, id_, frames in threads if frames)


def parse_kernels(text: str) -> tuple[str, ...]:
    """Return the kernels in the output of ``info cuda kernels``, each once, without the values of their arguments."""
    rows = (_KERNEL.match(line[:_MAX_LINE]) for line in text.splitlines())
    names = (_VALUES.sub("", row[1]).strip()[:MAX_NAME] for row in rows if row)
    return tuple(dict.fromkeys(name for name in names if name))
