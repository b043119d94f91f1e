"""The current incident: carry out the decisions of `triage`, and answer the processes that wait for it."""

from __future__ import annotations

import contextlib
import logging
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence, Set
from dataclasses import asdict, dataclass
from typing import Any

from sglang_crashkit import policy
from sglang_crashkit.errors import CrashkitError
from sglang_crashkit.handler.collectors.received import Received
from sglang_crashkit.handler.folders import Place
from sglang_crashkit.handler.incident_run import Collector, IncidentRun, Moment, secs_before_memory
from sglang_crashkit.handler.notices import Answers, Commands, ServerLog, Shortages
from sglang_crashkit.handler.processes import ProcessTree, TrackedProcess, ended_before, learn_exit_status, learn_ranks
from sglang_crashkit.handler.triage import Action, Do, Seen, Triage
from sglang_crashkit.incident.exit_status import FATAL_SIGNALS, write_termination_message
from sglang_crashkit.kernel import clock, procfs, signals
from sglang_crashkit.kernel.procfs import is_host_namespace
from sglang_crashkit.kernel.shared_memory import OrphanedSegment
from sglang_crashkit.kernel.stack_hooks import FAULT
from sglang_crashkit.model.incident import Trigger, iso_time
from sglang_crashkit.model.peers import LostPeer, describe
from sglang_crashkit.policy import Event
from sglang_crashkit.protocol import Mailbox, Message
from sglang_crashkit.settings import Settings

logger = logging.getLogger(__name__)

#: On SIGTERM, a scheduler is silent if its heartbeat stood still this long, in seconds, while the server is unhealthy
#: or saves its requests: an idle scheduler beats every second.
SILENT_SECS = 2.0
#: After this many failed attempts to finish an incident, its last checkpoint stands.
_MAX_FINISHES = 3
#: The number of dead threads remembered.
_MAX_THREADS = 8
#: An incident of lost peers is complete after this time, in seconds: every rank of a server reports the same peer.
_LOSS_SECS = 2.0
#: A peer lost within this time after the last loss, in seconds, belongs to the same incident: for example, servers
#: may be restarted one by one.
_SAME_LOSS_SECS = 600.0


