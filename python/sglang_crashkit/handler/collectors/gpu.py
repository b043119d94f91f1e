"""Collect GPU evidence for an incident: driver facts, the flight recorders of NCCL and gloo, and GPU cores."""

from __future__ import annotations

import functools
import logging
import os
import shlex
import time
from collections.abc import Set
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from sglang_crashkit.analysis.collectives import RankRecord, Recorder, judge_collectives, worlds_of
from sglang_crashkit.analysis.gpus import Holder, account
from sglang_crashkit.capture.cuda_core.reading import CudaCore, core_in_lines, read_cuda_core
from sglang_crashkit.capture.cuda_core.trigger import CoreRequest, NoCoreError, is_whole_core
from sglang_crashkit.capture.debugger import find_cuda_gdb, max_at_once
from sglang_crashkit.capture.flight_request import FlightPlace, FlightRequest, GlooRequest, NoRecorderError, Received
from sglang_crashkit.capture.gpu_facts import XidWatch, ask_driver, facts_of, has_gpu
from sglang_crashkit.capture.tools import BackgroundTool
from sglang_crashkit.errors import CrashkitError
from sglang_crashkit.handler.collectors.process_evidence import write_piece
from sglang_crashkit.handler.incident_run import Awaited, IncidentRun
from sglang_crashkit.handler.processes import TrackedProcess
from sglang_crashkit.incident.fingerprint import incident_with_core
from sglang_crashkit.kernel import clock, procfs, titles
from sglang_crashkit.kernel.procfs import is_host_namespace
from sglang_crashkit.kernel.stack_hooks import HookFiles
from sglang_crashkit.model.flight_dump import FlightDumpError
from sglang_crashkit.model.incident import Collectives, Evidence, EvidenceKind, EvidenceStatus, ProcessReport
from sglang_crashkit.settings import MAX_CORE, MB

logger = logging.getLogger(__name__)

#: Timeout of the driver query, in seconds. Eight GPUs take less than a second; a driver that takes longer hangs.
_DRIVER_SECS = 5.0
#: Timeouts in seconds. For NCCL, PyTorch polls its pipe once a second; for gloo, a thread answers in about 0.1 s.
_DUMP_SECS: dict[Recorder, float] = {"nccl": 3.5, "gloo": 2.0}
_KINDS: dict[Recorder, EvidenceKind] = {"nccl": "flight_recorder", "gloo": "gloo_flight_recorder"}
#: Up to `_FEW` pending dumps are polled at this interval, in seconds: the incident, and a rank that raised, wait for
#: them. Polling more dumps this often would take half a CPU core.
_FEW, _LOOK_SECS_OF_FEW = 16, 0.03
#: Seconds spent on reading dumps that arrive together before control returns to the handler's other work.
_READING_SECS = 0.25
#: Timeout for reading one core, in seconds; for a GPU full of warps cuda-gdb takes about 2.
READ_SECS = 15.0
#: Maximum number of a core's kernels that an incident lists.
_MAX_KERNELS = 4
#: Free disk space required before a core is requested, in bytes; a core of 255 MB without memory was seen.
_CORE_BYTES = 256 << 20
#: The driver ends the process whose GPU failed after it wrote the core; the longest time between both, in seconds.
_LAST_CORE_SECS = 60.0
#: Share of SGLANG_CRASHKIT_EXIT_SECS reserved for reading the cores, up to `READ_SECS`.
_READING_SHARE = 0.25
#: How long the ranks' cores are still awaited after the server's main process ended, in seconds.
_ORPHAN_SECS = 0.5


