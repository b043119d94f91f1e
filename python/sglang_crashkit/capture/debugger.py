"""Take native stacks and CUDA kernels with cuda-gdb, or native stacks with gdb.

A debugger stops its target while it reads, for as long as the symbols of torch's libraries take: gdb took 39 s of CPU
time and 1.9 GB for all that a scheduler maps, 14 s and 0.7 GB for those that were on its stacks. So py-spy tells gdb
which these are; cuda-gdb, which looks for CUDA's driver among them as it attaches, reads all.

It is run only on a target that stops at once and that no other tool holds, and the target runs on afterwards, whatever
becomes of the debugger; see `tracing`. Sources: GDB's manual, "Mode Options" and "Attach"; NVIDIA's CUDA-GDB
manual, "info cuda Commands".
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from sglang_crashkit.capture.pyspy import capture_native
from sglang_crashkit.capture.tools import run_tool
from sglang_crashkit.capture.tracing import ToolGuard, obstacle_of, release
from sglang_crashkit.kernel import procfs
from sglang_crashkit.model.sample import Frame, Thread, format_threads

Name = Literal["cuda-gdb", "gdb"]

#: Where the CUDA toolkit puts it without adding it to PATH.
TOOLKITS = ("/usr/local/cuda/bin", "/opt/cuda/bin")
#: Nothing of the target's or the user's is run or asked for, and no server of symbols is waited for.
_BEFORE = ("debuginfod enabled off", "auto-load off", "confirm off", "pagination off", "width 0")
_CUDA = ("info cuda devices", "info cuda kernels")
_STACKS = "thread apply all bt"
#: What gdb takes of memory for the symbols of one process: of torch's libraries alone more than a gigabyte.
_BYTES_EACH = 4 << 30
GET_CUDA_GDB = "apt-get install cuda-gdb-13-0 (NVIDIA's packages) or nvidia-cuda-gdb (Debian's and Ubuntu's)"
GET_GDB = "apt-get install gdb"
SUBSTITUTE = "py-spy --native"
MAY_TRACE = "run it as root or with CAP_SYS_PTRACE (docker run --cap-add=SYS_PTRACE)"
#: Debuggers ask these servers for symbols; cuda-gdb does so whatever its settings say.
_SYMBOL_SERVERS = "DEBUGINFOD_URLS"
_LIBRARY = re.compile(r"([\w.+-]+?\.so)(?:\.[\w.]+)?$")
#: A frame of Python's may be told by its source file, and threads that run no Python are not py-spy's.
_OFTEN = frozenset(
    {"libc.so", "libstdc++.so", "libnccl.so", "libcuda.so", "libcudart.so"}
    | {f"libpython3.{minor}.so" for minor in range(10, 15)}
)
#: py-spy takes 1 to 2 s with native frames, of a scheduler on a busy machine 6.
_SPY_SECS = 15.0
_REFUSED = "ptrace: Operation not permitted"
_NOT_RUN = "not run: "
_NO_TURN = f"{_NOT_RUN}called off before its turn"
_THREAD = re.compile(r'^Thread \d+ \((?:Thread 0x[0-9a-f]+ )?\(?(?:LWP |process )(\d+)\)?(?: "(.*)")?\):$')
_FRAME = re.compile(r"^#\d+ +(?:0x[0-9a-f]+ in )?(.+)$")
_PLACE = re.compile(r"(?s)^(?P<function>.*?)(?: at (?P<file>[^:]+):(?P<line>\d+)| from (?P<library>\S+))?$")
#: A row of the table ends with the dimensions of grid and block (and cluster), then the kernel with its arguments.
_KERNEL = re.compile(r"^[\s*]*\d+\s.*?(?:\(\d+,\d+,\d+\)\s+){2,3}(\S.*)$")
_VALUES = re.compile(r"(?:\((?:[^()]|\([^()]*\))*\)| parms=.*)\s*$")
#: gdb prints a frame's arguments in parentheses behind its function's name, which may hold some itself.
_ARGUMENTS = re.compile(r" \((?:.*)\)$")
MAX_NAME = 200
#: Names of templates are long, and what else is longer is hostile.
_MAX_LINE = 2000


@dataclass(frozen=True)
class Debugger:
    """A debugger that is installed."""

    name: Name
    path: str  # its executable
    gdb: str = ""  # of cuda-gdb: the executable of gdb, where that is installed, too


@dataclass(frozen=True)
class Debugged:
    """What came of taking the native stacks of one process."""

    tool: str  # what took them, or would have; see `Debugger`, or py-spy in its place
    text: str = ""  # what it printed
    problem: str = ""  # why that is not all, or nothing; empty where it is all
    seconds: float = 0.0  # how long it took; 0 where it was not run
    threads: tuple[Thread, ...] = ()  # the stacks in it, innermost frame first
    kernels: tuple[str, ...] = ()  # the names of the CUDA kernels in it


def find_debugger(environ: Mapping[str, str] | None = None) -> tuple[Debugger | None, str]:
    """Return the debugger to use, None if absent, and what is missing and how to get it.

    It is looked for by `environ`, this process's own by default.
    """
    environ = os.environ if environ is None else environ
    homes = [f"{environ[name]}/bin" for name in ("CUDA_HOME", "CUDA_PATH") if environ.get(name)]
    search = os.pathsep.join([environ.get("PATH", ""), *homes, *TOOLKITS])
    gdb = shutil.which("gdb", path=search)
    if cuda_gdb := shutil.which("cuda-gdb", path=search):
        return Debugger("cuda-gdb", cuda_gdb, gdb or ""), ""
    if gdb:
        return Debugger("gdb", gdb), f"cuda-gdb is not installed, so CUDA kernels are not listed; next: {GET_CUDA_GDB}"
    return None, f"neither cuda-gdb nor gdb is installed; next: {GET_GDB}, or {GET_CUDA_GDB}"


def find_cuda_gdb() -> str | None:
    """Return the executable of cuda-gdb, None where it is not installed."""
    debugger, _missing = find_debugger()
    return debugger.path if debugger is not None and debugger.name == "cuda-gdb" else None


def own_environ() -> dict[str, str]:
    """Return the environment of a debugger: this process's, without the servers of symbols."""
    return {name: value for name, value in os.environ.items() if name != _SYMBOL_SERVERS}


