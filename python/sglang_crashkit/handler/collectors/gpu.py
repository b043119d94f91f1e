"""What an incident asks of the GPUs: the driver and the flight recorders while others look on, at its end the cores."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sglang_crashkit.analysis.collectives import RankRecord, Recorder, judge_collectives, worlds_of
from sglang_crashkit.analysis.gpus import Holder, XidSources, account
from sglang_crashkit.capture.flight_request import FlightPlace, FlightRequest, GlooRequest, NoRecorderError, Received
from sglang_crashkit.capture.gpu_facts import GpuFacts, GpuFactsReader, XidWatch, find_library
from sglang_crashkit.handler.collectors.gpu_cores import Cores
from sglang_crashkit.handler.collectors.process_evidence import write_piece
from sglang_crashkit.handler.collectors.received import secs_before
from sglang_crashkit.handler.folders import Place
from sglang_crashkit.handler.incident import IncidentRun
from sglang_crashkit.handler.processes import ProcessTree, TrackedProcess
from sglang_crashkit.kernel import clock, procfs, titles
from sglang_crashkit.kernel.procfs import is_host_namespace
from sglang_crashkit.kernel.stack_hooks import HookFiles
from sglang_crashkit.model import lenient
from sglang_crashkit.model.flight_dump import FlightDumpError
from sglang_crashkit.model.incident import Collectives, Evidence, EvidenceKind, EvidenceStatus, Gpus, ProcessReport
from sglang_crashkit.settings import Settings

logger = logging.getLogger(__name__)

#: Eight GPUs take less than a second; a driver that takes longer than this hangs. Seconds.
_DEADLINE_SECS = 5.0
#: How often an answer is looked for, in seconds.
_LOOK_SECS = 0.1
#: Incidents of a server whose own GPUs and collectives are none of the matter.
_WITHOUT = frozenset({"peer_lost", "snapshot"})
#: Incidents of a server that goes on, or that had not got so far as to use its GPUs.
_WITHOUT_CORES = _WITHOUT | {"failed_start"}
#: The end of the server waits for it: this long, in seconds. For NCCL PyTorch looks once a second whether it is asked;
#: for gloo a thread of the process answers, in some 0.1 s.
_DUMP_SECS: dict[Recorder, float] = {"nccl": 3.5, "gloo": 2.0}
_KINDS: dict[Recorder, EvidenceKind] = {"nccl": "flight_recorder", "gloo": "gloo_flight_recorder"}
#: A few dumps under way are looked at this often, in seconds: the incident, and a rank that raised, wait for them. Of
#: more the walk through all would take half a core.
_FEW, _LOOK_SECS_OF_FEW = 16, 0.03
#: Of dumps that come together, so many seconds are spent on reading before the handler looks at what else is due.
_READING_SECS = 0.25


class GpuEvidence:
    """The GPUs' part of one incident after another."""

    def __init__(self, tree: ProcessTree, place: Place, settings: Settings) -> None:
        self._tree = tree
        self._place = place
        self._settings = settings
        self._flight: FlightRecorders | None = None
        self._cores: Cores | None = None
        self._driver = _Driver(tree, is_on=settings.gpu_facts)
        self._late_flight: set[int] = set()
        self._is_finishing = False

    @property
    def writing_cores(self) -> frozenset[int]:
        """The processes that write a GPU core now, and are neither signalled nor stopped meanwhile."""
        return self._cores.writing if self._cores is not None else frozenset()

    @property
    def are_awaited(self) -> bool:
        """Whether the incident would be finished but for them."""
        return self._cores_under_way is not None or (self._is_finishing and self._are_answers_under_way)

    @property
    def are_cores_asked(self) -> bool:
        """Whether it came to the cores, which are the last."""
        return self._cores is not None

    @property
    def cores_secs_left(self) -> float | None:
        """How long the cores may take from now on, in seconds; None where none is awaited."""
        cores = self._cores_under_way
        return max(0.0, cores.deadline - time.monotonic()) if cores is not None else None

    def next_due(self) -> float:
        """Return when `look` has something to do, by the monotonic clock."""
        if self._cores_under_way is not None:
            return self._cores_under_way.next_due()
        flight = self._flight.next_due() if self._flight is not None else float("inf")
        return min(flight, float("inf") if self._driver.is_done else time.monotonic() + _LOOK_SECS)

    def look(self) -> None:
        """See what is whole by now."""
        if self._cores_under_way is not None:
            self._cores_under_way.look()
            return
        self._driver.look()
        if self._flight is not None:
            self._flight.look()

    def watch(self) -> None:
        """Begin to watch for what the driver tells only once."""
        self._driver.watch()

    def close(self) -> None:
        """Watch no longer."""
        self._driver.close()

    def ask(self, run: IncidentRun) -> None:
        """Ask the driver what it knows, and the schedulers for their flight recorders, once an incident."""
        if self._flight is not None:
            return
        left_secs = max(0.0, run.opened + secs_before(self._settings.budget_secs) - time.monotonic())
        is_wanted = run.incident.kind not in _WITHOUT
        if is_wanted:
            self._driver.ask(run, left_secs)
        schedulers = [process for process in self._tree if is_wanted and process.role == "scheduler"]
        self._flight = FlightRecorders(run, schedulers, self._place.runtime, left_secs, self._late_flight)

    def have_answered(self, run: IncidentRun) -> bool:
        """Say whether both have, so that the end of the incident waits for neither; ask where nobody did."""
        self._is_finishing = True
        self.ask(run)
        return not self._are_answers_under_way

    def awaits_gloo_of(self, pid: int) -> bool:
        """Say whether a process is to answer for gloo; see `FlightRecorders`."""
        return self._flight is not None and self._flight.awaits_gloo_of(pid)

    def are_cores_done(self, run: IncidentRun, *, of_living: bool, of_dead: bool) -> bool:
        """Say whether no core is awaited any more; ask where nobody did.

        Args:
            run: the incident.
            of_living: whether the living schedulers are asked: the server did not go on, and is not gone.
            of_dead: whether those count that the driver may have written before a scheduler ended.
        """
        if self._cores is None:
            of_living = of_living and run.incident.kind not in _WITHOUT_CORES
            schedulers = [process for process in self._tree if process.role == "scheduler"]
            living = [process for process in self._tree.alive() if of_living and process in schedulers]
            dead = [process for process in schedulers if of_dead and process.exited_at is not None]
            self._cores = Cores(run, living, dead, self._settings, self._place.runtime)
        return self._cores.are_done

    def give_up_cores(self, reason: str) -> None:
        """Wait for no core any longer, for a reason that is noted."""
        if self._cores_under_way is not None:
            self._cores_under_way.give_up(reason)

    def give_up_answers(self, reason: str) -> None:
        """Wait for neither the driver nor a flight recorder any longer, for a reason that is noted."""
        self._driver.give_up(reason)
        if self._flight is not None:
            self._flight.give_up(reason)

    def forget(self) -> None:
        """Be ready for the next incident."""
        self._flight = self._cores = None
        self._driver.forget()
        self._is_finishing = False

    @property
    def _cores_under_way(self) -> Cores | None:
        return self._cores if self._cores is not None and not self._cores.are_done else None

    @property
    def _are_answers_under_way(self) -> bool:
        return not self._driver.is_done or (self._flight is not None and not self._flight.are_done)