class Driver:
    """The driver of the server's GPUs: queried once per incident, and watched for Xid events, reported only once."""

    def __init__(self, *, is_on: bool) -> None:
        self._is_on = is_on
        # Check early: library folders may lie on a disk that does not respond later.
        self._has_gpu = has_gpu()
        self.xids = XidWatch()

    def watch(self) -> None:
        """Start watching for Xid events if there is a GPU."""
        if self._is_on and self._has_gpu:
            try:
                self.xids.begin()
            except OSError as error:
                self.xids.problem = f"its watcher could not be started: {error.strerror}"
                logger.warning("Xid events are not watched for: %s", self.xids.problem)

    def ask(self, run: IncidentRun, deadline: float) -> Awaited | None:
        """Start the driver query; record the reason as evidence and return None if it cannot start."""
        secs = min(_DRIVER_SECS, deadline - time.monotonic())
        if not self._is_on:
            reason = "switched off by SGLANG_CRASHKIT_GPU_FACTS"
        # The devices may be made when the first process uses them.
        elif not (self._has_gpu or has_gpu({})):
            reason = "no GPU: the devices of NVIDIA's driver are not there"
        elif secs <= 0:
            reason = "SGLANG_CRASHKIT_BUDGET_SECS leaves no time for it"
        else:
            try:
                return _DriversAnswer(run, ask_driver(secs), self.xids)
            except RuntimeError as error:
                _add_facts(run, "failed", str(error))
                return None
        _add_facts(run, "skipped", reason)
        return None


class _DriversAnswer(Awaited):
    is_done = False

    def __init__(self, run: IncidentRun, answer: BackgroundTool, watch: XidWatch) -> None:
        self._run, self._answer, self._watch = run, answer, watch

    def look(self) -> None:
        if (answer := self._answer.look()) is None:
            return
        self.is_done = True
        run, watch, facts = self._run, self._watch, facts_of(answer)
        watch.look()
        holders = [Holder(one.pid, one.title, procfs.started_at(one.handle.start_ticks), one.gpu) for one in run.tree]
        sees_all_pids = is_host_namespace()
        told = account(facts.gpus, holders, watch.xids, watch.start, watch.problem, sees_all_pids=sees_all_pids)
        run.incident.gpus = told
        if facts.reason:
            told.lines.insert(0, facts.reason)
        for event in told.xids:
            pids = [one.pid for one in event.processes]
            run.incident.note(event.time, "xid", number=event.xid, gpu=event.bus_id, pids=pids, source=event.source)
        if not facts.driver:
            _add_facts(run, "failed", facts.reason or "the driver said nothing", facts.seconds)
            return
        document = {**asdict(facts), "start": watch.start, **msgspec.to_builtins(told)}
        # The incident holds the summary even if there is no disk space for the file.
        how: dict[str, Any] = {"reason": facts.reason or None, "seconds": facts.seconds}
        piece = write_piece("gpu_facts", run.folder.write_json, "gpu/facts.json", document, **how)
        run.report(run.tree.root).evidence.append(piece)

    def give_up(self, reason: str) -> None:
        self.is_done = True
        self._answer.cancel()
        _add_facts(self._run, "failed", reason)


def _add_facts(run: IncidentRun, status: EvidenceStatus, reason: str, seconds: float | None = None) -> None:
    run.report(run.tree.root).evidence.append(Evidence("gpu_facts", status, reason=reason, seconds=seconds))


@dataclass
class _Asked:
    process: TrackedProcess
    recorder: Recorder
    request: FlightRequest | GlooRequest
    deadline: float


