"""One incident, from its trigger to its folder on disk; a repeated incident of the same fault is kept short."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from sglang_crashkit.handler.collectors import process_evidence
from sglang_crashkit.handler.collectors.requests import add, requests_of
from sglang_crashkit.handler.conclusion import Conclusion, conclude
from sglang_crashkit.handler.processes import ProcessTree, TrackedProcess
from sglang_crashkit.incident.exit_status import FATAL_SIGNALS, exit_status_of, reports_crash
from sglang_crashkit.incident.folder import IncidentFolder
from sglang_crashkit.incident.judging import judge, order_failures
from sglang_crashkit.incident.marker import server_info
from sglang_crashkit.kernel import clock, procfs
from sglang_crashkit.kernel.forked import MAX_ANSWER, call_within
from sglang_crashkit.memory.heartbeat import LONG_SECS, Heartbeat
from sglang_crashkit.model.incident import (
    Evidence,
    EvidenceKind,
    FailureEvent,
    HandlerInfo,
    Incident,
    LastSign,
    ProcessReport,
    Requests,
    Trigger,
    Verdict,
)
from sglang_crashkit.model.incident_log import LOG, IncidentLog
from sglang_crashkit.model.peers import LostPeer
from sglang_crashkit.policy import Capture
from sglang_crashkit.redact import redact_text
from sglang_crashkit.settings import Settings

logger = logging.getLogger(__name__)

#: Kinds that only name the failure reported first; they are corrected once the other failures are known.
_KINDS_OF_CRASHES = frozenset({"killed", "exited", "exception", "child_failure"})
#: An incident names at most this many lost peers, and this many waiting requests of all of them.
_MAX_PEERS, _MAX_WAITING = 64, 1024
#: The number of innermost frames recorded of a thread that died.
_MAX_THREAD_FRAMES = 16
#: Maximum characters of a process's failure message, and of the verdict of an incident that could not be judged.
_MAX_MESSAGE, _MAX_PLAIN = 300, 2000
#: At most this many failures of one process are judged; the timeline has all.
_MAX_FAILURES = 64
#: The time limits for judging and rendering a finished incident, and for judging one in progress, in seconds; and the
#: size limit of a conclusion, in bytes. With 512 ranks it takes 0.6 s and 1 MB.
_CONCLUDE_SECS, _ASK_SECS, _MAX_CONCLUSION = 10.0, 2.0, 16 << 20
#: The descriptor of standard error, the crash handler's log: a forked child keeps it open.
_LOG = 2
#: The longest time for native stacks, and the time that they leave for writing, in seconds.
_NATIVE_SECS, _WRITING_SECS = 5.0, 1.0
#: Seconds of an incident's time, or a share of it where that is less, reserved to write what is held in memory; and the
#: most seconds that this may take where more time is left. Eight ranks take about one second.
_KEPT_SECS, _KEPT_SHARE, _MEMORY_SECS = 3.0, 0.25, 6.0
#: The share of the server's exit time that GPU cores leave unused.
_LAST_SHARE = 0.1

_Made = TypeVar("_Made", bound=msgspec.Struct)


def secs_before_memory(budget_secs: float) -> float:
    """Return the seconds of `budget_secs` after which an incident gathers what is held in memory."""
    return budget_secs - min(_KEPT_SECS, _KEPT_SHARE * budget_secs)


class Moment(Enum):
    """When a kind of evidence is taken, the most short-lived first."""

    CAPTURE = "as the incident begins, and again for each sample more"
    ASK = "once the samples are there"
    STOP = "as the incident ends, when all that was asked is answered: it stops the processes for a moment"
    CORE = "after that: who writes a core does nothing else"
    WRITE = "last: it is held in memory that outlives the processes"


class Awaited(ABC):
    """Evidence that arrives while the crash handler does other work; the incident finishes after it."""

    @property
    @abstractmethod
    def is_done(self) -> bool:
        """Whether all of it has arrived or was given up."""

    @property
    def look_secs(self) -> float:
        """The seconds between two calls of `look`."""
        return 0.1

    @property
    def secs_left(self) -> float | None:
        """The seconds still needed, for the processes that wait for the incident; None if that is short."""
        return None

    def pids_of(self, _kind: EvidenceKind) -> Set[int]:
        """Return the pids of the processes whose evidence of a kind is awaited."""
        return frozenset()

    @abstractmethod
    def look(self) -> None:
        """Add the evidence that is complete by now."""

    @abstractmethod
    def give_up(self, reason: str) -> None:
        """Stop waiting for incomplete evidence; note `reason` as why it is missing."""


@dataclass(frozen=True)
class Collector:
    """A kind of evidence."""

    name: str  # its name in the log if it fails
    moment: Moment  # the moment of an incident at which it is taken
    take: Callable[[IncidentRun, float], Awaited | None]  # takes it by a deadline (monotonic), or starts to
    when: Callable[[IncidentRun], bool] = lambda _run: True  # whether an incident needs it


class IncidentRun:
    """Gathers one incident: logs each event in its folder, and writes the whole at the end; later events join.

    Args:
        kind: of the event that was seen first; a finished crash has the kind of its first failure.
        runtime: the folder where the server's processes record their stack hooks.
        collectors: the table from `handler.evidence`.
        note_error: called with a failed collector's name and its error; the other collectors still run.
    """

    def __init__(
        self,
        kind: str,
        trigger: Trigger,
        tree: ProcessTree,
        folder: IncidentFolder,
        runtime: Path,
        settings: Settings,
        collectors: Sequence[Collector] = (),
        note_error: Callable[[str, Exception], object] = lambda *_: None,
    ) -> None:
        self.folder, self.tree, self.runtime, self.settings = folder, tree, runtime, settings
        self.opened = time.monotonic()  # by the monotonic clock
        self.captures = Capture.NONE  # how the living processes may be captured
        self.rounds = 0  # how many times their stacks were taken
        self.is_fatal_hang = False  # upstream ends the server because of the hang
        self.is_ending = False  # the server ends because of the incident
        self.begun: set[str] = set()  # the requests that were in a step of a rank; empty once finished
        self.finished = False  # it is complete; a later addition writes it again
        self.conclusion: Conclusion | None = None  # its verdict and documents; None until it is finished
        self._discarded = self._is_stale = False
        self._collectors, self._note_error = collectors, note_error
        self.moments: set[Moment] = set()  # those reached so far
        self._awaited: list[Awaited] = []
        self._log = IncidentLog()
        root, own = tree.root, procfs.read_stat(os.getpid())
        assert own is not None
        server = server_info(root.pid, root.handle.start_ticks)
        handler = HandlerInfo(own.pid, own.start_ticks)
        self.incident = Incident(id=folder.id, kind=kind, trigger=trigger, server=server, handler=handler)
        self.checkpoint()

    @property
    def is_open(self) -> bool:
        """Whether it is neither finished nor discarded."""
        return not self.finished and not self._discarded

    @property
    def concerns_ranks(self) -> bool:
        """Whether the state of the ranks is evidence: their GPUs, their collectives, and threads that died before."""
        return self.incident.kind not in ("peer_lost", "snapshot", "thread_died")

    # -- evidence

    @property
    def is_waiting(self) -> bool:
        """Whether it waits for evidence."""
        return bool(self._awaited)

    @property
    def secs_left(self) -> float | None:
        """The longest `Awaited.secs_left` of the awaited evidence, in seconds; None without one."""
        return max((secs for one in self._awaited if (secs := one.secs_left) is not None), default=None)

    @property
    def captured(self) -> bool:
        """Whether the activity of the living processes was captured."""
        return Moment.CAPTURE in self.moments

    def take(self, moment: Moment) -> None:
        """Run the collectors of a moment, once except for `CAPTURE`; if one fails, the others still run."""
        if moment in self.moments and moment is not Moment.CAPTURE:
            return
        self.moments.add(moment)
        began = time.monotonic()
        for one in self._collectors:
            if one.moment is moment and one.when(self):
                try:
                    if (awaited := one.take(self, self._deadline_of(moment, began))) is not None:
                        self._awaited.append(awaited)
                except Exception as error:  # noqa: BLE001 - noted
                    self._note_error(one.name, error)
        self._awaited = [one for one in self._awaited if not one.is_done]

    def _deadline_of(self, moment: Moment, began: float) -> float:
        """Return the deadline for a collector of a moment that began at `began`, both by the monotonic clock."""
        settings, opened, now = self.settings, self.opened, time.monotonic()
        asked_end, end = opened + secs_before_memory(settings.budget_secs), opened + settings.budget_secs
        if moment is Moment.CAPTURE:
            return now + settings.capture_secs
        if moment is Moment.ASK:
            return asked_end
        if moment is Moment.STOP:
            return min(began + _NATIVE_SECS, end - _WRITING_SECS)
        if moment is Moment.CORE:
            # The server's exit time counts from the start of the incident.
            return opened + (1 - _LAST_SHARE) * settings.exit_secs
        # A collector gets at most half of the time left, so that those after it get a share, however late it is.
        return (max(began + min(end - min(began, asked_end), _MEMORY_SECS), now) + now) / 2

    def pids_of(self, kind: EvidenceKind) -> Set[int]:
        """Return the pids of the processes whose evidence of a kind is awaited."""
        return frozenset[int]().union(*(one.pids_of(kind) for one in self._awaited))

    def next_look(self) -> float:
        """Return when to call `look` next, by the monotonic clock."""
        return time.monotonic() + min((one.look_secs for one in self._awaited), default=float("inf"))

    def look(self) -> None:
        """Add the awaited evidence that is complete by now."""
        self._each_awaited(lambda one: one.look())

    def give_up(self, reason: str) -> None:
        """Stop waiting for incomplete evidence; note `reason` as why it is missing."""
        self._each_awaited(lambda one: one.give_up(reason))

    def _each_awaited(self, do: Callable[[Awaited], None]) -> None:
        left = []
        for one in self._awaited:
            try:
                do(one)
                left += [] if one.is_done else [one]
            except Exception as error:  # noqa: BLE001 - noted, and given up
                self._note_error(f"the answer to {type(one).__name__}", error)
        self._awaited = left

    # -- events

    def add_remark(self, sentence: str) -> None:
        """Add a sentence to the verdict, even of a finished incident."""
        self.incident.remarks.append(sentence)
        if self.finished:
            self.checkpoint()

    def checkpoint(self) -> None:
        """Log the new facts, which then survive the death of this process. This makes a finished incident stale."""
        if self._discarded:
            return
        try:
            self.folder.append(LOG, self._log.lines(self.incident))
            self._log.keep()
        except (OSError, ValueError) as error:
            # The folder of a finished incident may have been removed by now.
            logger.warning("incident %s cannot be written for now: %s", self.folder.path, error)
        self._is_stale = self.finished

    def refresh(self) -> None:
        """Judge and render a finished incident again, if facts were added since."""
        if not self._is_stale:
            return
        self._is_stale = False
        # If this fails, the earlier verdict stands; the new facts are in the log.
        if (made := self._conclude_in_child(again=True)) is not None:
            try:
                self._save_conclusion(made)
            except OSError as error:
                logger.warning("incident %s cannot be written for now: %s", self.folder.path, error)

    def _conclude_in_child(self, *, again: bool) -> Conclusion | None:
        """Judge and render the incident in a child process; return None if that fails."""
        arguments = self.incident, self.folder, self.settings.full_per_fault, self.begun
        make = functools.partial(conclude, *arguments, again=again)
        return self._made_within(_CONCLUDE_SECS, Conclusion, make, _MAX_CONCLUSION)

    def _conclude_plainly(self) -> Conclusion:
        """Return a minimal conclusion, made in this process, that names the first failure."""
        verdict = self.incident.verdict = judge(self.incident, None)
        self.incident.cause = None
        words = redact_text(
            f"{verdict.text[:_MAX_PLAIN]} The incident could not be judged: the crash handler's log says why."
        )
        summary = f"# {self.incident.kind}\n\n{words}\n"
        return Conclusion(self.incident.to_json(), summary, exit_status_of(self.incident), [words], [words], words)

    def _made_within(
        self, secs: float, kind: type[_Made], make: Callable[[], _Made], most: int = MAX_ANSWER
    ) -> _Made | None:
        """Return the result of `make` in a child process within `secs` and `most` bytes; None, logged, if it fails."""

        def work() -> bytes:
            return json.dumps(msgspec.to_builtins(make()), default=str).encode()

        try:
            answer = call_within(secs, work, most, keep=[_LOG])
            return msgspec.convert(json.loads(answer), kind)
        except (OSError, ValueError, RecursionError) as error:
            logger.error("incident %s could not be judged: %s", self.folder.path, error)
            return None

    def _save_conclusion(self, made: Conclusion) -> None:
        """Write a conclusion, and keep the parts that are needed later.

        Raises:
            OSError: the disk is full or the folder is gone.
        """
        whole = Incident.of(made.document)
        for report in whole.processes:
            if (before := self.incident.process(report.pid)) is not None:
                # A later judgement needs these, and the document lacks them.
                report.samples, report.raised_through = before.samples, before.raised_through
                report.hit_in_main = before.hit_in_main
        self.incident = whole
        self.folder.save(made.document, made.summary, is_redacted=made.is_redacted, sync=not self.finished)
        # These take up to a megabyte, and are on disk.
        made.document, made.summary = {}, ""
        self.conclusion = made

    def discard(self) -> None:
        """Remove the folder: the event was no incident after all."""
        self._discarded = True
        try:
            self.folder.discard()
        except OSError as error:
            logger.error("incident %s could not be removed: %s", self.folder.path, error)

    def report(self, process: TrackedProcess) -> ProcessReport:
        """Return the report on a process, to which evidence may be added."""
        report = self.incident.process(process.pid)
        if report is None:
            report = ProcessReport(process.pid, process.title, process.role, process.rank)
            self.incident.processes.append(report)
        elif report.title != process.title:
            report.title, report.role, report.rank = process.title, process.role, process.rank
        return report

    def drop_snapshots(self, process: TrackedProcess, kept: int) -> None:
        """Drop the snapshots taken after a process went on; the first `kept` show the hang."""
        report = self.report(process)
        if len(report.samples) <= kept:
            return
        stacks = [piece for piece in report.evidence if piece.kind == "stack"]
        for piece in stacks[kept:]:
            report.evidence.remove(piece)
        report.evidence.append(Evidence("stack", "skipped", reason=f"it went on before snapshot {kept + 1} was taken"))
        del report.samples[kept:]
        if not kept:
            report.doing = []

    def permit(self, captures: Capture) -> None:
        """Allow captures of the living processes up to this level."""
        self.captures = max(self.captures, captures, key=list(Capture).index)

    def ask(self) -> None:
        """Judge the facts so far in a forked process, for example whether ranks are at work; store the verdict."""
        told = self._made_within(_ASK_SECS, Verdict, lambda: judge(self.incident, self.folder.path))
        self.incident.verdict = told or judge(self.incident, None)

    def add_exit(self, process: TrackedProcess) -> None:
        """Add the exit of a process of the server; in a finished incident, only note it."""
        seconds, status = process.exited_at or clock.now(), process.handle.exit_status()
        how = {"code": status.code, "signal": status.signal}
        known = self.incident.process(process.pid)
        if known is None or known.exit is None:
            self.incident.note(seconds, "process_exited", pid=process.pid, title=process.title, **how)
        if self.finished:
            return
        report = self.report(process)
        if not any(piece.kind == "stack" for piece in report.evidence):
            report.evidence.append(Evidence("stack", "skipped", reason="it was dead before its stacks could be taken"))
        self._note_exit(process)
        is_first = not self.incident.failures
        if process.matters or process.role == "starting":
            self.count_exit(process)
        # The handler may be killed during the capture, so log the first failure before it.
        if self.captured or (is_first and self.incident.failures):
            self.checkpoint()

    def count_exit(self, process: TrackedProcess) -> None:
        """Count the exit of a process that is more than a helper as a failure."""
        status = process.handle.exit_status()
        self._add_failure(
            FailureEvent(
                pid=process.pid,
                seconds=process.exited_at or clock.now(),
                kind="exit",
                fatal_signal=status.signal in FATAL_SIGNALS,
                before_capture=not self.captured,
                with_parent=process.ended_with_parent,
                is_answer=process.is_root and reports_crash(status.code),
            )
        )

    def _add_failure(self, event: FailureEvent) -> None:
        # Each checkpoint logs all failures; further ones of the same process add nothing.
        if sum(one.pid == event.pid for one in self.incident.failures) < _MAX_FAILURES:
            self.incident.failures.append(event)

    def add_exception(
        self, process: TrackedProcess, seconds: float, message: str, record: Path | None, *, caught: bool
    ) -> None:
        """Add an exception, as one line, and the record that the process wrote; a finished incident only notes it.

        An exception that SGLang `caught` ends nothing.
        """
        report = self.report(process)
        # A file name that is not UTF-8 gives lone surrogates, which can't be written to a file.
        message = message[:_MAX_MESSAGE].encode(errors="backslashreplace").decode()
        told = {"caught": True} if caught else {}
        self.incident.note(seconds, "exception", pid=process.pid, title=process.title, message=message, **told)
        if self.finished:
            # A record left in place would be mistaken for a separate crash.
            if record is not None:
                process_evidence.adopt_record(record, report, self.folder)
            self.checkpoint()
            return
        self._add_failure(FailureEvent(process.pid, seconds, "exception", message, caught=caught))
        if record is None:
            report.evidence.append(Evidence("exception", "failed", reason="the process could not write its record"))
        else:
            report.raised_through = process_evidence.adopt_record(record, report, self.folder)
            report.doing = report.raised_through[: process_evidence.MAX_DOING] or report.doing
        if self.captured:
            self.checkpoint()

    def add_dead_thread(
        self, process: TrackedProcess, seconds: float, thread: str, message: str, record: Path | None
    ) -> list[str]:
        """Add a thread that died by an exception, and the process's record of it; return the thread's frames."""
        report, frames = self.report(process), list[str]()
        if record is not None:
            frames = process_evidence.adopt_record(record, report, self.folder, "thread_exception")
        self.recall_dead_thread(process, seconds, thread, message, frames)
        return frames

    def recall_dead_thread(
        self, process: TrackedProcess, seconds: float, thread: str, message: str, frames: Sequence[str]
    ) -> None:
        """Add the death of a thread, whose record may be in an earlier incident."""
        message, thread = (text[:_MAX_MESSAGE].encode(errors="backslashreplace").decode() for text in (message, thread))
        its = {"thread": thread, "message": message, "frames": frames[:_MAX_THREAD_FRAMES]}
        self.incident.note(seconds, "thread_died", pid=process.pid, title=process.title, **its)
        if not self.finished:
            words = f"its thread {thread or '?'}, which raised {message}"
            self._add_failure(FailureEvent(process.pid, seconds, "thread", words))
        self.checkpoint()

    def add_hang(self, process: TrackedProcess, seconds: float, fields: dict[str, Any]) -> None:
        """Add a watchdog timeout of a process; `fields` may have ``name``, ``silent_secs`` and ``soft``."""
        said = {name: fields.get(name) for name in ("name", "silent_secs", "soft")}
        self.is_fatal_hang = self.is_fatal_hang or said["soft"] is not True
        how_long = f" for {said['silent_secs']:g} s" if said["silent_secs"] is not None else ""
        message = f"made no progress{how_long}: its watchdog timed out"
        self._add_failure(FailureEvent(process.pid, seconds, "hang", message))
        self.incident.note(seconds, "watchdog_timeout", pid=process.pid, title=process.title, **said)

    def add_peer(self, seconds: float, peer: LostPeer) -> bool:
        """Add another server of the pair that SGLang gave up, even if finished; return whether it is new."""
        peers = self.incident.peers
        for known in peers:
            if (known.role, known.address) == (peer.role, peer.address):
                known.merge(peer)
                return False
        if len(peers) >= _MAX_PEERS:
            return False
        peer.requests = peer.requests[: max(0, _MAX_WAITING - sum(len(known.requests) for known in peers))]
        peers.append(peer)
        self.incident.note(seconds, "peer_lost", role=peer.role, address=peer.address, sign=peer.sign)
        if self.finished:
            self.checkpoint()
        return True

    def add_requests(self, fields: dict[str, Any]) -> None:
        """Add a process's report of the requests that it saved; ``workers``: it has none, its workers do."""
        before = self.incident.requests
        if "workers" not in fields:
            self.set_requests(fields, before)
        elif before.finished is None:
            self.set_requests({"reason": f"none of {fields['workers']} tokenizer workers said that it saved any"})

    def set_requests(self, fields: dict[str, Any], before: Requests | None = None) -> None:
        """Set the report of the saved requests, added to the `before` of other processes."""
        told = requests_of(fields)
        self.incident.requests = told if before is None else add(before, told)
        event = "requests_saved" if told.path else "requests_not_saved"
        self.incident.note(clock.now(), event, reason=told.reason, path=told.path)
        self.checkpoint()

    def add_silence(self, process: TrackedProcess, sign: Heartbeat | None, secs: float, how: str = "") -> None:
        """Add a scheduler's silence of `secs` since its heartbeat `sign`; or, without, `how` a process stood still."""
        now = clock.now()
        details: dict[str, Any] = {"silent_secs": round(secs, 3)}
        message = f"{how} for {secs:.1f} s"
        if sign is not None:
            last = self.set_last_sign(process, sign, secs)
            details |= {"doing": sign.doing, "batches": sign.batches}
            message = f"made no progress for {secs:.1f} s; the last sign was of {sign.doing}"
            if last.collecting_secs:
                message += f", in a garbage collection for {last.collecting_secs:.0f} s"
        self.incident.note(now, "no_progress", pid=process.pid, title=process.title, **details)
        if self.finished:
            self.checkpoint()
        else:
            # Report the process even if it gave no evidence.
            self.report(process)
            self._add_failure(FailureEvent(process.pid, now - secs, "hang", message))

    def set_last_sign(self, process: TrackedProcess, sign: Heartbeat, secs: float) -> LastSign:
        """Set the last heartbeat of a scheduler, `secs` before it died or, if alive, before now."""
        before = round(max(0.0, secs), 3)
        # The time of its exit, or now, by the monotonic clock, as in the heartbeat.
        ended = time.monotonic() - (clock.now() - process.exited_at if process.exited_at is not None else 0.0)
        secs = ended - sign.collecting_since if sign.collecting_since else 0.0
        collecting = round(secs, 3) if secs > LONG_SECS else 0.0
        last = LastSign(sign.doing, sign.batches, sign.requests, sign.mode, sign.tokens, before, collecting)
        self.report(process).last_sign = last
        return last

    def finish(self) -> Path:
        """Judge and write the incident, and rename the folder to its final path, which is returned.

        Raises:
            OSError: the disk is full or the folder is gone.
        """
        for process in self.tree:
            if process.exited_at is not None and not process.is_ignorable:
                self._note_exit(process)
        self.incident.processes.sort(key=lambda report: (report.role == "helper", report.role, report.pid))
        failures = self.incident.failures if self.incident.kind in _KINDS_OF_CRASHES else []
        first = order_failures(failures)[0] if failures else None
        if first is not None and first.kind != "hang" and not first.is_answer:
            # A consequence may have been reported before the first failure.
            kind = first.kind if first.kind == "exception" else "killed" if first.fatal_signal else "exited"
            if kind != self.incident.kind:
                self.incident.kind = kind
                self.folder.rename(kind)
        self.incident.note(clock.now(), "incident_finished", seconds=round(time.monotonic() - self.opened, 4))
        self.checkpoint()
        self.incident.complete = True
        made = self._conclude_in_child(again=False) or self._conclude_plainly()
        self._save_conclusion(made)
        with contextlib.suppress(OSError):
            for name in made.spare:
                self.folder.remove(name)
        path = self.folder.publish()
        self.finished = True
        self.begun.clear()
        logger.info("incident %s: %s", path, self.incident.verdict.text if self.incident.verdict else "")
        return path

    def _note_exit(self, process: TrackedProcess) -> None:
        report = self.report(process)
        raised = any(failure.pid == process.pid and failure.kind == "exception" for failure in self.incident.failures)
        process_evidence.note_exit(report, process, raised=raised)
        if self.settings.stacks:
            process_evidence.take_fault(process, report, self.folder, self.runtime)