class _Driver:
    """What the driver knows, in one incident after another, and the watch for what it tells only once."""

    def __init__(self, tree: ProcessTree, *, is_on: bool) -> None:
        self._tree = tree
        self._is_on = is_on
        # Folders of libraries may lie on a disk that does not answer later.
        self._library = find_library()
        self._watch: XidWatch | None = None
        self._watch_problem = "not watched"
        self._asked: tuple[IncidentRun, GpuFactsReader] | None = None

    def watch(self) -> None:
        """Begin to watch for Xid events, where there is an NVIDIA GPU."""
        if self._is_on and self._library == "pynvml":
            try:
                self._watch = XidWatch()
            except OSError as error:
                self._watch_problem = f"its watcher could not be started: {error.strerror}"
                logger.warning("Xid events are not watched for: %s", self._watch_problem)

    def close(self) -> None:
        """End both children."""
        self.forget()
        if self._watch is not None:
            self._watch.close()

    @property
    def is_done(self) -> bool:
        """Whether nothing is waited for."""
        return self._asked is None

    def ask(self, run: IncidentRun, left_secs: float) -> None:
        """Ask the driver, which has so many seconds, for an incident."""
        # The devices may be made when the first process uses them.
        library = self._library or find_library({})
        if not self._is_on:
            self._add(run, "skipped", "switched off by SGLANG_CRASHKIT_GPU_FACTS")
        elif library is None:
            self._add(run, "skipped", "no GPU: neither the devices of NVIDIA's driver nor of AMD's are there")
        elif left_secs <= 0:
            self._add(run, "skipped", "SGLANG_CRASHKIT_BUDGET_SECS leaves no time for it")
        else:
            since = procfs.started_at(self._tree.root.handle.start_ticks)
            try:
                self._asked = run, GpuFactsReader(library, min(_DEADLINE_SECS, left_secs), since)
            except RuntimeError as error:
                self._add(run, "failed", str(error))

    def look(self) -> None:
        """Take in what the driver said, where it has."""
        if self._asked is not None:
            run, reader = self._asked
            facts = reader.look()
            if facts is not None:
                self._asked = None
                self._take(facts, run)

    def give_up(self, reason: str) -> None:
        """Wait no longer, for a reason that is noted."""
        if self._asked is not None:
            run, _reader = self._asked
            self.forget()
            self._add(run, "failed", reason)

    def forget(self) -> None:
        """Be ready for the next incident."""
        if self._asked is not None:
            self._asked[1].cancel()
            self._asked = None

    def _take(self, facts: GpuFacts, run: IncidentRun) -> None:
        watch, start = self._watch, {}
        if watch is not None:
            watch.look()
            start = watch.start
        problems = [f"no NVML events: {watch.problem if watch is not None else self._watch_problem}"]
        if watch is not None and not watch.problem:
            problems = [f"{', '.join(names)}: {error}" for error, names in start["errors"].items()]
        if facts.kernel_problem:
            problems.append(facts.kernel_problem)
        told = account(
            facts.gpus,
            [Holder(one.pid, one.title, procfs.started_at(one.handle.start_ticks), one.gpu) for one in self._tree],
            XidSources(watch.xids if watch is not None else (), facts.kernel_xids, start.get("time"), problems),
            start.get("gpus", ()),
            sees_all_pids=is_host_namespace(),
        )
        if facts.reason:
            told["lines"].insert(0, facts.reason)
        run.incident.gpus = lenient.read(told, Gpus)
        for event in told["xids"]:
            pids = [one["pid"] for one in event["processes"]]
            run.note(event["time"], "xid", number=event["xid"], gpu=event["bus_id"], pids=pids, source=event["source"])
        if not facts.driver:
            self._add(run, "failed", facts.reason or "the driver said nothing", facts.seconds)
            return
        document = {**asdict(facts), "start": start, **told}
        # What it says in short is in the incident even where there is no room for the file.
        how: dict[str, Any] = {"reason": facts.reason or None, "seconds": facts.seconds}
        piece = write_piece("gpu_facts", run.folder.write_json, "gpu/facts.json", document, **how)
        run.report(self._tree.root).evidence.append(piece)

    def _add(self, run: IncidentRun, status: EvidenceStatus, reason: str, seconds: float | None = None) -> None:
        run.report(self._tree.root).evidence.append(Evidence("gpu_facts", status, reason=reason, seconds=seconds))