class FlightRecorders(Awaited):
    """Dumps of the NCCL and gloo flight recorders for one incident, awaited until `deadline` (monotonic clock).

    Exited processes count, too: PyTorch writes a dump before it ends a process by itself. For the pids in `late`, a
    dump requested in an earlier incident may still arrive; pids whose NCCL dump is given up here are added to it.
    """

    def __init__(self, run: IncidentRun, deadline: float, late: set[int]) -> None:
        self._late = late
        self._run, self._began, self._deadline = run, time.monotonic(), deadline
        self._under_way: list[_Asked] = []
        self._records: list[RankRecord] = []
        self._pids: dict[str, int] = {}
        self._missing: list[tuple[Recorder | None, str]] = []
        self._failed: set[Recorder | None] = set()
        self._schedulers = [process for process in run.tree if process.role == "scheduler"]
        for process in self._schedulers:
            place = FlightPlace.read(run.runtime, process.pid, process.handle.start_ticks)
            is_late = process.pid in late
            nccl = FlightRequest(process.pid, place, is_late=is_late) if place is not None else None
            if process.exited_at is None:
                self._ask(process, "nccl", nccl)
                hooks = HookFiles.of(run.runtime, process.pid, process.handle.start_ticks)
                self._ask(process, "gloo", GlooRequest(process.pid, hooks.socket))
            elif nccl is not None and nccl.take_unasked():
                self._wait_for(process, "nccl", nccl)
            else:
                self._missing.append((None, f"{_name(process)}: it was dead before it could be asked."))
        if self._under_way:
            pids = sorted({asked.process.pid for asked in self._under_way})
            run.incident.note(clock.now(), "flight_recorders_asked", pids=pids)

    @property
    def is_done(self) -> bool:
        """Whether no dump is pending."""
        return not self._under_way

    @property
    def look_secs(self) -> float:
        """Polling interval, in seconds."""
        return _LOOK_SECS_OF_FEW if len(self._under_way) <= _FEW else super().look_secs

    def pids_of(self, kind: EvidenceKind) -> Set[int]:
        """Return the processes whose dump of this kind is pending."""
        return {asked.process.pid for asked in self._under_way if _KINDS[asked.recorder] == kind}

    def look(self) -> None:
        """Take the dumps that are complete, and give up those whose deadline has passed."""
        began = time.monotonic()
        for asked in list(self._under_way):
            # Check before reading: a process that has already exited writes no more.
            has_exited = asked.process.handle.has_exited()
            is_late = time.monotonic() >= asked.deadline
            try:
                received = asked.request.look()
            except NoRecorderError as error:
                self._fail(asked, str(error), "skipped")
            except Exception as error:
                if not isinstance(error, FlightDumpError | OSError):
                    logger.exception("the answer of %s cannot be read", _name(asked.process))
                self._fail(asked, str(error) or type(error).__name__)
            else:
                if received is not None:
                    self._take(asked, received)
                elif has_exited:
                    self._fail(asked, f"it ended before its dump was whole: {asked.request.leftover()}")
                elif is_late:
                    self._give_up(asked, f"not whole within {asked.deadline - self._began:.1f} s")
            if time.monotonic() >= began + _READING_SECS:
                return

    def give_up(self, reason: str) -> None:
        """Stop waiting for all pending dumps, and record `reason`."""
        for asked in list(self._under_way):
            self._give_up(asked, reason)

    def _give_up(self, asked: _Asked, reason: str) -> None:
        if asked.recorder == "nccl":
            self._late.add(asked.process.pid)
        self._fail(asked, f"{reason}: {asked.request.leftover()}")

    def _ask(self, process: TrackedProcess, recorder: Recorder, request: FlightRequest | GlooRequest | None) -> None:
        try:
            if request is None:
                raise FlightDumpError("PyTorch was not told where to be asked for it when the process started")
            if process.state in "Tt":
                words = "reads no pipe" if recorder == "nccl" else "cannot answer"
                raise FlightDumpError(f"it is stopped and {words}")
            request.send()
            self._wait_for(process, recorder, request)
        except FlightDumpError as error:
            self._run.report(process).evidence.append(Evidence(_KINDS[recorder], "skipped", reason=str(error)))
            self._missing.append((recorder, f"{_name(process)}, {recorder}: {error}."))

    def _wait_for(self, process: TrackedProcess, recorder: Recorder, request: FlightRequest | GlooRequest) -> None:
        deadline = max(self._began, min(self._began + _DUMP_SECS[recorder], self._deadline))
        self._under_way.append(_Asked(process, recorder, request, deadline))

    @functools.cached_property
    def _worlds(self) -> dict[int, str]:
        return worlds_of({process.pid: process.rank for process in self._schedulers})

    def _take(self, asked: _Asked, received: Received) -> None:
        process, kind, title = asked.process, _KINDS[asked.recorder], _name(asked.process)
        world = self._worlds[process.pid]
        record = RankRecord(received.rank, title, world, received.dump, received.seconds, asked.recorder)
        name = f"gpu/{world and f'{world}_'}{kind}_{received.rank}"
        # Ranks that the processes report may be wrong: avoid two files with the same name.
        if any((one.world, one.rank, one.recorder) == (world, record.rank, record.recorder) for one in self._records):
            name = f"gpu/{titles.label_of(process.title, process.pid)}_{kind}_{received.rank}"
        self._records.append(record)
        self._pids[title] = process.pid
        reason = "PyTorch had written it by itself" if asked.request.is_unasked else None
        self._end(asked, write_piece(kind, self._run.folder.write_bytes, name, received.data, reason=reason))

    def _fail(self, asked: _Asked, reason: str, status: EvidenceStatus = "failed") -> None:
        if status == "failed":
            self._failed.add(asked.recorder)
        self._missing.append((asked.recorder, f"{_name(asked.process)}, {asked.recorder}: {reason}."))
        self._end(asked, Evidence(_KINDS[asked.recorder], status, reason=reason))

    def _end(self, asked: _Asked, piece: Evidence) -> None:
        self._under_way.remove(asked)
        if isinstance(asked.request, GlooRequest):
            asked.request.close()
        piece.seconds = round(time.monotonic() - self._began, 3)
        self._run.report(asked.process).evidence.append(piece)
        if not self.is_done:
            return
        # Compare the dumps. Do not report a missing NCCL dump when no rank uses NCCL; likewise for gloo.
        used = {None, *(record.recorder for record in self._records)} | self._failed
        missing = [line for recorder, line in self._missing if recorder in used]
        findings = []
        try:
            findings = judge_collectives(self._records)
            for finding in findings:
                finding.pids = [self._pids[name] for name in finding.processes]
                finding.waiting_pids = [self._pids[name] for name in finding.waiting]
        except Exception as error:
            logger.exception("the flight recorders cannot be compared")
            missing.append(f"The dumps cannot be compared: {type(error).__name__}.")
        if self._records or self._failed:
            self._run.incident.collectives = Collectives(findings, missing)
            self._run.checkpoint()


