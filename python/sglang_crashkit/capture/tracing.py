"""What a tool that stops its target must not do to it: be run on the wrong one, or leave it stopped.

A target must stop at once, and no other tool may hold it. Whatever becomes of the tool, the target runs on afterwards.
ptrace(2): attaching sends each thread a SIGSTOP; where the tracer dies before it has dealt with it, the thread stops
the whole process when it gets to it. SIGCONT takes back every stop that is ahead of a process.

A tool whose parent is gone would hold its target for as long as it takes. Killing it with its parent is not enough: of
60 that were killed while they attached to 60 threads or read their stacks, 3 left the target stopped. So a process
beside them, `ToolGuard`, knows both; it hears of their parent's end, SIGKILL included, by the end of a pipe.
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

#: The kernel detaches a dead tracer from its threads within this time, in seconds.
_DETACH_SECS = 0.2
_POLL_SECS = 0.01
#: With ``-m`` the current folder would come first, whichever user may write to it.
_CODE = """
import sys
sys.path[:] = sys.argv[1:]
from sglang_crashkit.capture import tracing
tracing.guard(sys.stdin)
"""
#: So long the guard has to end once there is nothing to guard, in seconds.
_END_SECS = 5.0


def stopper_of(pid: int, start_ticks: int) -> str:
    """Return why a process can take no signal, or does not run on; empty where nothing speaks against a signal."""
    stat = procfs.read_stat(pid, start_ticks)
    if stat is None or stat.state in "ZX":
        return "it has ended"
    if stat.state in "Tt":
        return "it is stopped, and must stay as it was found"
    if tracer := procfs.read_tracer(pid):
        return f"process {tracer} ({procfs.read_title(tracer)}) traces it already"
    return ""


def obstacle_of(pid: int, start_ticks: int) -> str:
    """Return why a process must not be stopped by a tracer, empty where nothing speaks against it."""
    if reason := stopper_of(pid, start_ticks):
        return reason
    asleep = sorted(thread for thread, state in procfs.thread_states(pid).items() if state == "D")
    return f"thread {asleep[0]} is in uninterruptible sleep, and would not stop" if asleep else ""


def release(processes: Mapping[int, int]) -> set[int]:
    """Continue what a tracer that failed left stopped, or about to stop; SIGCONT does nothing to what is neither.

    None of the processes, given with their start times, was stopped before it was traced.

    Returns:
        The pids of those that were found stopped, or asked to stop.
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
    """Say whether a thread of a process is stopped, or is about to be."""
    return any(
        state == "T" or procfs.in_mask(procfs.read_status(pid, thread).get("SigPnd"), signal.SIGSTOP)
        for thread, state in procfs.thread_states(pid).items()
    )


class ToolGuard:
    """A guard for the tools that this process runs; where none can be started, they run without."""

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
                # What is sent to the group of its parent is not for it.
                start_new_session=True,
            )

    @contextlib.contextmanager
    def over(self, target: int, target_ticks: int) -> Iterator[Callable[[int], None]]:
        """Guard what a tool does to process `target`, which was not stopped before, to the end of the block.

        Returns:
            What is to be called with the pid of the tool, which leads a process group, once it runs.
        """

        def tool_runs(tool: int) -> None:
            stat = procfs.read_stat(tool)
            self._send(f"{target} {target_ticks} {tool} {stat.start_ticks if stat is not None else 0}\n")

        try:
            yield tool_runs
        finally:
            self._send(f"{target}\n")

    def close(self) -> None:
        """End it."""
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
    """Read what a `ToolGuard` sends; when it ends, end the tools that are left and continue their targets."""
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
