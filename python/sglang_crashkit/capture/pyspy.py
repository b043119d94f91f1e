"""Take the stacks of Python processes with py-spy, of all in parallel, each within a deadline.

``--nonblocking`` reads the target's memory without pausing it: it works on a stopped process and never waits for a
thread in uninterruptible sleep. A snapshot of a running process may be inconsistent; py-spy then reports an error, and
is run again. ``--native`` stops the target while it reads, so it is run only on a process that may be stopped; see
`tracing`.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Literal

from sglang_crashkit.capture.tools import run_tool
from sglang_crashkit.capture.tracing import ToolGuard, is_stopped, obstacle_of, release
from sglang_crashkit.model.sample import Sample, Thread, are_whole, main_thread, parse_pyspy

EXECUTABLE_VARIABLE = "SGLANG_CRASHKIT_PYSPY"

Mode = Literal["--nonblocking", "--native"]

#: How often to run py-spy: a snapshot of a running process may be inconsistent, one of a paused process is not.
_ATTEMPTS: dict[Mode, int] = {"--nonblocking": 6, "--native": 1}
#: How often to run py-spy for a complete main thread: if lists of threads or frames change while it reads, it may omit
#: that thread or its outermost frames without an error. An interpreter that is shutting down has no complete one.
_ATTEMPTS_AT_MAIN_THREAD = 3
#: How many py-spy may run in parallel on any machine: as many as a host has ranks, some of which may be slow to read.
_LEAST_AT_ONCE = 8
#: The most bytes of output. Two hundred threads a hundred frames deep take 6 MB.
MAX_OUTPUT = 16 << 20


def find_pyspy() -> str | None:
    """Return py-spy's executable, None if absent.

    It is the value of ``SGLANG_CRASHKIT_PYSPY`` if set, else beside this interpreter, else the first on PATH.
    """
    named = os.environ.get(EXECUTABLE_VARIABLE)
    if named:
        return named
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if beside.exists() else shutil.which("py-spy")


def sample_all(
    pids: Iterable[int],
    deadline_secs: float,
    mode: Mode = "--nonblocking",
    on_start: Mapping[int, Callable[[int], None]] | None = None,
    stop: threading.Event | None = None,
) -> list[Sample]:
    """Take the stacks of all of `pids` in parallel; return a result for each, in the order given.

    If they are too many to run at once, they run in turns, and each turn gets an equal part of the time that is left.
    So a py-spy that blocks, for example in uninterruptible sleep, does not cost another process its turn.

    py-spy is killed after `deadline_secs`, and when `stop` is set. `on_start` has a function for each process, which is
    called with the pid of its py-spy, the leader of a process group.
    """
    since, call_off = time.monotonic(), stop or threading.Event()
    wanted, path = list(dict.fromkeys(pids)), find_pyspy()
    if path is None:
        return [Sample(pid=pid, problem="py-spy is not installed; next: pip install py-spy") for pid in wanted]

    # If many run at once on few cores, none ends in time; if they take turns, most do.
    at_once = max(1, min(len(wanted), max(_LEAST_AT_ONCE, 4 * len(os.sched_getaffinity(0)))))

    def take(pid: int, turns: int) -> Sample:
        threads: tuple[Thread, ...] = ()
        problem = ""
        secs, start = deadline_secs, since
        if turns > 1:
            start = time.monotonic()
            secs = round(max(0.0, since + deadline_secs - start) / turns, 2)
        for attempt in range(1, _ATTEMPTS[mode] + 1):
            run = run_tool(
                [path, "dump", mode, "--json", "--pid", str(pid)],
                secs,
                call_off,
                (on_start or {}).get(pid),
                since=start,
                apart=True,
                max_output=MAX_OUTPUT,
            )
            said = next((line.strip() for line in run.errors.splitlines() if line.strip()), "")
            problem = said.removeprefix("Error: ")[:300] or run.reason
            if run.status == 0:
                try:
                    taken, problem = parse_pyspy(run.text), ""
                    threads = max(threads, taken, key=lambda some: _worth(some, pid))
                except ValueError as error:
                    problem = f"py-spy's output: {error}"
            if run.status is None:
                problem = run.reason or problem
                break
            if all(_worth(threads, pid)) or (threads and attempt >= _ATTEMPTS_AT_MAIN_THREAD):
                break
        if threads:
            problem = ""
        return Sample(pid=pid, threads=threads, problem=problem, seconds=round(time.monotonic() - since, 4))

    turns = math.ceil(len(wanted) / at_once)
    taken: list[Future[Sample] | Sample] = []
    with ThreadPoolExecutor(at_once) as pool:
        try:
            for begun, pid in enumerate(wanted):
                try:
                    taken.append(pool.submit(take, pid, turns - begun // at_once))
                except RuntimeError as error:
                    # For example at a container's limit of processes, which may be why the server died.
                    taken.append(Sample(pid=pid, problem=f"py-spy: {error}"))
            return [one.result() if isinstance(one, Future) else one for one in taken]
        finally:
            # If this is interrupted, do not wait for the rest.
            if stop is None:
                call_off.set()


def capture_native(
    processes: Mapping[int, int],
    deadline_secs: float,
    guard: ToolGuard | None = None,
    stop: threading.Event | None = None,
) -> tuple[list[Sample], dict[int, str]]:
    """Take the native and Python stacks, in parallel, of the processes that may be stopped for it.

    `processes` has start times by pid. `guard` ends py-spy if this process is killed; setting `stop` ends it, too.

    Returns:
        A sample for each process on which py-spy was run, and for each other process, by pid, why it was not.
    """
    obstacles = {pid: obstacle_of(pid, start_ticks) for pid, start_ticks in processes.items()}
    wanted = [pid for pid, obstacle in obstacles.items() if not obstacle]
    uncertain = wanted
    with contextlib.ExitStack() as stack:
        on_start = {pid: stack.enter_context(guard.over(pid, processes[pid])) for pid in wanted} if guard else {}
        try:
            results = sample_all(wanted, deadline_secs, "--native", on_start, stop)
            # A py-spy that ended well has detached by itself.
            uncertain = [one.pid for one in results if not one.threads or is_stopped(one.pid)]
        finally:
            # If this is interrupted, py-spy was killed, so that any target may still be stopped.
            stopped = release({pid: processes[pid] for pid in uncertain})
    note = "py-spy left it stopped; it was sent SIGCONT"
    results = [
        replace(one, problem="; ".join(filter(None, (one.problem, note)))) if one.pid in stopped else one
        for one in results
    ]
    return results, {pid: obstacle for pid, obstacle in obstacles.items() if obstacle}


def _worth(threads: Sequence[Thread], pid: int) -> tuple[bool, bool, bool]:
    """Return whether there are threads, whether they include the main thread, and whether that one is complete."""
    main = main_thread(threads, pid)
    return bool(threads), main is not None, main is not None and are_whole(main.frames)