def _name(process: TrackedProcess) -> str:
    return f"{process.title} (pid {process.pid})"


@dataclass(eq=False)
class _Core:
    """A GPU core that is requested from a process, or searched for after its exit."""

    process: TrackedProcess
    report: ProcessReport
    request: CoreRequest
    written: int = 0

    def add(self, status: EvidenceStatus, reason: str, seconds: float | None = None) -> None:
        """Record as evidence why the core is missing."""
        self.report.evidence.append(Evidence("cuda_core", status, reason=reason, seconds=seconds))


class Cores(Awaited):
    """GPU cores of the schedulers: requested after the cheaper evidence, awaited while they grow, and read.

    A running process is asked for a core. An exited process may have left a core: the driver writes one by itself when
    the GPU fails. A separate process reads each complete core while the handler continues.

    The server's end would cut the cores short, so it waits for them, but only until `deadline` (monotonic clock), even
    if they still grow. A core that exceeds its disk limit is not awaited.
    """

    def __init__(self, run: IncidentRun, deadline: float) -> None:
        self._run, self._settings, self._end_at = run, run.settings, deadline
        self._began = self._grown_at = time.monotonic()
        self._last_write = deadline - min(READ_SECS, _READING_SHARE * self._settings.exit_secs)
        self._under_way: list[_Core] = []
        self._readings: list[tuple[Future[CudaCore], Path, ProcessReport, float]] = []
        self._expected_bytes = 0
        cores = [
            _Core(process, run.report(process), CoreRequest(process.pid))
            for process in run.tree
            if process.role == "scheduler"
        ]
        # A server that failed to start has not got as far as using its GPUs: its cores show nothing useful.
        is_asked = run.incident.kind != "failed_start" and run.tree.root.exited_at is None
        living = [core for core in cores if is_asked and core.process.exited_at is None]
        wanted = living and self._settings.cores
        earlier = incident_with_core(run.incident, run.folder, self._settings.full_per_fault) if wanted else None
        for core in living:
            self._ask(core, earlier)
        if self._under_way:
            run.incident.note(clock.now(), "cuda_cores_asked", pids=sorted(self.pids_of("cuda_core")))
        for core in cores:
            if core.process.exited_at is not None:
                self._take_left_behind(core)

    @property
    def is_done(self) -> bool:
        """Whether no core is being written or read."""
        return not self._under_way and not self._readings

    @property
    def secs_left(self) -> float:
        """Longest remaining time in seconds, unless a core keeps growing."""
        return max(0.0, min(self._wait_end + READ_SECS, self._end_at) - time.monotonic())

    def pids_of(self, kind: EvidenceKind) -> Set[int]:
        """Return the processes that are writing a core; a signal may spoil it."""
        return {core.process.pid for core in self._under_way} if kind == "cuda_core" else frozenset()

    def look(self) -> None:
        """Keep the cores that are complete, give up those whose time is over, and take the finished readings."""
        # Growth of any core extends the wait for all: they share the disk, and one GPU may wait for another.
        for core in self._under_way:
            written = core.request.written
            if written > core.written:
                self._grown_at = time.monotonic()
            core.written = written
        for core in list(self._under_way):
            # Check before looking: the driver ends the process whose GPU failed as soon as its core is complete.
            reason, has_ended = "", core.process.handle.has_exited()
            try:
                path = core.request.look(has_ended=has_ended)
                if path is not None:
                    self._keep(path, core.report, round(time.monotonic() - self._began, 3))
                    self._under_way.remove(core)
                    continue
            except (NoCoreError, OSError) as error:
                reason = str(error)
            if has_ended:
                reason = f"it ended while its core was written: {reason or core.request.leftover()}"
            if not reason and time.monotonic() >= self._wait_end:
                reason = f"{self._how_long()}: {core.request.leftover()}"
            if reason:
                self._fail(core, reason)
        self._see_to_the_disk()
        gone_at = self._run.tree.root.exited_at
        if gone_at is not None and clock.now() >= gone_at + _ORPHAN_SECS:
            self.give_up("the server ended")
        for reading in [one for one in self._readings if one[0].done()]:
            self._readings.remove(reading)
            self._take(*reading)

    def give_up(self, reason: str) -> None:
        """Stop waiting for the incomplete cores, and record `reason`."""
        for core in list(self._under_way):
            self._fail(core, f"{reason}: {core.request.leftover()}")

    def _fail(self, core: _Core, reason: str) -> None:
        core.add("failed", reason, round(time.monotonic() - self._began, 3))
        self._under_way.remove(core)

    @property
    def _wait_end(self) -> float:
        return min(self._grown_at + self._settings.core_wait_secs, self._last_write)

    def _see_to_the_disk(self) -> None:
        """Give up all cores if one exceeds its disk limit: only the server's end stops the driver from writing it."""
        if not self._under_way:
            return
        sizes = {core.process.pid: core.request.size_on_disk for core in self._under_way}
        longest = max(self._under_way, key=lambda core: sizes[core.process.pid])
        pid, most = longest.process.pid, self._settings.disk.max_core
        if sizes[pid] > most:
            which = f"that of process {pid} takes more than {MAX_CORE} ({most / MB:g} MB)"
        else:
            which = "" if self._run.folder.problem else self._run.folder.make_room_beside(longest.request.folder, 0)
        if which:
            logger.warning("GPU cores are cut short: %s", which)
            self._run.incident.note(clock.now(), "cuda_cores_cut_short", reason=which, bytes=sizes)
            self.give_up(f"cut short, {which}")

    def _how_long(self) -> str:
        wait_secs, exit_secs = self._settings.core_wait_secs, self._settings.exit_secs
        if self._grown_at + wait_secs <= self._last_write:
            return f"not whole, and nothing was written for {wait_secs:g} s"
        return f"cut short, as the server's end waits no longer than SGLANG_CRASHKIT_EXIT_SECS ({exit_secs:g} s)"

    def _ask(self, core: _Core, earlier: str | None) -> None:
        """Request a core, unless `earlier` names an incident with the same fault that already has cores."""
        settings, request = self._settings, core.request
        has_raised = any(piece.kind == "exception" for piece in core.report.evidence)
        if request.is_watchable and request.join():
            logger.info("process %d writes a GPU core by itself", core.process.pid)
            self._under_way.append(core)
            return
        # The driver writes no second core after a GPU failure, and a process that raised is not asked for a core.
        if has_raised and self._take_left_behind(core):
            return
        if not settings.cores:
            reason = "switched off by SGLANG_CUDA_COREDUMP_BEFORE_CRASH"
        elif earlier is not None:
            reason = f"the same fault as in incident {earlier}, which has its cores"
        elif has_raised:
            reason = "it raised an exception, and ends by itself"
        elif core.process.state in "Tt":
            reason = "it is stopped and reads no pipe"
        elif settings.core_wait_secs <= 0:
            reason = "SGLANG_CUDA_COREDUMP_BEFORE_CRASH_WAIT_SECS leaves no time for it"
        elif time.monotonic() >= self._last_write:
            reason = f"SGLANG_CRASHKIT_EXIT_SECS ({settings.exit_secs:g} s) leaves no time for it"
        elif not (reason := self._trigger(request)):
            if request.is_watchable:
                self._under_way.append(core)
                return
            reason = "asked for, but CUDA_COREDUMP_FILE is no file that could be watched"
        core.add("skipped", reason)

    def _trigger(self, request: CoreRequest) -> str:
        """Request a core; return the reason if it cannot be written, or an empty string."""
        try:
            pipes = request.find_pipes()
            if request.is_watchable and "%" not in str(request.folder):
                # Check now: after the request, the driver writes until the disk is full.
                problem = self._run.folder.make_room_beside(request.folder, self._expected_bytes + _CORE_BYTES)
                if problem:
                    return problem
                self._expected_bytes += _CORE_BYTES
            request.send(pipes)
        except NoCoreError as error:
            return str(error)
        logger.info("GPU core of process %d asked for", request.pid)
        return ""

    def _take_left_behind(self, core: _Core) -> bool:
        """Keep the core that the driver wrote without a request; return whether there is one, complete or not."""
        process = core.process
        began = procfs.started_at(process.handle.start_ticks)
        # The file's modification time is by the machine's clock.
        ended = time.time() - (clock.now() - process.exited_at if process.exited_at is not None else 0.0)
        path = core.request.written_since(max(began, ended - _LAST_CORE_SECS))
        if path is None:
            return False
        try:
            if is_whole_core(path):
                self._keep(path, core.report)
            else:
                core.add("failed", f"{path} is no whole core")
        except OSError as error:
            core.add("failed", f"{path}: {error.strerror}")
        return True

    def _keep(self, path: Path, report: ProcessReport, seconds: float | None = None) -> None:
        """Record a complete core as evidence, and start reading it if cuda-gdb is installed and time is left."""
        os.chmod(path, 0o600)  # noqa: PTH101
        relative = os.path.relpath(path, self._run.folder.path)
        report.evidence.append(Evidence("cuda_core", "captured", path=relative, seconds=seconds))
        began = time.monotonic()

        def read() -> CudaCore:
            seconds = min(READ_SECS, self._end_at - time.monotonic())
            return read_cuda_core(path, seconds, self._run.runtime)

        if find_cuda_gdb() is None:
            _add_unread(report, "skipped", "cuda-gdb, which reads it, is not installed here", path)
        elif began >= self._end_at:
            _add_unread(report, "skipped", "no time was left for it", path)
        else:
            try:
                self._readings.append((self._pool.submit(read), path, report, began))
            except RuntimeError as error:
                # The system cannot start another thread.
                _add_unread(report, "failed", str(error), path)

    @functools.cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(max_at_once(), thread_name_prefix="cuda-gdb")

    def _take(self, reading: Future[CudaCore], path: Path, report: ProcessReport, began: float) -> None:
        seconds = round(time.monotonic() - began, 3)
        try:
            core = reading.result()
        except Exception as error:  # noqa: BLE001 - cuda-gdb is a help, and the incident is not to be lost
            why = error.message if isinstance(error, CrashkitError) else f"{type(error).__name__}: {error}"
            _add_unread(report, "failed", why, path, seconds)
            return
        # The incident holds the summary even if there is no disk space for the file.
        report.gpu = list(core_in_lines(core, _MAX_KERNELS))
        name, write = f"gpu/{titles.label_of(report.title, report.pid)}.kernels.txt", self._run.folder.write_text
        how = {"reason": core.problem or None, "source": "cuda-gdb"}
        piece = write_piece("gpu_kernels", write, name, core.text, seconds=seconds, **how)
        report.evidence.append(piece)


def _add_unread(
    report: ProcessReport, status: EvidenceStatus, why: str, path: Path, seconds: float | None = None
) -> None:
    reason = f"{why}; next: sglang-crashkit core {shlex.quote(str(path))}"
    report.evidence.append(Evidence("gpu_kernels", status, reason=reason, seconds=seconds))