@dataclass(frozen=True)
class Subject:
    """The process that actions are about, the time in seconds since the epoch, and the message if there is one."""

    process: TrackedProcess
    seconds: float
    message: Message | None = None

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of the message; empty without one."""
        return self.message.fields if self.message is not None else {}


class Session:
    """The current incident, if there is one, and what `triage` decides to do about it."""

    def __init__(
        self,
        tree: ProcessTree,
        mailbox: Mailbox,
        place: Place,
        settings: Settings,
        received: Received,
        collectors: Sequence[Collector],
    ) -> None:
        self.triage = Triage(tree.root.pid, secs_before_memory(settings.budget_secs))
        self.run: IncidentRun | None = None  # the current incident's data; None without one
        #: The incident of a hang that is not over; an incident opened meanwhile refers to it.
        self.hang: IncidentRun | None = None
        self.log = ServerLog(tree.root, place.runtime)
        self.received = received
        self.commands = Commands()
        self.shortages = Shortages(self.log.say)
        self._lacking: set[str] = set()
        self._tree = tree
        self._mailbox = mailbox
        self._place = place
        self._settings = settings
        self._answers = Answers(mailbox, max(1.0, settings.core_wait_secs))
        #: Process, time, thread name, exception and frames of each: a later failure may be due to a dead thread.
        self._dead_threads: deque[tuple[TrackedProcess, float, str, str, Sequence[str]]] = deque(maxlen=_MAX_THREADS)
        self._exiting: list[Message] = []
        self._raised: list[Message] = []
        self._failed_finishes = 0
        self._collectors = collectors
        #: The incident of lost peers, and when the last loss came, by the monotonic clock.
        self._losses: IncidentRun | None = None
        self._lost_at = 0.0

    # -- events and decisions

    def take(self, seen: Seen, subject: Subject | None = None) -> None:
        """Have `triage` judge an event, by default of the main process and now; carry out the actions."""
        subject = subject or Subject(self._tree.root, clock.now())
        for action in self.triage.take(seen, time.monotonic()):
            try:
                self._carry_out(action, subject)
            except Exception as error:  # noqa: BLE001 - noted in the log and the incident
                # A failed action must not prevent the others.
                self.note_error(action.do, error)

    def collect_exits(self) -> None:
        """Handle the exits that the kernel has not reported yet."""
        for process in self._tree.alive():
            if process.handle.has_exited():
                self.take_exit(process)

    def take_exit(self, process: TrackedProcess, *, again: bool = False) -> None:
        """Handle an exit once, after the earlier exits that caused it; `again`: it was mistaken for a helper's."""
        expected = self.triage.shutdown.expected
        try:
            for earlier in ended_before(self._tree, process) if process.exited_at is None else ():
                self.take_exit(earlier)
            if process.exited_at is not None and not again:
                # An incident opened for an earlier exit may have added this one.
                return
            if process.matters and process.pid not in expected:
                learn_exit_status(process, self._place.runtime)
            status = process.handle.exit_status()
            if process.is_own and status.signal in FATAL_SIGNALS - {"SIGKILL"}:
                # The main process copies a dying worker's fault dump to its own standard error, where upstream has it.
                self.log.notify(FAULT)
            seen = Seen(
                "exited",
                process.pid,
                process.role,
                status=status,
                matters=process.matters,
                is_unknown=process.is_unknown,
                is_foreign=process.is_foreign,
                others_serve=any(one.is_own and one.pid not in expected for one in self._tree),
            )
            self.take(seen, Subject(process, clock.now()))
        except Exception as error:  # noqa: BLE001 - as above
            self.note_error(f"the exit of process {process.pid}", error, "could not be taken in")
        finally:
            process.mark_exited()

    def _carry_out(self, action: Action, subject: Subject) -> None:
        process, seconds, fields, message = subject.process, subject.seconds, subject.fields, subject.message
        run, record = self.run, fields.get("record")
        steps: dict[Do, Callable[[], object]] = {
            "open": lambda: self._open(action.kind, action.words, subject),
            "capture": self.capture,
            "capture_again": self._sample_again,
            "send_sigquit": self._send_sigquit,
            "finish": self.finish,
            "forget": self._forget,
            "discard": self._discard,
            "mark_exited": process.mark_exited,
            "keep_process": lambda: self._tree.keep(process),
            "forget_process": lambda: self._tree.forget(process),
            "learn_ranks": lambda: self._learn_ranks(subject),
            "drop_record": lambda: self._place.drop_record(record),
            "close_journals": self.received.forget_requests,
        }
        # Answers need a message, and additions need an incident; without it the action does nothing.
        if message is not None:
            steps |= {
                "answer": lambda: self._answer(message),
                "answer_when_finished": lambda: self._answers.add(message, self._secs_left),
                "answer_captured": lambda: self._answer_captured(message),
                "answer_stacks": lambda: self._answer_stacks(message),
                "answer_saved": lambda: self._mailbox.acknowledge(message, ack="saved"),
                "answer_orderly": lambda: self._mailbox.acknowledge(message, ack="finished", path=None, orderly=True),
            }
        if run is not None:
            steps |= {
                "permit": lambda: run.permit(action.captures),
                "note": lambda: self._note(run, action.words, subject),
                "add_exit": lambda: run.add_exit(process),
                "add_exception": lambda: run.add_exception(
                    process,
                    seconds,
                    fields.get("message", ""),
                    self._place.record_of(record),
                    caught=fields.get("caught") is True,
                ),
                "add_dead_thread": lambda: self._add_dead_thread(run, subject),
                "add_hang": lambda: run.add_hang(process, seconds, fields),
                "add_requests": lambda: run.add_requests(fields),
                "set_requests": lambda: run.set_requests({"reason": action.words}),
                "add_silence": lambda: self._add_silence(run),
                "write": lambda: self._write(run),
            }
        steps.get(action.do, lambda: None)()

    def _add_dead_thread(self, run: IncidentRun, subject: Subject) -> None:
        fields, record = subject.fields, self._place.record_of(subject.fields.get("record"))
        told = subject.process, subject.seconds, fields.get("thread", ""), fields.get("message", "")
        self._dead_threads.append((*told, run.add_dead_thread(*told, record)))

    # -- the incident

    def open_observed(self, seen: Seen, process: TrackedProcess) -> IncidentRun | None:
        """Open an incident, which the caller captures and finishes; return None if there already is one."""
        self.collect_exits()
        before = self.triage.stage
        self.take(seen, Subject(process, clock.now()))
        return self.run if self.triage.stage is not before else None

    def capture(self) -> None:
        """Capture, once per incident, the activity of the processes that are alive now."""
        self._tree.refresh()
        # A dead process can't be captured; and a pending exit may discard this incident, or open another one.
        self.collect_exits()
        run = self.run
        if run is None or run.captured:
            return
        run.take(Moment.CAPTURE)
        if self.triage.stage is not None and not self.triage.stage.may_be_shutdown:
            run.take(Moment.ASK)
        # Even if the capture failed: the next actions depend on the failure, not on the stacks.
        self.triage.done("capture", time.monotonic())

    @property
    def writing_cores(self) -> Set[int]:
        """The pids of processes that are writing a GPU core, which must not be signalled or stopped."""
        return self.run.pids_of("cuda_core") if self.run is not None else frozenset()

    def finish(self) -> None:
        """Take the last evidence; once it is complete, write the incident and answer the processes that wait."""
        run = self.run
        if run is None:
            # The incident could not be opened.
            self.triage.stage = None
        elif not run.finished:
            try:
                if not self._gather_the_rest(run):
                    return
            except Exception as error:  # noqa: BLE001 - as above
                self._failed_finishes += 1
                self.note_error("finish", error)
                if self._failed_finishes < _MAX_FINISHES:
                    # The next turn tries again: by then, descriptors may be free.
                    return
                # The last checkpoint stands; `unfinished` completes it.
                run.finished = True
                self.triage.done("finish", time.monotonic())
        self._answers.give(self._answer)

    def _gather_the_rest(self, run: IncidentRun) -> bool:
        """Take the last evidence; once it is complete, write the incident; return whether it is written."""
        if self.triage.stage is not None:
            self.triage.stage.finishing = True
        for moment in (Moment.ASK, Moment.STOP, Moment.CORE):
            self.collect_exits()
            if not run.is_open:
                # One of the exits opened an incident of its own.
                return False
            run.is_ending = not self._is_observed
            run.take(moment)
            if run.is_waiting:
                self._answers.ask_all_to_wait(run.secs_left)
                return False
        self._write(run)
        self.triage.done("finish", time.monotonic())
        if run.is_ending:
            self._place.remove_marker()
            write_termination_message(run.conclusion.message if run.conclusion is not None else "")
        return True

    def note_error(self, what: str, error: Exception, how: str = "failed") -> None:
        """Log an error of the handler itself, and note it in the current incident."""
        if self.shortages.note(error):
            # A shortage recurs at every look; log it once for each action, without a traceback.
            if what in self._lacking:
                return
            self._lacking.add(what)
            logger.warning("%s %s: %s", what, how, error)
        else:
            logger.error("%s %s", what, how, exc_info=error)
        if self.run is not None:
            words = f"{type(error).__name__}: {error}"
            self.run.incident.note(clock.now(), "handler_error", what=what, message=words[:200])

    def finish_observed(self) -> None:
        """Finish the incident of a server that goes on."""
        if self.run is not None:
            self.run.set_requests({"reason": "the server went on"})
            self.finish()

    def is_withdrawable(self, run: IncidentRun) -> bool:
        """Return whether an incident is current and to be removed if the server goes on."""
        return self.run is run and self.triage.stage is not None and self.triage.stage.withdrawable

    def withdraw(self, run: IncidentRun) -> None:
        """Remove an incident, the current one or an earlier one, that proved to be a false alarm."""
        if self.run is run:
            self.triage.stage = None
            self._discard()
        else:
            run.discard()

    def close(self, removed: Sequence[str], left: Sequence[OrphanedSegment]) -> None:
        """Add the server's exit, and its leftover shared memory, to a finished incident; then stop gathering."""
        run, root = self.run, self._tree.root
        if run is not None and run.finished:
            status = root.handle.exit_status()
            run.incident.note(root.exited_at or clock.now(), "server_exited", code=status.code, signal=status.signal)
            if removed:
                run.incident.note(clock.now(), "shared_memory_removed", names=list(removed))
            if left:
                run.incident.note(clock.now(), "shared_memory_left", segments=[asdict(segment) for segment in left])
            run.checkpoint()
            run.refresh()
        self.received.close()
        if run is not None:
            run.give_up("the server ended")
        self.commands.act_on_time()

    def on_exiting(self, message: Message) -> None:
        """Prepare for the main process's orderly exit, which it announces.

        If its container ends with it, the kernel kills this handler as well. So the handler cleans up before.
        """
        if self.triage.is_open and is_host_namespace():
            # The handler outlives the main process here, and can take the time that the incident needs.
            self._mailbox.acknowledge(message, ack="at work")
            return
        if self.triage.is_open:
            self.finish()
        self._exiting.append(message)
        if self.triage.is_open:
            self._answers.ask_to_wait(message, self._secs_left or 0.0)

    def take_lost_peer(self, fields: dict[str, Any], sender: TrackedProcess) -> None:
        """Add a rank's report of a lost server of the pair to the current incident, or open one for it."""
        peer, shutdown, now = LostPeer.from_fields(fields, sender.pid), self.triage.shutdown, time.monotonic()
        if peer is None:
            return
        text = " ".join(describe([peer]))
        if self._tree.root.pid in shutdown.expected or (shutdown.draining and not peer.count):
            logger.info("the server ends: %s", text)
            return
        if (run := self._run_of_loss(now)) is None:
            what, event = "peer_lost", Event.PEER_LOST
            its = Seen("observed", sender.pid, sender.role, kind=what, trigger=what, event=event, secs=_LOSS_SECS)
            if (opened := self.open_observed(its, sender)) is not None:
                self._losses = opened
                # Capture the processes and their states without stacks: the failure is in another server.
                self.capture()
            # Opening an incident collects pending exits, and one of those may have opened its own.
            run = opened or self._run_of_loss(now)
        if run is not None and run.add_peer(time.time(), peer):
            self._lost_at = now
            logger.error("%s", text)
            self.log.say(text)

    def _run_of_loss(self, now: float) -> IncidentRun | None:
        """Return the incident that a loss at the time `now` belongs to, if there is one."""
        if self.run is not None and not self.run.finished:
            return self.run
        return self._losses if now < self._lost_at + _SAME_LOSS_SECS else None

    # -- time

    def act_on_time(self) -> float:
        """Run the due steps, and return when the next is due, by the monotonic clock."""
        if self.run is not None and self.triage.is_open:
            self.run.look()
            self._answers.ask_all_to_wait(self._secs_left)
        self.take(Seen("tick", workers_left=self._are_workers_left, any_left=bool(self._tree.alive())))
        stage = self.triage.stage
        is_finishing = stage is not None and stage.finishing and not stage.finished
        if is_finishing and self.run is not None and not self.run.is_waiting:
            self.finish()
        self._release_raised()
        if self.run is not None:
            self.run.refresh()
        while self._exiting and not self.triage.is_open:
            with self._mailbox.line_to(self._exiting.pop()) as answer:
                # From here on no other process of the server can send messages; they are about to be killed.
                self._place.remove_own()
                answer(ack="clean")
                logger.info("the server ends in good order")
        due = self.triage.next_due(workers_left=self._are_workers_left)
        return min(due, self.run.next_look()) if self.run is not None and self.triage.is_open else due

    def _release_raised(self) -> None:
        """Answer the processes that raised and wait for the capture, once they have reported their gloo state."""
        incident = self.run and self.run.incident.id
        awaited = self.run.pids_of("gloo_flight_recorder") if self.run is not None else ()
        for message in [one for one in self._raised if one.pid not in awaited]:
            self._raised.remove(message)
            # If there is no descriptor for one answer, still send the others.
            with contextlib.suppress(OSError):
                self._mailbox.acknowledge(message, ack="stacks_captured", incident=incident)

    # -- actions

    @property
    def _secs_left(self) -> float | None:
        return self.run.secs_left if self.run is not None else None

    @property
    def _is_observed(self) -> bool:
        return self.triage.stage is not None and self.triage.stage.observed

    @property
    def _are_workers_left(self) -> bool:
        return any(process.matters for process in self._tree.alive())

    def _open(self, kind: str, trigger: str, subject: Subject) -> None:
        """Open an incident, and gather it even if no folder can be written."""
        self.shortages.look()
        folder = self._place.make_folder(kind, subject.seconds, self._settings.disk, self._tree.root.pid)
        its = Trigger(trigger, iso_time(subject.seconds), subject.process.pid, subject.process.title)
        more = (self._place.runtime, self._settings, self._collectors, self.note_error)
        self.run = run = IncidentRun(kind, its, self._tree, folder, *more)
        for dead in self._tree.recent_unexplained():
            # The caller adds the exit that opened the incident. Once the server is ready, all ranks have titles.
            if dead is not subject.process and not self.received.environment.is_ready:
                run.add_exit(dead)
        for thread in self._dead_threads if run.concerns_ranks else ():
            if self._tree.get(thread[0].pid) is thread[0]:
                run.recall_dead_thread(*thread)
        if self.hang is not None:
            run.incident.note(clock.now(), "hang_not_over", incident=self.hang.incident.id)
            run.add_remark(f"The server made no progress before: incident {self.hang.incident.id}.")

    def _sample_again(self) -> None:
        # A sample may signal a process, which must not happen while a core is written.
        if self.run is not None and self.run.is_open and Moment.CORE not in self.run.moments:
            self.run.take(Moment.CAPTURE)

    def _learn_ranks(self, subject: Subject) -> None:
        run, expected = self.run, self.triage.shutdown.expected
        for rank, is_exit in learn_ranks(self._tree, subject.fields, subject.seconds, expected):
            if run is not None and is_exit:
                run.add_exit(rank)
            elif run is not None and not run.finished:
                run.count_exit(rank)

    def _add_silence(self, run: IncidentRun) -> None:
        for heartbeat in self.received.heartbeats.silent(SILENT_SECS):
            run.add_silence(heartbeat.process, heartbeat.sign, heartbeat.silent_secs)

    def _note(self, run: IncidentRun, event: str, subject: Subject) -> None:
        message = subject.message
        if message is None:
            run.incident.note(clock.now(), event, seconds=self._settings.budget_secs)
            return
        said = {}
        if event == "teardown":
            said = {"tree_of": message.fields.get("pid"), "by_server": message.pid == self._tree.root.pid}
        elif "message" in message.fields:
            said = {"message": message.fields["message"].encode(errors="backslashreplace").decode()}
        run.incident.note(subject.seconds, event, pid=message.pid, **said)

    def _send_sigquit(self) -> None:
        """Send SIGQUIT to the server, as its own children do, for a failure that it may not have noticed."""
        root, run = self._tree.root, self.run
        if root.exited_at is not None or run is None:
            return
        if not procfs.catches_signal(root.pid, signal.SIGQUIT):
            run.set_requests({"reason": "the server has no handler for SIGQUIT"})
            self.finish()
            return
        seconds = clock.now()
        if signals.send_sigquit(root.handle):
            run.incident.note(seconds, "sigquit_sent", pid=root.pid)
        self.triage.done("send_sigquit", time.monotonic())

    def _answer_captured(self, message: Message) -> None:
        self._raised.append(message)
        self._release_raised()

    def _answer_stacks(self, message: Message) -> None:
        # Stacks of a finished incident don't answer the sender's question.
        known = self.run.incident if self.run is not None and not self.run.finished else None
        captured = sum(
            any(piece.kind == "stack" and piece.status == "captured" for piece in report.evidence)
            for report in (known.processes if known else ())
        )
        self._mailbox.acknowledge(message, captured=captured, incident=known and known.id)

    def _answer(self, message: Message) -> None:
        """Acknowledge a message, with the current incident if it is finished."""
        run = self.run
        if run is None or not run.finished:
            self._mailbox.acknowledge(message, ack="finished", path=None)
            return
        # The incident of a server that goes on determines no exit status.
        made = run.conclusion
        status = made.status if made is not None and not self._is_observed else None
        path = None if run.folder.problem else str(run.folder.path)
        ends = policy.decide(self.triage.shutdown.mode, Event.DIED).ends and not self._settings.keeps_exit_status
        lines = (made.ending_lines if ends and status is not None else made.lines) if made is not None else []
        self._mailbox.acknowledge(
            message, ack="finished", path=path, problem=run.folder.problem or None, exit_status=status, lines=lines
        )

    def _write(self, run: IncidentRun) -> None:
        if run.finished:
            return
        run.give_up("the incident was finished before")
        run.take(Moment.WRITE)
        try:
            run.finish()
        except (OSError, CrashkitError) as error:
            logger.error("incident %s could not be finished: %s", run.folder.path, error)
            run.finished = True
            self.received.release(is_written=False)
        else:
            self.received.release(is_written=True)
            if not run.folder.problem:
                self.commands.begin(run.folder.path)

    def _discard(self) -> None:
        logger.info("it was no incident")
        if self.run is not None:
            self.run.discard()
        self._forget()
        self._answers.give(self._answer)

    def _forget(self) -> None:
        if self.run is not None:
            self.run.give_up("it is over")
        self.run, self._failed_finishes = None, 0
        self._tree.forget_dead()
