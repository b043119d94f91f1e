"""Flight recorders of the schedulers: asked for right after the stacks, waited for a little, and compared."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path

from sglang_crashkit.analysis.collectives import RankRecord, judge_collectives, worlds_of
from sglang_crashkit.capture.flight_request import FlightPlace, FlightRequest, Received
from sglang_crashkit.errors import CrashkitError
from sglang_crashkit.handler.incident import IncidentRun
from sglang_crashkit.handler.processes import ProcessTree, TrackedProcess
from sglang_crashkit.incident.retention import status_of
from sglang_crashkit.kernel import procfs, titles
from sglang_crashkit.model.flight_dump import FlightDumpError
from sglang_crashkit.model.incident import Collectives, Evidence, ProcessReport

logger = logging.getLogger(__name__)

#: PyTorch looks once a second whether it is asked, and the end of the server waits for it: this long, in seconds.
_DUMP_SECS = 3.5
#: A dump under way is looked at this often, in seconds.
_LOOK_SECS = 0.1
#: Of dumps that come together, so many seconds are spent on reading before the handler looks at what else is due.
_READING_SECS = 0.25
#: Of the incident's budget, so much is left for what comes after them, in seconds.
_AFTER_SECS = 1.0
#: Incidents of a server whose own collectives are none of the matter.
_WITHOUT = frozenset({"peer_lost", "snapshot"})


def ask_flight_recorders(
    run: IncidentRun, tree: ProcessTree, runtime: Path, budget_secs: float, late: set[int]
) -> FlightRecorders:
    """Ask the schedulers of a server, where its incident is one in which their collectives matter.

    Args:
        run: the incident.
        tree: the server's processes.
        runtime: see `FlightRecorders`.
        budget_secs: the longest that the whole incident may take, in seconds.
        late: see `FlightRecorders`.
    """
    wanted = run.incident.kind not in _WITHOUT
    schedulers = [process for process in tree if process.role == "scheduler" and wanted]
    left_secs = run.opened + budget_secs - _AFTER_SECS - time.monotonic()
    return FlightRecorders(run, schedulers, runtime, max(0.0, left_secs), late)


class FlightRecorders:
    """The flight recorders of one incident.

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
        self._deadline = self._began + min(_DUMP_SECS, secs)
        self._under_way: dict[int, tuple[TrackedProcess, FlightRequest, ProcessReport]] = {}
        self._records: list[RankRecord] = []
        self._pids: dict[str, int] = {}
        self._missing: list[str] = []
        self._worlds = worlds_of({process.pid: process.rank for process in schedulers})
        for process in schedulers:
            if process.exited_at is None:
                self._ask(process, run.report(process))
            else:
                self._take_left_behind(process)
        if self._under_way:
            run.note(time.time(), "flight_recorders_asked", pids=sorted(self._under_way))

    @property
    def are_done(self) -> bool:
        """Whether nothing is waited for."""
        return not self._under_way

    def next_due(self) -> float:
        """Return when `look` has something to do, by the monotonic clock."""
        return float("inf") if self.are_done else min(self._deadline, time.monotonic() + _LOOK_SECS)

    def look(self) -> None:
        """See which dumps are whole by now, and give up those whose time is over."""
        began = time.monotonic()
        for pid, (process, request, _report) in list(self._under_way.items()):
            # Before the look: one that had ended by then writes no more.
            has_exited = process.handle.has_exited()
            is_late = time.monotonic() >= self._deadline
            try:
                received = request.look()
            except (FlightDumpError, OSError) as error:
                self._fail(pid, str(error))
                continue
            if received is not None:
                self._take(pid, received)
            elif has_exited:
                self._fail(pid, f"it ended before its dump was whole: {request.leftover()}")
            elif is_late:
                self._late.add(pid)
                secs = self._deadline - self._began
                self._fail(pid, f"not whole within {secs:.1f} s: {request.leftover()}")
            if time.monotonic() >= began + _READING_SECS:
                return

    def give_up(self, reason: str) -> None:
        """Wait no longer, for a reason that is noted."""
        for pid, (_process, request, _report) in list(self._under_way.items()):
            self._late.add(pid)
            self._fail(pid, f"{reason}: {request.leftover()}")

    def _ask(self, process: TrackedProcess, report: ProcessReport) -> None:
        stat = procfs.read_stat(process.pid)
        place = FlightPlace.read(self._runtime, process.pid, process.handle.start_ticks)
        if place is None:
            reason = "PyTorch was not told where to be asked for it when the process started"
        elif stat is not None and stat.state in "Tt":
            reason = "it is stopped, so that nobody reads its pipe"
        else:
            request = FlightRequest(process.pid, place)
            try:
                request.send(after_one_too_late=process.pid in self._late)
            except FlightDumpError as error:
                reason = str(error)
            else:
                self._late.discard(process.pid)
                self._under_way[process.pid] = (process, request, report)
                return
        report.evidence.append(Evidence("flight_recorder", "skipped", reason=reason))
        self._missing.append(f"{_name(process)}: {reason}.")

    def _take_left_behind(self, process: TrackedProcess) -> None:
        place = FlightPlace.read(self._runtime, process.pid, process.handle.start_ticks)
        request = FlightRequest(process.pid, place) if place is not None else None
        if request is not None and process.pid not in self._late and request.take_unasked():
            self._under_way[process.pid] = (process, request, self._run.report(process))
        else:
            self._missing.append(f"{_name(process)}: it was dead before it could be asked.")

    def _take(self, pid: int, received: Received) -> None:
        process, request, _report = self._under_way[pid]
        world = self._worlds[pid]
        self._records.append(RankRecord(received.rank, _name(process), world, received.dump, received.seconds))
        self._pids[_name(process)] = pid
        name = f"gpu/{world and f'{world}_'}flight_recorder_{received.rank}"
        if len({(one.world, one.rank) for one in self._records}) < len(self._records):
            # What the processes say of their ranks is not to be trusted.
            name = f"gpu/{titles.label_of(process.title, pid)}_flight_recorder_{received.rank}"
        try:
            path = self._run.folder.write_bytes(name, received.data)
        except (OSError, CrashkitError) as error:
            self._end(pid, Evidence("flight_recorder", status_of(error), reason=f"{name}: {error}"))
        else:
            reason = "PyTorch had written it by itself" if request.is_unasked else None
            self._end(pid, Evidence("flight_recorder", "captured", path, reason))

    def _fail(self, pid: int, reason: str) -> None:
        self._missing.append(f"{_name(self._under_way[pid][0])}: {reason}.")
        self._end(pid, Evidence("flight_recorder", "failed", reason=reason))

    def _end(self, pid: int, piece: Evidence) -> None:
        _process, _request, report = self._under_way.pop(pid)
        piece.seconds = round(time.monotonic() - self._began, 3)
        report.evidence.append(piece)
        if self.are_done:
            self._compare()

    def _compare(self) -> None:
        """Take into the incident what the dumps say together."""
        try:
            findings = [
                finding.to_json() | {"pids": [self._pids[name] for name in finding.processes]}
                for finding in judge_collectives(self._records)
            ]
        except Exception as error:
            logger.exception("the flight recorders cannot be compared")
            findings = []
            self._missing.append(f"The dumps cannot be compared: {type(error).__name__}.")
        self._run.set_collectives(Collectives(findings, self._missing))


def _name(process: TrackedProcess) -> str:
    return f"{process.title} (pid {process.pid})"
