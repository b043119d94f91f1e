"""GPU cores of the schedulers: asked for once the cheaper evidence is there, waited for as they grow, and read.

The server's end waits for them, so they have what `Settings.exit_secs` leaves, however they grow. A core that takes
more of the disk than it may is not waited for: the end of the server cuts it short. Each that is whole is read by a
process of its own while the handler goes on.

Of a server that hangs cuda-gdb then says what the kernels and the native stacks of a scheduler are. It is the last of
all that is taken: it stops a process for as long as it reads, and no core can be written while it is attached. So it
comes only to a process of which a core was written, within what is left of the incident's time, and a process that it
did not let go of is let go on; see `capture.debugger`.
"""

from __future__ import annotations

import logging
import os
import shlex
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, TypeVar

from sglang_crashkit.capture.cuda_core.reading import CudaCore, core_in_lines, read_cuda_core
from sglang_crashkit.capture.cuda_core.trigger import CoreRequest, NoCoreError, is_whole_core
from sglang_crashkit.capture.debugger import GET_CUDA_GDB, Debugged, debug, find_debugger, max_at_once
from sglang_crashkit.errors import CrashkitError
from sglang_crashkit.handler.collectors.process_evidence import write_piece
from sglang_crashkit.handler.incident import IncidentRun
from sglang_crashkit.handler.processes import TrackedProcess
from sglang_crashkit.kernel import clock, procfs, titles
from sglang_crashkit.model.incident import Evidence, ProcessReport
from sglang_crashkit.settings import MAX_CORE, MB, Settings

logger = logging.getLogger(__name__)

_Answer = TypeVar("_Answer")

#: A core under way is looked at this often, in seconds.
_LOOK_SECS = 0.1
#: The longest that reading a core may take, in seconds; of a GPU full of warps cuda-gdb takes about 2.
READ_SECS = 15.0
#: So many kernels of a core are in an incident.
_MAX_KERNELS = 4
#: There is to be room for so many bytes of a core; without memory in it, one of 255 MB was seen.
_CORE_BYTES = 256 << 20
#: When its core is written, the driver ends the process whose GPU failed; so long may it take to, in seconds.
_LAST_CORE_SECS = 60.0
#: What is left of the incident's time for writing it, in seconds.
_WRITING_SECS = 1.0
#: Of the time that the server's end has, the share that is left when the cores are read, and the one for reading them.
_LAST_SHARE, _READING_SHARE = 0.1, 0.25
#: Incidents of a server that hangs, as long as no rank of it is dead.
_HANGS = frozenset({"child_failure", "hang"})
#: To attach and to let go alone takes cuda-gdb seconds.
_LEAST_SECS = 3.0


