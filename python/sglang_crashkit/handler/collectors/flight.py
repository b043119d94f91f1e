"""Flight recorders of the schedulers: asked for right after the stacks, waited for a little, and compared."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sglang_crashkit.analysis.collectives import RankRecord, Recorder, judge_collectives, worlds_of
from sglang_crashkit.capture.flight_request import FlightPlace, FlightRequest, GlooRequest, NoRecorderError, Received
from sglang_crashkit.handler.collectors.process_evidence import write_piece
from sglang_crashkit.handler.incident import IncidentRun
from sglang_crashkit.handler.processes import TrackedProcess
from sglang_crashkit.kernel import procfs, titles
from sglang_crashkit.kernel.stack_hooks import HookFiles
from sglang_crashkit.model.flight_dump import FlightDumpError
from sglang_crashkit.model.incident import Collectives, Evidence, EvidenceKind, EvidenceStatus, ProcessReport

logger = logging.getLogger(__name__)

#: The end of the server waits for it: this long, in seconds. For NCCL PyTorch looks once a second whether it is asked;
#: for gloo a thread of the process answers, in some 0.1 s.
_DUMP_SECS: dict[Recorder, float] = {"nccl": 3.5, "gloo": 2.0}
_KINDS: dict[Recorder, EvidenceKind] = {"nccl": "flight_recorder", "gloo": "gloo_flight_recorder"}
#: A dump under way is looked at this often, in seconds: the incident, and a rank that raised, wait for it.
_LOOK_SECS = 0.03
#: Of more than so many the walk through all would take half a core, and they are looked at this often, in seconds.
_FEW, _LOOK_SECS_OF_MANY = 16, 0.1
#: Of dumps that come together, so many seconds are spent on reading before the handler looks at what else is due.
_READING_SECS = 0.25


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
            run.note(time.time(), "flight_recorders_asked", pids=pids)

    @property
    def are_done(self) -> bool:
        """Whether nothing is waited for."""
        return not self._under_way

    def awaits_gloo_of(self, pid: int) -> bool:
        """Say whether a process is to answer for gloo, which it does not any more once its interpreter ends."""
        return any(asked.process.pid == pid and asked.recorder == "gloo" for asked in self._under_way)

    def next_due(self) -> float:
        """Return when `look` has something to do, by the monotonic clock."""
        pause = _LOOK_SECS if len(self._under_way) <= _FEW else _LOOK_SECS_OF_MANY
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
            findings = [
                finding.to_json()
                | {"pids": self._pids_of(finding.processes), "waiting_pids": self._pids_of(finding.waiting)}
                for finding in judge_collectives(self._records)
            ]
        except Exception as error:
            logger.exception("the flight recorders cannot be compared")
            findings = []
            missing.append(f"The dumps cannot be compared: {type(error).__name__}.")
        if self._records or self._failed:
            self._run.set_collectives(Collectives(findings, missing))

    def _pids_of(self, names: Sequence[str]) -> list[int]:
        return [self._pids[name] for name in names]


def _is_stopped(process: TrackedProcess) -> bool:
    stat = procfs.read_stat(process.pid)
    return stat is not None and stat.state in "Tt"


def _name(process: TrackedProcess) -> str:
    return f"{process.title} (pid {process.pid})"
