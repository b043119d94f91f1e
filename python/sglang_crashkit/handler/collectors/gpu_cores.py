"""GPU cores of the schedulers: asked for once the cheaper evidence is there, waited for as they grow, and read.

The server's end waits for them, so they have what `Settings.exit_secs` leaves, however they grow. A core that takes
more of the disk than it may is not waited for: the end of the server cuts it short. Each that is whole is read by a
process of its own while the handler goes on.
"""

from __future__ import annotations

import logging
import os
import shlex
import time
from collections.abc import Set
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from sglang_crashkit.capture.cuda_core.reading import CudaCore, core_in_lines, read_cuda_core
from sglang_crashkit.capture.cuda_core.trigger import CoreRequest, NoCoreError, is_whole_core
from sglang_crashkit.capture.debugger import find_cuda_gdb, max_at_once
from sglang_crashkit.errors import CrashkitError
from sglang_crashkit.handler.collectors.process_evidence import write_piece
from sglang_crashkit.handler.findings import incident_with_core
from sglang_crashkit.handler.incident import Awaited, IncidentRun
from sglang_crashkit.handler.processes import TrackedProcess
from sglang_crashkit.kernel import clock, procfs, titles
from sglang_crashkit.model.incident import Evidence, EvidenceKind, ProcessReport
from sglang_crashkit.settings import MAX_CORE, MB

logger = logging.getLogger(__name__)

#: The longest that reading a core may take, in seconds; of a GPU full of warps cuda-gdb takes about 2.
READ_SECS = 15.0
#: So many kernels of a core are in an incident.
_MAX_KERNELS = 4
#: There is to be room for so many bytes of a core; without memory in it, one of 255 MB was seen.
_CORE_BYTES = 256 << 20
#: When its core is written, the driver ends the process whose GPU failed; so long may it take to, in seconds.
_LAST_CORE_SECS = 60.0
#: Of the time that the server's end has, the share for reading the cores.
_READING_SHARE = 0.25
#: Once the server's main process is gone, its ranks write for so long yet, in seconds.
_ORPHAN_SECS = 0.5


