"""See to it that a tool does not outlive the process that runs it, and that its target runs on, even after SIGKILL.

A debugger whose parent is gone would hold its target stopped for as long as it takes, and so would a py-spy that reads
native stacks. Killing it with its parent is not enough: of 60 that were killed while they attached to 60 threads or
read their stacks, 3 left the target stopped (see `native_stacks`). So a process beside them knows both; it hears of
their parent's end by the end of a pipe. A py-spy that does not stop its target, which may be stopped, needs no guard.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator

from sglang_crashkit.capture.native_stacks import release
from sglang_crashkit.kernel import procfs

#: With ``-m`` the current folder would come first, whoever may write to it.
_CODE = """
import sys
sys.path[:] = sys.argv[1:]
from sglang_crashkit.capture import tool_guard
tool_guard.guard(sys.stdin)
"""
#: So long the guard has to end once there is nothing to guard, in seconds.
_END_SECS = 5.0


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
        """Guard what a tool does to a process, to the end of the block.

        Args:
            target: the process that it traces, which was not stopped before.
            target_ticks: start time of that; see `procfs.ProcStat`.

        Returns:
            What is to be called with the pid of the tool, which leads a process group, once it runs.
        """

        def tool_runs(tool: int) -> None:
            stat = procfs.read_stat(tool)
            self._tell(f"{target} {target_ticks} {tool} {stat.start_ticks if stat is not None else 0}\n")

        try:
            yield tool_runs
        finally:
            self._tell(f"{target}\n")

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

    def _tell(self, line: str) -> None:
        if self._process is not None and self._process.stdin is not None:
            with self._lock, contextlib.suppress(OSError):
                self._process.stdin.write(line.encode())


def guard(lines: Iterable[str]) -> None:
    """Read what a `ToolGuard` tells; when it ends, end the tools that are left and let go of their targets."""
    left: dict[int, tuple[int, int, int]] = {}
    for line in lines:
        target, *rest = map(int, line.split())
        left.pop(target, None)
        if rest:
            target_ticks, tool, tool_ticks = rest
            left[target] = (target_ticks, tool, tool_ticks)
    for _target_ticks, tool, tool_ticks in left.values():
        stat = procfs.read_stat(tool)
        if stat is not None and stat.start_ticks == tool_ticks:
            with contextlib.suppress(OSError):
                os.killpg(tool, signal.SIGKILL)
    release({target: target_ticks for target, (target_ticks, _tool, _tool_ticks) in left.items()})
