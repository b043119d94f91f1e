"""GPU cores of the living schedulers: asked for once the cheaper evidence is there, and waited for as they grow."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence

from sglang_crashkit.core import procfs
from sglang_crashkit.core.cuda_core import CoreRequest, NoCoreError
from sglang_crashkit.core.incident import Evidence, ProcessReport
from sglang_crashkit.core.settings import Settings
from sglang_crashkit.handler.incident_run import IncidentRun
from sglang_crashkit.handler.tree import TrackedProcess

logger = logging.getLogger(__name__)

#: A core under way is looked at this often, in seconds.
_LOOK_SECS = 0.1


class Cores:
    """The cores of one incident.

    While one is written, whoever waits for the incident is told to wait on: the end of the server would cut it short.

    Args:
        run: the incident; evidence goes into its reports.
        processes: the living schedulers.
        settings: whether cores are wanted, and how long they may take.
    """

    def __init__(self, run: IncidentRun, processes: Sequence[TrackedProcess], settings: Settings) -> None:
        self._run = run
        self._began = time.monotonic()
        self._deadline = self._began + settings.core_wait_secs
        self._under_way: dict[int, tuple[TrackedProcess, CoreRequest, ProcessReport]] = {}
        for process in processes:
            self._ask(process, run.report(process), settings)
        if self._under_way:
            run.note(time.time(), "cuda_cores_asked", pids=sorted(self._under_way))

    @property
    def are_done(self) -> bool:
        """Whether nothing is waited for."""
        return not self._under_way

    @property
    def deadline(self) -> float:
        """When the wait ends at the latest, by the monotonic clock."""
        return self._deadline

    def next_due(self) -> float:
        """Return when `look` has something to do, by the monotonic clock."""
        return float("inf") if self.are_done else min(self._deadline, time.monotonic() + _LOOK_SECS)

    def look(self) -> None:
        """See which cores are whole by now, and give up those whose time is over."""
        for pid, (process, request, report) in list(self._under_way.items()):
            reason = ""
            try:
                path = request.look()
                if path is not None:
                    os.chmod(path, 0o600)  # noqa: PTH101
                    relative = os.path.relpath(path, self._run.path)
                    self._end(pid, report, Evidence("cuda_core", "captured", path=relative))
                    continue
            except (NoCoreError, OSError) as error:
                reason = str(error)
            if not reason and process.handle.has_exited():
                reason = f"it ended while its core was written: {request.leftover()}"
            if not reason and time.monotonic() >= self._deadline:
                secs = self._deadline - self._began
                reason = f"not whole within {secs:g} s: {request.leftover()}"
            if reason:
                self._end(pid, report, Evidence("cuda_core", "failed", reason=reason))

    def give_up(self, reason: str) -> None:
        """Wait no longer, for a reason that is noted."""
        for pid, (_process, request, report) in list(self._under_way.items()):
            self._end(pid, report, Evidence("cuda_core", "failed", reason=f"{reason}: {request.leftover()}"))

    def _ask(self, process: TrackedProcess, report: ProcessReport, settings: Settings) -> None:
        stat = procfs.read_stat(process.pid)
        if not settings.cores:
            reason = "switched off by SGLANG_CUDA_COREDUMP_BEFORE_CRASH"
        elif any(piece.kind == "exception" for piece in report.evidence):
            reason = "it raised an exception, and ends by itself"
        elif stat is not None and stat.state in "Tt":
            reason = "it is stopped, so that nobody reads its pipe"
        elif settings.core_wait_secs <= 0:
            reason = "SGLANG_CUDA_COREDUMP_BEFORE_CRASH_WAIT_SECS leaves no time for it"
        else:
            request = CoreRequest(process.pid)
            try:
                request.send()
            except NoCoreError as error:
                reason = str(error)
            else:
                logger.info("GPU core of process %d asked for", process.pid)
                if request.is_watchable:
                    self._under_way[process.pid] = (process, request, report)
                    return
                reason = "asked for, but CUDA_COREDUMP_FILE is no file that could be watched"
        report.evidence.append(Evidence("cuda_core", "skipped", reason=reason))

    def _end(self, pid: int, report: ProcessReport, piece: Evidence) -> None:
        piece.seconds = round(time.monotonic() - self._began, 3)
        report.evidence.append(piece)
        del self._under_way[pid]