@dataclass
class _Asked:
    process: TrackedProcess
    recorder: Recorder
    request: FlightRequest | GlooRequest
    report: ProcessReport
    deadline: float


class FlightRecorders:
    """The flight recorders of one incident, of NCCL and of gloo.

    Args:
        run: the incident; evidence goes into its reports.
        schedulers: all of them, those that are dead too: PyTorch writes a dump before it ends a process by itself.
        runtime: where they say how they are asked.
        secs: the longest that it may take, in seconds.
        late: of whom a dump may come that an earlier incident asked for; whoever does not answer in time is added.
    """

    def __init__(
        self, run: IncidentRun, schedulers: Sequence[TrackedProcess], runtime: Path, secs: float, late: set[int]
    ) -> None:
        self._run = run
        self._runtime = runtime
        self._late = late
        self._began = time.monotonic()
        self._secs = secs
        self._under_way: list[_Asked] = []
        self._records: list[RankRecord] = []
        self._pids: dict[str, int] = {}
        self._missing: list[tuple[Recorder | None, str]] = []
        self._failed: set[Recorder | None] = set()
        self._worlds = worlds_of({process.pid: process.rank for process in schedulers})
        for process in schedulers:
            if process.exited_at is None:
                self._ask_nccl(process)
                self._ask_gloo(process)
            else:
                self._take_left_behind(process)
        if self._under_way:
            pids = sorted({asked.process.pid for asked in self._under_way})
            run.note(clock.now(), "flight_recorders_asked", pids=pids)

    @property
    def are_done(self) -> bool:
        """Whether nothing is waited for."""
        return not self._under_way

    def awaits_gloo_of(self, pid: int) -> bool:
        """Say whether a process is to answer for gloo, which it does not any more once its interpreter ends."""
        return any(asked.process.pid == pid and asked.recorder == "gloo" for asked in self._under_way)

    def next_due(self) -> float:
        """Return when `look` has something to do, by the monotonic clock."""
        pause = _LOOK_SECS_OF_FEW if len(self._under_way) <= _FEW else _LOOK_SECS
        return min([time.monotonic() + pause, *(asked.deadline for asked in self._under_way)])

    def look(self) -> None:
        """See which dumps are whole by now, and give up those whose time is over."""
        began = time.monotonic()
        for asked in list(self._under_way):
            # Before the look: one that had ended by then writes no more.
            has_exited = asked.process.handle.has_exited()
            is_late = time.monotonic() >= asked.deadline
            try:
                received = asked.request.look()
            except NoRecorderError as error:
                self._fail(asked, str(error), "skipped")
                continue
            except (FlightDumpError, OSError) as error:
                self._fail(asked, str(error))
                continue
            except Exception as error:
                logger.exception("the answer of %s cannot be read", _name(asked.process))
                self._fail(asked, type(error).__name__)
                continue
            if received is not None:
                self._take(asked, received)
            elif has_exited:
                self._fail(asked, f"it ended before its dump was whole: {asked.request.leftover()}")
            elif is_late:
                self._note_late(asked)
                secs = asked.deadline - self._began
                self._fail(asked, f"not whole within {secs:.1f} s: {asked.request.leftover()}")
            if time.monotonic() >= began + _READING_SECS:
                return

    def give_up(self, reason: str) -> None:
        """Wait no longer, for a reason that is noted."""
        for asked in list(self._under_way):
            self._note_late(asked)
            self._fail(asked, f"{reason}: {asked.request.leftover()}")

    def _note_late(self, asked: _Asked) -> None:
        if asked.recorder == "nccl":
            self._late.add(asked.process.pid)

    def _ask_nccl(self, process: TrackedProcess) -> None:
        place = FlightPlace.read(self._runtime, process.pid, process.handle.start_ticks)
        if place is None:
            self._skip(process, "nccl", "PyTorch was not told where to be asked for it when the process started")
        elif _is_stopped(process):
            self._skip(process, "nccl", "it is stopped, so that nobody reads its pipe")
        else:
            request = FlightRequest(process.pid, place)
            try:
                request.send(after_one_too_late=process.pid in self._late)
            except FlightDumpError as error:
                self._skip(process, "nccl", str(error))
            else:
                self._late.discard(process.pid)
                self._wait_for(process, "nccl", request)

    def _ask_gloo(self, process: TrackedProcess) -> None:
        if _is_stopped(process):
            self._skip(process, "gloo", "it is stopped, so that nobody answers")
            return
        request = GlooRequest(process.pid, HookFiles.of(self._runtime, process.pid, process.handle.start_ticks).socket)
        try:
            request.send()
        except FlightDumpError as error:
            self._skip(process, "gloo", str(error))
        else:
            self._wait_for(process, "gloo", request)

    def _wait_for(self, process: TrackedProcess, recorder: Recorder, request: FlightRequest | GlooRequest) -> None:
        deadline = self._began + min(_DUMP_SECS[recorder], self._secs)
        self._under_way.append(_Asked(process, recorder, request, self._run.report(process), deadline))

    def _skip(self, process: TrackedProcess, recorder: Recorder, reason: str) -> None:
        self._run.report(process).evidence.append(Evidence(_KINDS[recorder], "skipped", reason=reason))
        self._missing.append((recorder, f"{_name(process)}, {recorder}: {reason}."))

    def _take_left_behind(self, process: TrackedProcess) -> None:
        place = FlightPlace.read(self._runtime, process.pid, process.handle.start_ticks)
        request = FlightRequest(process.pid, place) if place is not None else None
        if request is not None and process.pid not in self._late and request.take_unasked():
            self._wait_for(process, "nccl", request)
        else:
            self._missing.append((None, f"{_name(process)}: it was dead before it could be asked."))

    def _take(self, asked: _Asked, received: Received) -> None:
        process, kind = asked.process, _KINDS[asked.recorder]
        world = self._worlds[process.pid]
        self._records.append(
            RankRecord(received.rank, _name(process), world, received.dump, received.seconds, asked.recorder)
        )
        self._pids[_name(process)] = process.pid
        name = f"gpu/{world and f'{world}_'}{kind}_{received.rank}"
        if len({(one.world, one.rank, one.recorder) for one in self._records}) < len(self._records):
            # What the processes say of their ranks is not to be trusted.
            name = f"gpu/{titles.label_of(process.title, process.pid)}_{kind}_{received.rank}"
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
        asked.report.evidence.append(piece)
        if self.are_done:
            self._compare()

    def _compare(self) -> None:
        """Take into the incident what the dumps say together."""
        # Where no rank has NCCL, it is none of the matter that each has none; so with gloo.
        used = {None, *(record.recorder for record in self._records)} | self._failed
        missing = [line for recorder, line in self._missing if recorder in used]
        try:
            findings = judge_collectives(self._records)
            for finding in findings:
                finding.pids = [self._pids[name] for name in finding.processes]
                finding.waiting_pids = [self._pids[name] for name in finding.waiting]
        except Exception as error:
            logger.exception("the flight recorders cannot be compared")
            findings = []
            missing.append(f"The dumps cannot be compared: {type(error).__name__}.")
        if self._records or self._failed:
            self._run.set_collectives(Collectives(findings, missing))


def _is_stopped(process: TrackedProcess) -> bool:
    stat = procfs.read_stat(process.pid)
    return stat is not None and stat.state in "Tt"


def _name(process: TrackedProcess) -> str:
    return f"{process.title} (pid {process.pid})"