class Cores:
    """The cores of one incident; of a server that hangs, after them what cuda-gdb says of who wrote one.

    While one is written, whoever waits for the incident is told to wait on: the end of the server would cut it short.

    Args:
        run: the incident; evidence goes into its reports.
        living: the schedulers that are asked for a core.
        dead: those that may have left one, as the driver writes by itself when the GPU fails.
        settings: what the server was started with.
        temporary: where cuda-gdb gets a folder for its own files.
    """

    def __init__(
        self,
        run: IncidentRun,
        living: Sequence[TrackedProcess],
        dead: Sequence[TrackedProcess],
        settings: Settings,
        temporary: Path,
    ) -> None:
        self._run = run
        self._began = time.monotonic()
        self._wait_secs, self._exit_secs = settings.core_wait_secs, settings.exit_secs
        self._max_bytes = settings.disk.max_core
        # All that the server's end waits for began with the incident.
        self._end_at = run.opened + (1 - _LAST_SHARE) * self._exit_secs
        self._last_write = self._end_at - min(READ_SECS, _READING_SHARE * self._exit_secs)
        self._grown_at = self._began
        self._written: dict[int, int] = {}
        self._cuda_gdb = CudaGdb(run, temporary, self._end_at)
        self._under_way: dict[int, tuple[TrackedProcess, CoreRequest, ProcessReport]] = {}
        self._expected_bytes = 0
        self._to_debug: list[TrackedProcess] = []
        self._wants_stacks = run.incident.kind in _HANGS and not dead and settings.stacks
        # Who set it so wants no process stopped.
        self._wants_stacks &= settings.native is not False
        self._stacks_end = min(run.opened + settings.budget_secs - _WRITING_SECS, self._end_at)
        self._earlier = run.incident_with_core() if living and settings.cores else None
        for process in living:
            self._ask(process, run.report(process), settings)
        if self._under_way:
            run.note(clock.now(), "cuda_cores_asked", pids=sorted(self._under_way))
        for process in dead:
            self._take_left_behind(process, CoreRequest(process.pid), run.report(process))

    @property
    def are_done(self) -> bool:
        """Whether nothing is waited for."""
        return not self._under_way and not self._to_debug and self._cuda_gdb.is_done

    @property
    def writing(self) -> frozenset[int]:
        """The processes of which a core is written now, or that a debugger holds: a signal may spoil it."""
        return frozenset(self._under_way) | self._cuda_gdb.attached

    @property
    def deadline(self) -> float:
        """When the wait ends, unless a core grows on, by the monotonic clock."""
        end = min(self._wait_end + READ_SECS, self._end_at)
        return max(end, self._stacks_end) if self._wants_stacks else end

    def next_due(self) -> float:
        """Return when `look` has something to do, by the monotonic clock."""
        return float("inf") if self.are_done else time.monotonic() + _LOOK_SECS

    def look(self) -> None:
        """See which cores are whole by now, give up those whose time is over, and take in what was read."""
        self._note_growth()
        for pid, (process, request, report) in list(self._under_way.items()):
            # Asked before the look: the driver ends the process whose GPU failed as soon as its core is whole.
            reason, has_ended = "", process.handle.has_exited()
            try:
                path = request.look(has_ended=has_ended)
                if path is not None:
                    self._keep(path, report, round(time.monotonic() - self._began, 3))
                    del self._under_way[pid]
                    if self._wants_stacks:
                        self._to_debug.append(process)
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
        self._cuda_gdb.look()
        if self._to_debug and not self._under_way and self._cuda_gdb.is_done:
            for process in self._to_debug:
                self._cuda_gdb.attach(process, self._stacks_end)
            self._to_debug.clear()

    def give_up(self, reason: str) -> None:
        """Wait no longer for what is not whole yet, for a reason that is noted."""
        for pid, (_process, request, report) in list(self._under_way.items()):
            self._end(pid, report, Evidence("cuda_core", "failed", reason=f"{reason}: {request.leftover()}"))
        self._to_debug.clear()
        self._cuda_gdb.let_go()

    @property
    def _wait_end(self) -> float:
        return min(self._grown_at + self._wait_secs, self._last_write)

    def _note_growth(self) -> None:
        # Of any: they share the disk, and the GPU of one may be busy with what the other waits for.
        for pid, (_process, request, _report) in self._under_way.items():
            written = request.written
            if written > self._written.get(pid, 0):
                self._grown_at = time.monotonic()
            self._written[pid] = written

    def _see_to_the_disk(self) -> None:
        """Give all of them up where one takes more of the disk than it may: only the server's end ends its writing."""
        sizes = {pid: request.size_on_disk for pid, (_process, request, _report) in self._under_way.items()}
        longest = max(sizes, key=lambda pid: sizes[pid], default=None)
        if longest is None:
            return
        if sizes[longest] > self._max_bytes:
            which = f"that of process {longest} takes more than {MAX_CORE} ({self._max_bytes / MB:g} MB)"
        else:
            which = self._run.why_no_longer(self._under_way[longest][1].folder)
        if which:
            logger.warning("GPU cores are cut short: %s", which)
            self._run.note(clock.now(), "cuda_cores_cut_short", reason=which, bytes=sizes)
            self.give_up(f"cut short, {which}")

    def _how_long(self) -> str:
        if self._grown_at + self._wait_secs <= self._last_write:
            return f"not whole, and nothing was written for {self._wait_secs:g} s"
        return f"cut short, as the server's end waits no longer than SGLANG_CRASHKIT_EXIT_SECS ({self._exit_secs:g} s)"

    def _ask(self, process: TrackedProcess, report: ProcessReport, settings: Settings) -> None:
        stat, request = procfs.read_stat(process.pid), CoreRequest(process.pid)
        if self._expects_own(process, request, report):
            return
        if not settings.cores:
            reason = "switched off by SGLANG_CUDA_COREDUMP_BEFORE_CRASH"
        elif self._earlier is not None:
            reason = f"the same fault as in incident {self._earlier}, which has its cores"
        elif any(piece.kind == "exception" for piece in report.evidence):
            reason = "it raised an exception, and ends by itself"
        elif stat is not None and stat.state in "Tt":
            reason = "it is stopped, so that nobody reads its pipe"
        elif settings.core_wait_secs <= 0:
            reason = "SGLANG_CUDA_COREDUMP_BEFORE_CRASH_WAIT_SECS leaves no time for it"
        elif time.monotonic() >= self._last_write:
            reason = f"SGLANG_CRASHKIT_EXIT_SECS ({self._exit_secs:g} s) leaves no time for it"
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
        self._cuda_gdb.read(path, report)

    def _end(self, pid: int, report: ProcessReport, piece: Evidence) -> None:
        piece.seconds = round(time.monotonic() - self._began, 3)
        report.evidence.append(piece)
        del self._under_way[pid]