class Cores(Awaited):
    """The cores of one incident, and what cuda-gdb says of them.

    While one is written, those who wait for the incident are told to wait on: the server's end would cut it short.
    The living schedulers are asked for one; the dead may have left one, as the driver writes by itself when the GPU
    fails.

    Args:
        run: the incident; evidence goes into its reports.
        deadline: when the server's end waits no longer, by the monotonic clock.
    """

    def __init__(self, run: IncidentRun, deadline: float) -> None:
        self._run, self._settings, self._end_at = run, run.settings, deadline
        self._began = self._grown_at = time.monotonic()
        self._last_write = deadline - min(READ_SECS, _READING_SHARE * self._settings.exit_secs)
        self._written: dict[int, int] = {}
        self._cuda_gdb = find_cuda_gdb()
        self._pool = ThreadPoolExecutor(max_at_once(), thread_name_prefix="cuda-gdb")
        self._readings: list[tuple[Future[CudaCore], Path, ProcessReport, float]] = []
        self._under_way: dict[int, tuple[TrackedProcess, CoreRequest, ProcessReport]] = {}
        self._expected_bytes = 0
        schedulers = [process for process in run.tree if process.role == "scheduler"]
        # One that had not got so far as to use its GPUs has nothing to tell.
        is_asked = run.incident.kind != "failed_start" and run.tree.root.exited_at is None
        living = [process for process in schedulers if is_asked and process.exited_at is None]
        wanted = living and self._settings.cores
        known = (run.incident, run.folder, self._settings.full_per_fault)
        self._earlier = incident_with_core(*known) if wanted else None
        for process in living:
            self._ask(process, run.report(process))
        if self._under_way:
            run.note(clock.now(), "cuda_cores_asked", pids=sorted(self._under_way))
        for process in schedulers:
            if process.exited_at is not None:
                self._take_left_behind(process, CoreRequest(process.pid), run.report(process))

    @property
    def is_done(self) -> bool:
        """Whether nothing is waited for."""
        return not self._under_way and not self._readings

    @property
    def secs_left(self) -> float:
        """How long it takes yet, unless a core grows on, in seconds."""
        return max(0.0, min(self._wait_end + READ_SECS, self._end_at) - time.monotonic())

    def pids_of(self, kind: EvidenceKind) -> Set[int]:
        """Return the processes that write a core now, which a signal may spoil."""
        return self._under_way.keys() if kind == "cuda_core" else frozenset()

    def look(self) -> None:
        """See which cores are whole by now, give up those whose time is over, and take in what was read."""
        # Of any: they share the disk, and the GPU of one may be busy with what the other waits for.
        for pid, (_process, request, _report) in self._under_way.items():
            written = request.written
            if written > self._written.get(pid, 0):
                self._grown_at = time.monotonic()
            self._written[pid] = written
        for pid, (process, request, report) in list(self._under_way.items()):
            # Asked before the look: the driver ends the process whose GPU failed as soon as its core is whole.
            reason, has_ended = "", process.handle.has_exited()
            try:
                path = request.look(has_ended=has_ended)
                if path is not None:
                    self._keep(path, report, round(time.monotonic() - self._began, 3))
                    del self._under_way[pid]
                    continue
            except (NoCoreError, OSError) as error:
                reason = str(error)
            if has_ended:
                reason = f"it ended while its core was written: {reason or request.leftover()}"
            if not reason and time.monotonic() >= self._wait_end:
                reason = f"{self._how_long()}: {request.leftover()}"
            if reason:
                self._end(pid, report, Evidence("cuda_core", "failed", reason=reason))
        self._see_to_the_disk()
        gone_at = self._run.tree.root.exited_at
        if gone_at is not None and clock.now() >= gone_at + _ORPHAN_SECS:
            self.give_up("the server ended")
        for reading in [one for one in self._readings if one[0].done()]:
            self._readings.remove(reading)
            self._take(*reading)

    def give_up(self, reason: str) -> None:
        """Wait no longer for what is not whole yet, for a reason that is noted."""
        for pid, (_process, request, report) in list(self._under_way.items()):
            self._end(pid, report, Evidence("cuda_core", "failed", reason=f"{reason}: {request.leftover()}"))

    @property
    def _wait_end(self) -> float:
        return min(self._grown_at + self._settings.core_wait_secs, self._last_write)

    def _see_to_the_disk(self) -> None:
        """Give all of them up where one takes more of the disk than it may: only the server's end ends its writing."""
        sizes = {pid: request.size_on_disk for pid, (_process, request, _report) in self._under_way.items()}
        longest = max(sizes, key=lambda pid: sizes[pid], default=None)
        if longest is None:
            return
        most = self._settings.disk.max_core
        if sizes[longest] > most:
            which = f"that of process {longest} takes more than {MAX_CORE} ({most / MB:g} MB)"
        else:
            folder = self._under_way[longest][1].folder
            which = "" if self._run.problem else self._run.folder.make_room_beside(folder, 0)
        if which:
            logger.warning("GPU cores are cut short: %s", which)
            self._run.note(clock.now(), "cuda_cores_cut_short", reason=which, bytes=sizes)
            self.give_up(f"cut short, {which}")

    def _how_long(self) -> str:
        wait_secs, exit_secs = self._settings.core_wait_secs, self._settings.exit_secs
        if self._grown_at + wait_secs <= self._last_write:
            return f"not whole, and nothing was written for {wait_secs:g} s"
        return f"cut short, as the server's end waits no longer than SGLANG_CRASHKIT_EXIT_SECS ({exit_secs:g} s)"

    def _ask(self, process: TrackedProcess, report: ProcessReport) -> None:
        settings, stat, request = self._settings, procfs.read_stat(process.pid), CoreRequest(process.pid)
        if self._expects_own(process, request, report):
            return
        if not settings.cores:
            reason = "switched off by SGLANG_CUDA_COREDUMP_BEFORE_CRASH"
        elif self._earlier is not None:
            reason = f"the same fault as in incident {self._earlier}, which has its cores"
        elif any(piece.kind == "exception" for piece in report.evidence):
            reason = "it raised an exception, and ends by itself"
        elif stat is not None and stat.state in "Tt":
            reason = "it is stopped and reads no pipe"
        elif settings.core_wait_secs <= 0:
            reason = "SGLANG_CUDA_COREDUMP_BEFORE_CRASH_WAIT_SECS leaves no time for it"
        elif time.monotonic() >= self._last_write:
            reason = f"SGLANG_CRASHKIT_EXIT_SECS ({settings.exit_secs:g} s) leaves no time for it"
        else:
            reason = self._trigger(request)
            if not reason:
                if request.is_watchable:
                    self._under_way[process.pid] = (process, request, report)
                    return
                reason = "asked for, but CUDA_COREDUMP_FILE is no file that could be watched"
        report.evidence.append(Evidence("cuda_core", "skipped", reason=reason))

    def _expects_own(self, process: TrackedProcess, request: CoreRequest, report: ProcessReport) -> bool:
        """Say whether the driver has written a core unasked, or writes one, which is taken in then."""
        if request.is_watchable and request.join():
            logger.info("process %d writes a GPU core by itself", process.pid)
            self._under_way[process.pid] = (process, request, report)
            return True
        # After that of a GPU that failed there is no other; one that raised would not be asked for any.
        has_raised = any(piece.kind == "exception" for piece in report.evidence)
        return has_raised and self._take_left_behind(process, request, report)

    def _trigger(self, request: CoreRequest) -> str:
        """Ask for a core, and return why there will be none; empty where there may be one."""
        try:
            pipes = request.find_pipes()
            if request.is_watchable and "%" not in str(request.folder):
                # Once it is asked for, the driver writes whatever there is room for.
                problem = self._run.folder.make_room_beside(request.folder, self._expected_bytes + _CORE_BYTES)
                if problem:
                    return problem
                self._expected_bytes += _CORE_BYTES
            request.send(pipes)
        except NoCoreError as error:
            return str(error)
        logger.info("GPU core of process %d asked for", request.pid)
        return ""

    def _take_left_behind(self, process: TrackedProcess, request: CoreRequest, report: ProcessReport) -> bool:
        """Take in the core that the driver wrote unasked, and say whether there is one."""
        began = procfs.started_at(process.handle.start_ticks)
        # Its file has the time of the machine's clock.
        ended = time.time() - (clock.now() - process.exited_at if process.exited_at is not None else 0.0)
        path = request.written_since(max(began, ended - _LAST_CORE_SECS))
        if path is None:
            return False
        try:
            if is_whole_core(path):
                self._keep(path, report)
                return True
            reason = f"{path} is no whole core"
        except OSError as error:
            reason = f"{path}: {error.strerror}"
        report.evidence.append(Evidence("cuda_core", "failed", reason=reason))
        return True

    def _keep(self, path: Path, report: ProcessReport, seconds: float | None = None) -> None:
        os.chmod(path, 0o600)  # noqa: PTH101
        relative = os.path.relpath(path, self._run.path)
        report.evidence.append(Evidence("cuda_core", "captured", path=relative, seconds=seconds))
        self._read(path, report)

    def _end(self, pid: int, report: ProcessReport, piece: Evidence) -> None:
        piece.seconds = round(time.monotonic() - self._began, 3)
        report.evidence.append(piece)
        del self._under_way[pid]

    def _read(self, path: Path, report: ProcessReport) -> None:
        """Begin to read a core, where cuda-gdb is installed and there is time."""
        began, reason = time.monotonic(), ""
        if self._cuda_gdb is None:
            reason = f"cuda-gdb is not installed; next, where it is: {_command(path)}"
        elif began >= self._end_at:
            reason = f"no time was left for it; next: {_command(path)}"
        if reason:
            report.evidence.append(Evidence("gpu_kernels", "skipped", reason=reason))
            return

        def read() -> CudaCore:
            seconds = min(READ_SECS, self._end_at - time.monotonic())
            return read_cuda_core(path, seconds, with_threads=False, folder=self._run.runtime)

        try:
            self._readings.append((self._pool.submit(read), path, report, began))
        except RuntimeError as error:
            # The system gives no thread.
            report.evidence.append(Evidence("gpu_kernels", "failed", reason=f"{error}; next: {_command(path)}"))

    def _take(self, reading: Future[CudaCore], path: Path, report: ProcessReport, began: float) -> None:
        seconds = round(time.monotonic() - began, 3)
        try:
            core = reading.result()
        except Exception as error:  # noqa: BLE001 - cuda-gdb is a help, and the incident is not to be lost
            why = error.message if isinstance(error, CrashkitError) else f"{type(error).__name__}: {error}"
            reason = f"{why}; next: {_command(path)}"
            report.evidence.append(Evidence("gpu_kernels", "failed", reason=reason, seconds=seconds))
            return
        # What it says in short is in the incident even where there is no room for the file.
        report.gpu = list(core_in_lines(core, _MAX_KERNELS))
        name, write = f"gpu/{titles.label_of(report.title, report.pid)}.kernels.txt", self._run.folder.write_text
        how = {"reason": core.problem or None, "source": "cuda-gdb"}
        piece = write_piece("gpu_kernels", write, name, core.text, seconds=seconds, **how)
        report.evidence.append(piece)


def _command(path: Path) -> str:
    return f"sglang-crashkit core {shlex.quote(str(path))}"