def _debug(
    debugger: Debugger, pid: int, start_ticks: int, deadline_secs: float, stop: threading.Event, guard: ToolGuard
) -> Debugged:
    """Debug process `pid` for at most `deadline_secs` seconds, where nothing speaks against stopping it.

    `stop` calls it off when it is set, and `guard` ends the debugger where this process is killed. Where cuda-gdb
    prints no stack, as Debian's 11.8 does, or one that does not start, gdb takes them in the time that is left.
    """
    began = time.monotonic()
    debugged = _run(debugger, pid, start_ticks, deadline_secs, stop, guard)
    left_secs = began + deadline_secs - time.monotonic()
    is_refused = debugged.problem.startswith(_NOT_RUN) or _REFUSED in debugged.text
    if not debugger.gdb or debugged.threads or is_refused or left_secs <= 0:
        return debugged
    stacks = _run(Debugger("gdb", debugger.gdb), pid, start_ticks, left_secs, stop, guard)
    seconds = round(debugged.seconds + stacks.seconds, 3)
    if not parse_stacks(stacks.text):
        return replace(debugged, seconds=seconds)
    text = f"{debugged.text}\n== {debugged.problem}; gdb:\n{stacks.text}"
    return replace(stacks, text=text, seconds=seconds, kernels=debugged.kernels)


def _run(
    debugger: Debugger, pid: int, start_ticks: int, deadline_secs: float, stop: threading.Event, guard: ToolGuard
) -> Debugged:
    if stop.is_set():
        return Debugged(debugger.name, problem=_NO_TURN)
    if obstacle := obstacle_of(pid, start_ticks):
        return Debugged(debugger.name, problem=f"{_NOT_RUN}{obstacle}")
    spied: tuple[Thread, ...] = ()
    if debugger.name == "gdb" and procfs.is_python(pid):
        samples, _obstacles = capture_native({pid: start_ticks}, min(_SPY_SECS, deadline_secs), guard)
        spied = samples[0].threads if samples else ()
    command = command_of(debugger, pid, _libraries_of(pid, spied))
    with guard.over(pid, start_ticks) as on_start:
        run = run_tool(command, deadline_secs, stop, on_start, environ=own_environ())
        # One that ended by itself has let go by itself.
        left_stopped = run.reason and release({pid: start_ticks})
    problem = f"it may not be traced; next: {MAY_TRACE}" if _REFUSED in run.text else run.reason
    if left_stopped:
        problem += "; it left the process stopped, which was sent SIGCONT"
    threads = parse_stacks(run.text)
    if not threads and not problem:
        problem = f"{debugger.name} printed no stack"
    return Debugged(debugger.name, run.text, problem, run.seconds, threads or spied, parse_kernels(run.text))


def debug_all(
    debugger: Debugger,
    processes: Mapping[int, int],
    deadline_secs: float,
    take: Callable[[int, Debugged], None],
    within_secs: float = threading.TIMEOUT_MAX,
) -> None:
    """Debug processes, given with their start times, as many at a time as this host has room for.

    One may take `deadline_secs` from its own start; after `within_secs` all are called off, of which py-spy's part may
    take some seconds longer. `take` is called with each pid and what came of it, as it ends; when this is interrupted,
    with what each has printed by then.
    """
    stop = threading.Event()
    until = time.monotonic() + within_secs
    left: dict[Future[Debugged], int] = {}
    with contextlib.closing(ToolGuard()) as guard, ThreadPoolExecutor(max_at_once()) as pool:
        try:
            for pid, start_ticks in processes.items():
                left[pool.submit(_debug, debugger, pid, start_ticks, deadline_secs, stop, guard)] = pid
            while left and (secs := until - time.monotonic()) > 0:
                for future in wait(left, secs, FIRST_COMPLETED).done:
                    take(left.pop(future), future.result())
        finally:
            stop.set()
            for future, pid in left.items():
                take(pid, future.result())


