"""What cuda-gdb says of the schedulers of a server that hangs: their kernels and their native stacks.

It is the last of all that is taken: it stops a process for as long as it reads, and no core can be written while it is
attached. So it comes after the cores, only to a process of which one was written, within what is left of the incident's
time, and a process that it did not let go of is let go on; see `capture.debugger`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Literal

from sglang_crashkit.capture.debugger import GET_CUDA_GDB, Debugged, Debugger, debug, find_debugger, most_at_once
from sglang_crashkit.errors import CrashkitError
from sglang_crashkit.handler.incident import IncidentRun
from sglang_crashkit.handler.processes import TrackedProcess
from sglang_crashkit.incident.retention import status_of
from sglang_crashkit.kernel import titles
from sglang_crashkit.model.incident import Evidence, ProcessReport

logger = logging.getLogger(__name__)

#: To attach and to let go alone takes cuda-gdb seconds.
_LEAST_SECS = 3.0


class GpuStacks:
    """What cuda-gdb says in one incident; it is run beside the handler, which asks `look`.

    Args:
        run: the incident; evidence goes into its reports.
        processes: the schedulers.
        seconds: the longest that all of it may take.
    """

    def __init__(self, run: IncidentRun, processes: Sequence[TrackedProcess], seconds: float) -> None:
        self._run = run
        self._deadline = time.monotonic() + seconds
        self._stop = threading.Event()
        self._under_way: list[tuple[Future[Debugged], ProcessReport]] = []
        debugger, _missing = find_debugger()
        reason = ""
        if debugger is None or debugger.name != "cuda-gdb":
            reason = f"cuda-gdb is not installed; next: {GET_CUDA_GDB}"
        elif seconds < _LEAST_SECS:
            reason = "SGLANG_CRASHKIT_BUDGET_SECS leaves no time for cuda-gdb"
        for process in processes if reason else ():
            run.report(process).evidence.append(Evidence("gpu_stack", "skipped", reason=reason))
        if reason or debugger is None or not processes:
            return
        pool = ThreadPoolExecutor(most_at_once(), thread_name_prefix="cuda-gdb")
        for process in processes:
            future = pool.submit(self._debug, debugger, process.pid, process.handle.start_ticks)
            self._under_way.append((future, run.report(process)))
        # What was submitted is done nonetheless.
        pool.shutdown(wait=False)

    @property
    def are_done(self) -> bool:
        """Whether nothing is waited for."""
        return not self._under_way

    @property
    def attached(self) -> frozenset[int]:
        """The processes that cuda-gdb may hold now."""
        return frozenset(report.pid for _future, report in self._under_way)

    def look(self) -> None:
        """Take in what there is by now."""
        for entry in list(self._under_way):
            future, report = entry
            if future.done():
                self._under_way.remove(entry)
                try:
                    debugged = future.result()
                except Exception as error:  # noqa: BLE001 - the debugger is a help, the incident is not to be lost
                    debugged = Debugged("cuda-gdb", problem=f"{type(error).__name__}: {error}")
                self._take(debugged, report)
                if self.are_done:
                    self._run.note(time.time(), "gpu_stacks")

    def call_off(self) -> None:
        """End it, because the processes end."""
        self._stop.set()

    def _debug(self, debugger: Debugger, pid: int, start_ticks: int) -> Debugged:
        seconds = self._deadline - time.monotonic()
        if seconds < _LEAST_SECS:
            return Debugged(debugger.name, problem="the others took all the time that there was")
        return debug(debugger, pid, start_ticks, seconds, self._stop)

    def _take(self, debugged: Debugged, report: ProcessReport) -> None:
        status: Literal["captured", "failed"] = "captured" if debugged.threads or debugged.kernels else "failed"
        piece = Evidence("gpu_stack", status, reason=debugged.problem or None, seconds=debugged.seconds)
        piece.source = debugged.tool
        if debugged.text:
            name = f"gpu/{titles.label_of(report.title, report.pid)}.cuda-gdb.txt"
            try:
                piece.path = self._run.folder.write_text(name, debugged.text)
            except (OSError, CrashkitError) as error:
                piece = Evidence("gpu_stack", status_of(error), reason=f"{name}: {error}", seconds=debugged.seconds)
        report.evidence.append(piece)
        if not report.gpu:
            # What the core said is told with its places; these are names alone.
            report.gpu = [f"kernel {name}, by cuda-gdb" for name in debugged.kernels]
