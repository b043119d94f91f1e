"""Make sure that a tool which stops its target runs only on a suitable process, and does not leave it stopped.

A target must stop at once, and no other tool may trace it. Even if the tool fails, the target continues afterwards.
ptrace(2): attaching sends each thread a SIGSTOP. If the tracer dies before it has handled that signal, the thread stops
the whole process when it receives it. SIGCONT cancels all pending stops of a process.

A tool whose parent has died would hold its target until the tool ends. To kill it with its parent is not enough: of 60
tools that were killed while they attached to 60 threads or read their stacks, 3 left the target stopped. So a separate
process, `ToolGuard`, knows tool and target; the end of a pipe shows it that their parent ended, even by SIGKILL.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

from sglang_crashkit.kernel import procfs

#: Seconds within which the kernel detaches a dead tracer from its threads.
_DETACH_SECS = 0.2
_POLL_SECS = 0.01
#: Not ``-m``, which puts the current folder first in the path, even one that another user can write to.
_CODE = """
import sys
sys.path[:] = sys.argv[1:]
from sglang_crashkit.capture import tracing
tracing.guard(sys.stdin)
"""
#: Seconds that the guard has to end when it is closed.
_END_SECS = 5.0


def stopper_of(pid: int, start_ticks: int) -> str:
    """Return why a process must not be sent a signal: it has ended, or is stopped or traced; empty if it may be."""
    stat = procfs.read_stat(pid, start_ticks)
    if stat is None or stat.state in "ZX":
        return "it has ended"
    if stat.state in "Tt":
        return "it is stopped, and must stay as it was found"
    if tracer := procfs.read_tracer(pid):
        return f"process {tracer} ({procfs.read_title(tracer)}) traces it already"
    return ""


def obstacle_of(pid: int, start_ticks: int) -> str:
    """Return why a tracer must not stop a process; empty if it may."""
    if reason := stopper_of(pid, start_ticks):
        return reason
    asleep = sorted(thread for thread, state in procfs.thread_states(pid).items() if state == "D")
    return f"thread {asleep[0]} is in uninterruptible sleep, and would not stop" if asleep else ""


def release(processes: Mapping[int, int]) -> set[int]:
    """Continue processes that a failed tracer may have left stopped, or about to stop; others continue anyway.

    `processes` has start times by pid. No process in it may have been stopped before it was traced.

    Returns:
        The pids of the processes that were stopped, or about to stop.
    """
    deadline = time.monotonic() + _DETACH_SECS
    left, stopped = dict(processes), set()
    while left:
        is_last = time.monotonic() >= deadline
        for pid, start_ticks in list(left.items()):
            if not procfs.is_running(pid, start_ticks):
                del left[pid]
            elif is_last or not any(procfs.read_tracer(pid, thread) for thread in procfs.thread_states(pid)):
                if is_stopped(pid):
                    stopped.add(pid)
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGCONT)
                del left[pid]
        if left:
            time.sleep(_POLL_SECS)
    return stopped


def is_stopped(pid: int) -> bool:
    """Return whether a thread of a process is stopped, or has a pending SIGSTOP."""
    return any(
        state == "T" or procfs.in_mask(procfs.read_status(pid, thread).get("SigPnd"), signal.SIGSTOP)
        for thread, state in procfs.thread_states(pid).items()
    )


class ToolGuard:
    """A child that guards the tools which this process runs; if it cannot be started, the tools run without it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        with contextlib.suppress(OSError):
            self._process = subprocess.Popen(
                [sys.executable, "-c", _CODE, *sys.path],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                # In a session of its own, it does not get signals to its parent's process group.
                start_new_session=True,
            )

    @contextlib.contextmanager
    def over(self, target: int, target_ticks: int) -> Iterator[Callable[[int], None]]:
        """Guard process `target`, which was not stopped before, against a tool until the end of the block.

        Returns:
            A function to call with the tool's pid, the leader of a process group, when the tool runs.
        """

        def tool_runs(tool: int) -> None:
            stat = procfs.read_stat(tool)
            self._send(f"{target} {target_ticks} {tool} {stat.start_ticks if stat is not None else 0}\n")

        try:
            yield tool_runs
        finally:
            self._send(f"{target}\n")

    def close(self) -> None:
        """End the guard."""
        if self._process is None or self._process.stdin is None:
            return
        self._process.stdin.close()
        try:
            self._process.wait(_END_SECS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(_END_SECS)

    def _send(self, line: str) -> None:
        if self._process is not None and self._process.stdin is not None:
            with self._lock, contextlib.suppress(OSError):
                self._process.stdin.write(line.encode())


def guard(lines: Iterable[str]) -> None:
    """Read the lines of a `ToolGuard`; when they end, kill the tools that are left and continue their targets."""
    left: dict[int, tuple[int, int, int]] = {}
    for line in lines:
        target, *rest = map(int, line.split())
        left.pop(target, None)
        if rest:
            target_ticks, tool, tool_ticks = rest
            left[target] = (target_ticks, tool, tool_ticks)
    for _target_ticks, tool, tool_ticks in left.values():
        if procfs.read_stat(tool, tool_ticks) is not None:
            with contextlib.suppress(OSError):
                os.killpg(tool, signal.SIGKILL)
    release({target: target_ticks for target, (target_ticks, _tool, _tool_ticks) in left.items()})