def max_at_once() -> int:
    """Return how many debuggers this host has the cores and the memory for, at least one."""
    cores = len(os.sched_getaffinity(0))
    available = procfs.available_bytes()
    return max(1, cores if available is None else min(cores, available // _BYTES_EACH))


def substitute(processes: Mapping[int, int], deadline_secs: float) -> dict[int, Debugged]:
    """Take native stacks with py-spy within `deadline_secs`, of those processes that may be stopped for it."""
    with contextlib.closing(ToolGuard()) as guard:
        samples, obstacles = capture_native(processes, deadline_secs, guard)
    found = {pid: Debugged(SUBSTITUTE, problem=f"{_NOT_RUN}{obstacle}") for pid, obstacle in obstacles.items()}
    for one in samples:
        threads = one.threads
        text = "\n".join(format_threads(procfs.read_title(one.pid), one.pid, threads)) if threads else ""
        found[one.pid] = Debugged(SUBSTITUTE, text, one.problem, one.seconds, threads)
    return found


def command_of(debugger: Debugger, pid: int, libraries: Sequence[str] = ()) -> list[str]:
    """Return the debugger's command line for process `pid`.

    Symbols are read of the `libraries` with these names, up to ``.so``; of all if there are no names.
    """
    # Arguments of functions may be prompts or keys.
    command = begin_command(debugger.path, "print frame-arguments none", *(["auto-solib-add off"] if libraries else ()))
    command += ["-p", str(pid)]
    if libraries:
        command += ["-ex", f"echo \\n== symbols of {' '.join(libraries)} only\\n"]
    for library in libraries:
        # A regular expression on the path, in which re.escape would make "+" an operator.
        command += ["-ex", "sharedlibrary /" + library.replace(".", r"\.")]
    for listing in (*(_CUDA if debugger.name == "cuda-gdb" else ()), _STACKS):
        command += ["-ex", f"echo \\n== {listing}\\n", "-ex", listing]
    return command


def begin_command(program: str, *settings: str) -> list[str]:
    """Return the begin of a debugger's command line, with the settings that each has and these."""
    return [program, "-nx", "-batch", *(word for one in (*_BEFORE, *settings) for word in ("-iex", f"set {one}"))]


def _libraries_of(pid: int, threads: Sequence[Thread]) -> list[str]:
    """Return the names of the libraries on the stacks, and of those that other threads mostly are in, up to ``.so``.

    What follows may differ: a process maps a file, and gdb knows it by the name of the link to it.
    """
    found = _names_of(frame.file for thread in threads for frame in thread.frames)
    return sorted(found | {name for name in _names_of(procfs.mapped_files(pid)) if name in _OFTEN}) if found else []


def _names_of(paths: Iterable[str]) -> set[str]:
    matches = (_LIBRARY.match(Path(path).name[:_MAX_LINE]) for path in paths)
    return {match[1] for match in matches if match}


def parse_stacks(text: str) -> tuple[Thread, ...]:
    """Return the stacks in the output of ``thread apply all bt``, innermost frame first; empty if absent."""
    threads: list[tuple[str, int, list[Frame]]] = []
    is_inside = False
    for line in text.splitlines():
        line = line[:_MAX_LINE]
        if started := _THREAD.match(line):
            threads.append((started[2] or "", int(started[1]), []))
        elif is_inside and (found := _FRAME.match(line)):
            threads[-1][2].append(_frame(found[1]))
        # An empty line ends a thread.
        is_inside = bool(started) or (is_inside and bool(line.strip()))
    return tuple(Thread(name, id_, False, False, tuple(frames)) for name, id_, frames in threads if frames)


def _frame(text: str) -> Frame:
    match = _PLACE.match(text)
    assert match is not None
    function = _ARGUMENTS.sub("", match["function"])[:MAX_NAME]
    return Frame(function, match["file"] or match["library"] or "", int(match["line"] or 0))


def parse_kernels(text: str) -> tuple[str, ...]:
    """Return the kernels in the output of ``info cuda kernels``, each once, without the values of their arguments."""
    rows = (_KERNEL.match(line[:_MAX_LINE]) for line in text.splitlines())
    names = (_VALUES.sub("", row[1]).strip()[:MAX_NAME] for row in rows if row)
    return tuple(dict.fromkeys(name for name in names if name))
