"""Native stacks: py-spy with ``--native``, which stops its target while it reads.

It is run only on a target that will stop at once and that nobody else holds, and whatever becomes of py-spy, the target
runs on afterwards. ptrace(2): attaching sends each thread a SIGSTOP; where the tracer dies before it has dealt with it,
the thread stops the whole process when it gets to it. SIGCONT takes back every stop that is ahead of a process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from sglang_crashkit.capture.pyspy import sample_all
from sglang_crashkit.kernel import procfs
from sglang_crashkit.model.sample import Sample

if TYPE_CHECKING:
    from sglang_crashkit.capture.tool_guard import ToolGuard

#: The kernel lets go of the threads of a dead tracer within this time, in seconds.
_LET_GO_SECS = 0.2
_POLL_SECS = 0.01


def capture_native(
    processes: Mapping[int, int], deadline_secs: float, guard: ToolGuard | None = None
) -> tuple[list[Sample], dict[int, str]]:
    """Take the native and Python stacks of those processes that may be stopped for it, side by side.

    Args:
        processes: start time of each process by its pid; see `procfs.ProcStat`.
        deadline_secs: the longest that it may take, in seconds.
        guard: ends py-spy where this process is killed.

    Returns:
        A result for each process that was tried, and why each other one was not.
    """
    obstacles = {pid: obstacle_of(pid, start_ticks) for pid, start_ticks in processes.items()}
    wanted = [pid for pid, obstacle in obstacles.items() if not obstacle]
    uncertain = wanted
    with contextlib.ExitStack() as stack:
        tool_runs = {pid: stack.enter_context(guard.over(pid, processes[pid])) for pid in wanted} if guard else {}

        def on_start(pid: int, tool: int) -> None:
            if pid in tool_runs:
                tool_runs[pid](tool)

        try:
            samples = sample_all(wanted, deadline_secs, mode="--native", on_start=on_start)
            # One that ended well has let go by itself.
            uncertain = [one.pid for one in samples if not one.threads or _is_stopped(one.pid)]
        finally:
            # Where this is interrupted, py-spy was killed.
            stopped = release({pid: processes[pid] for pid in uncertain})
    results = []
    for sample in samples:
        note = "py-spy left it stopped; it was sent SIGCONT" if sample.pid in stopped else ""
        problem = "; ".join(part for part in (sample.problem, note) if part)
        results.append(replace(sample, problem=problem))
    return results, {pid: obstacle for pid, obstacle in obstacles.items() if obstacle}


def obstacle_of(pid: int, start_ticks: int) -> str:
    """Return why a process must not be stopped by a tracer, empty where nothing speaks against it."""
    stat = procfs.read_stat(pid)
    if stat is None or stat.start_ticks != start_ticks or stat.state in "ZX":
        return "it has ended"
    if stat.state in "Tt":
        return "it is stopped, and must stay as it was found"
    if tracer := procfs.read_tracer(pid):
        return f"process {tracer} ({procfs.read_title(tracer)}) traces it already"
    asleep = sorted(thread for thread, state in procfs.thread_states(pid).items() if state == "D")
    if asleep:
        return f"thread {asleep[0]} is in uninterruptible sleep, and would not stop"
    return ""


def release(processes: Mapping[int, int]) -> set[int]:
    """Let go on what a tracer that failed left stopped, or about to stop; SIGCONT does nothing to what is neither.

    Args:
        processes: start time of each process by its pid; none was stopped before it was traced.

    Returns:
        The pids of those that were found stopped, or asked to stop.
    """
    deadline = time.monotonic() + _LET_GO_SECS
    left = dict(processes)
    stopped = set()
    while left:
        is_last = time.monotonic() >= deadline
        for pid, start_ticks in list(left.items()):
            stat = procfs.read_stat(pid)
            if stat is None or stat.start_ticks != start_ticks or stat.state in "ZX":
                del left[pid]
            elif is_last or not _is_traced(pid):
                if _is_stopped(pid):
                    stopped.add(pid)
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGCONT)
                del left[pid]
        if left:
            time.sleep(_POLL_SECS)
    return stopped


def _is_traced(pid: int) -> bool:
    return any(procfs.read_tracer(pid, thread) for thread in procfs.thread_states(pid))


def _is_stopped(pid: int) -> bool:
    for thread, state in procfs.thread_states(pid).items():
        if state == "T" or procfs.in_mask(procfs.read_status(pid, thread).get("SigPnd"), signal.SIGSTOP):
            return True
    return False