class CudaGdb:
    """What cuda-gdb says in one incident: of cores, and of the processes that wrote them. It is run beside the handler.

    Args:
        run: the incident; evidence goes into its reports.
        temporary: where it gets a folder for its own files.
        end_at: when the last core is to be read, by the monotonic clock.
    """

    def __init__(self, run: IncidentRun, temporary: Path, end_at: float) -> None:
        self._run = run
        self._temporary = temporary
        self._end_at = end_at
        self._letting_go = threading.Event()
        self._attached: set[int] = set()
        self._pool = ThreadPoolExecutor(max_at_once(), thread_name_prefix="cuda-gdb")
        self._under_way: list[Callable[[], bool]] = []
        debugger, _missing = find_debugger()
        self._debugger = debugger if debugger is not None and debugger.name == "cuda-gdb" else None

    @property
    def is_done(self) -> bool:
        """Whether nothing is waited for."""
        return not self._under_way

    @property
    def attached(self) -> frozenset[int]:
        """The processes that it may hold now."""
        return frozenset(self._attached)

    def look(self) -> None:
        """Take in what there is by now."""
        self._under_way = [is_taken for is_taken in self._under_way if not is_taken()]

    def let_go(self) -> None:
        """Leave the processes, because they end."""
        self._letting_go.set()

    def read(self, path: Path, report: ProcessReport) -> None:
        """Begin to read the core of a process, where cuda-gdb is installed and there is time."""
        began, command = time.monotonic(), f"sglang-crashkit core {shlex.quote(str(path))}"
        reason = ""
        if self._debugger is None:
            reason = f"cuda-gdb is not installed; next, where it is: {command}"
        elif began >= self._end_at:
            reason = f"no time was left for it; next: {command}"
        if reason:
            report.evidence.append(Evidence("gpu_kernels", "skipped", reason=reason))
            return

        def read() -> CudaCore:
            seconds = min(READ_SECS, self._end_at - time.monotonic())
            return read_cuda_core(path, seconds, with_threads=False, folder=self._temporary)

        def take(core: CudaCore | Exception) -> None:
            seconds = round(time.monotonic() - began, 3)
            if isinstance(core, Exception):
                why = core.message if isinstance(core, CrashkitError) else f"{type(core).__name__}: {core}"
                piece = Evidence("gpu_kernels", "failed", reason=f"{why}; next: {command}", seconds=seconds)
            else:
                # What it says in short is in the incident even where there is no room for the file.
                report.gpu = list(core_in_lines(core, _MAX_KERNELS))
                name = f"gpu/{titles.label_of(report.title, report.pid)}.kernels.txt"
                how = {"reason": core.problem or None, "source": "cuda-gdb"}
                piece = write_piece("gpu_kernels", self._run.folder.write_text, name, core.text, seconds=seconds, **how)
            report.evidence.append(piece)

        self._start(read, take)

    def attach(self, process: TrackedProcess, end_at: float) -> None:
        """Begin to take the stacks of a process that wrote a core, until `end_at` by the monotonic clock."""
        report, debugger = self._run.report(process), self._debugger
        reason = ""
        if debugger is None:
            reason = f"cuda-gdb is not installed; next: {GET_CUDA_GDB}"
        elif end_at - time.monotonic() < _LEAST_SECS:
            reason = "SGLANG_CRASHKIT_BUDGET_SECS leaves no time for cuda-gdb"
        if reason or debugger is None:
            report.evidence.append(Evidence("gpu_stack", "skipped", reason=reason))
            return

        def read() -> Debugged:
            seconds = end_at - time.monotonic()
            if seconds < _LEAST_SECS:
                return Debugged(debugger.name, problem="the others took all the time that there was")
            return debug(debugger, process.pid, process.handle.start_ticks, seconds, self._letting_go)

        def take(answer: Debugged | Exception) -> None:
            self._attached.discard(process.pid)
            if isinstance(answer, Exception):
                answer = Debugged(debugger.name, problem=f"{type(answer).__name__}: {answer}")
            status: Literal["captured", "failed"] = "captured" if answer.threads or answer.kernels else "failed"
            piece = Evidence(
                "gpu_stack", status, reason=answer.problem or None, seconds=answer.seconds, source=answer.tool
            )
            if answer.text:
                name = f"gpu/{titles.label_of(report.title, report.pid)}.cuda-gdb.txt"
                written = write_piece("gpu_stack", self._run.folder.write_text, name, answer.text)
                piece.path = written.path
                if written.status != "captured":
                    piece = written
            report.evidence.append(piece)
            # What the core said is told with its places; these are names alone.
            report.gpu = report.gpu or [f"kernel {name}, by cuda-gdb" for name in answer.kernels]
            if not self._attached:
                self._run.note(clock.now(), "gpu_stacks")

        self._attached.add(process.pid)
        self._start(read, take)

    def _start(self, work: Callable[[], _Answer], take: Callable[[_Answer | Exception], None]) -> None:
        """Have `work` done by a thread, and `take` called with its answer by `look`."""
        try:
            future = self._pool.submit(work)
        except RuntimeError as error:
            # The system gives no thread.
            take(error)
            return

        def is_taken() -> bool:
            if not future.done():
                return False
            error = future.exception()
            # cuda-gdb is a help, and the incident is not to be lost.
            take(future.result() if error is None else error if isinstance(error, Exception) else RuntimeError(error))
            return True

        self._under_way.append(is_taken)
