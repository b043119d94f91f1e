"""The current incident: what `triage` decides is carried out on it, and those who wait for it are answered."""

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

#: A scheduler whose server's health check failed is silent when it gave no sign for so long, in seconds: an idle one
#: gives one every second.
SILENT_SECS = 2.0
#: An incident that could not be finished so many times is left as its last checkpoint has it.
_MAX_FINISHES = 3
#: So many threads that ended are remembered.
_MAX_THREADS = 8
#: An incident of lost peers is whole after this time, in seconds: every rank of a server reports the same one.
_LOSS_SECS = 2.0
#: A loss that comes so soon after the last one, in seconds, belongs to its incident, as where servers are restarted one
#: after the other.
_SAME_LOSS_SECS = 600.0


@dataclass(frozen=True)
class Subject:
    """The process that actions are about, the time in seconds since the epoch, and the message, where one came."""

    process: TrackedProcess
    seconds: float
    message: Message | None = None

    @property
    def fields(self) -> dict[str, Any]:
        """What was said; empty where nothing was."""
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
        self.run: IncidentRun | None = None  # what the incident gathered; None where nothing happened yet
        #: The incident of a hang that is not over; an incident that is opened meanwhile refers to it.
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
        #: Whose, when, their names, exceptions and frames: what fails later may have waited for them.
        self._dead_threads: deque[tuple[TrackedProcess, float, str, str, Sequence[str]]] = deque(maxlen=_MAX_THREADS)
        self._exiting: list[Message] = []
        self._raised: list[Message] = []
        self._failed_finishes = 0
        self._collectors = collectors
        #: The incident of lost peers, and when the last loss came, by the monotonic clock.
        self._losses: IncidentRun | None = None
        self._lost_at = 0.0

    # -- what happens, and what is decided

    def take(self, seen: Seen, subject: Subject | None = None) -> None:
        """Have `triage` judge what happened, by default to the main process and now; carry out what it decides."""
        subject = subject or Subject(self._tree.root, clock.now())
        for action in self.triage.take(seen, time.monotonic()):
            try:
                self._carry_out(action, subject)
            except Exception as error:  # noqa: BLE001 - told in the log and the incident
                # One that fails must not cost what the others are for.
                self.note_error(action.do, error)

    def collect_exits(self) -> None:
        """Take in the exits that the kernel has not reported yet."""
        for process in self._tree.alive():
            if process.handle.has_exited():
                self.take_exit(process)

    def take_exit(self, process: TrackedProcess, *, again: bool = False) -> None:
        """Take in an exit once, after those that it follows from, or `again`, as it was taken for a helper's."""
        expected = self.triage.shutdown.expected
        try:
            for earlier in ended_before(self._tree, process) if process.exited_at is None else ():
                self.take_exit(earlier)
            if process.exited_at is not None and not again:
                # The incident that one of those opened may have taken it in.
                return
            if process.matters and process.pid not in expected:
                learn_exit_status(process, self._place.runtime)
            status = process.handle.exit_status()
            if process.is_own and status.signal in FATAL_SIGNALS - {"SIGKILL"}:
                # The main process copies what a dying worker wrote to its standard error, as upstream has it there.
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
        # What is to be answered, or added to an incident, is nothing without a message, or an incident.
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
        """Begin an incident, None where there is one already; the process that begins it captures and finishes it."""
        self.collect_exits()
        before = self.triage.stage
        self.take(seen, Subject(process, clock.now()))
        return self.run if self.triage.stage is not before else None

    def capture(self) -> None:
        """Capture, once an incident, what the living processes are doing, of those that are there now."""
        self._tree.refresh()
        # An exit that was not reported yet would be captured in vain; with it this may be no incident, or another one.
        self.collect_exits()
        run = self.run
        if run is None or run.captured:
            return
        run.take(Moment.CAPTURE)
        if self.triage.stage is not None and not self.triage.stage.may_be_shutdown:
            run.take(Moment.ASK)
        # Whatever came of it: what is done to the server follows from the failure, and not from the stacks.
        self.triage.done("capture", time.monotonic())

    @property
    def writing_cores(self) -> Set[int]:
        """The processes that write a GPU core now, and are neither signalled nor stopped meanwhile."""
        return self.run.pids_of("cuda_core") if self.run is not None else frozenset()

    def finish(self) -> None:
        """Take what is taken last, write the incident, and answer those that wait for it; once all has come."""
        run = self.run
        if run is None:
            # It could not be opened.
            self.triage.stage = None
        elif not run.finished:
            try:
                if not self._gather_the_rest(run):
                    return
            except Exception as error:  # noqa: BLE001 - as above
                self._failed_finishes += 1
                self.note_error("finish", error)
                if self._failed_finishes < _MAX_FINISHES:
                    # The next turn tries again: an error may give descriptors back.
                    return
                # It stays as its last checkpoint has it, for `unfinished`.
                run.finished = True
                self.triage.done("finish", time.monotonic())
        self._answers.give(self._answer)

    def _gather_the_rest(self, run: IncidentRun) -> bool:
        """Take what is taken last, and write the incident; say whether it is written."""
        if self.triage.stage is not None:
            self.triage.stage.finishing = True
        for moment in (Moment.ASK, Moment.STOP, Moment.CORE):
            self.collect_exits()
            if not run.is_open:
                # One of the exits was an incident of its own.
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
        """Log an error of the handler's own, and note it in the current incident."""
        if self.shortages.note(error):
            # It comes with every look, and where it came from does not matter.
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
        """Write the incident of a server that goes on."""
        if self.run is not None:
            self.run.set_requests({"reason": "the server went on"})
            self.finish()

    def is_withdrawable(self, run: IncidentRun) -> bool:
        """Say whether an incident is to be removed where the server goes on."""
        return self.run is run and self.triage.stage is not None and self.triage.stage.withdrawable

    def withdraw(self, run: IncidentRun) -> None:
        """Remove an incident, the current one or an earlier one, that proved to be a false alarm."""
        if self.run is run:
            self.triage.stage = None
            self._discard()
        else:
            run.discard()

    def close(self, removed: Sequence[str], left: Sequence[OrphanedSegment]) -> None:
        """Add the server's own end, and what it left in shared memory, to an incident that is finished."""
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
        """Take in that the main process is about to end in good order.

        Where a container ends with it, the kernel kills this process at that moment, too. So what is left goes before.
        """
        if self.triage.is_open and is_host_namespace():
            # This process outlives it, and takes the time that the incident needs.
            self._mailbox.acknowledge(message, ack="at work")
            return
        if self.triage.is_open:
            self.finish()
        self._exiting.append(message)
        if self.triage.is_open:
            self._answers.ask_to_wait(message, self._secs_left or 0.0)

    def take_lost_peer(self, fields: dict[str, Any], sender: TrackedProcess) -> None:
        """Make an incident of what a rank reports of the other server of a pair, or add it to the one that is there."""
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
                # Who is there and in which state, without stacks: what happened, happened elsewhere.
                self.capture()
            # The exits that are looked for as one is opened may be an incident of their own, which is current then.
            run = opened or self._run_of_loss(now)
        if run is not None and run.add_peer(time.time(), peer):
            self._lost_at = now
            logger.error("%s", text)
            self.log.say(text)

    def _run_of_loss(self, now: float) -> IncidentRun | None:
        """Return the incident that a loss of now belongs to."""
        if self.run is not None and not self.run.finished:
            return self.run
        return self._losses if now < self._lost_at + _SAME_LOSS_SECS else None

    # -- time

    def act_on_time(self) -> float:
        """Do what is due by now, and return when something is due next, by the monotonic clock."""
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
                # From here on no other process of the server reaches this one; they are about to be killed.
                self._place.remove_own()
                answer(ack="clean")
                logger.info("the server ends in good order")
        due = self.triage.next_due(workers_left=self._are_workers_left)
        return min(due, self.run.next_look()) if self.run is not None and self.triage.is_open else due

    def _release_raised(self) -> None:
        """Answer those that raised and wait for the capture of the others, once they have told of gloo."""
        incident = self.run and self.run.incident.id
        awaited = self.run.pids_of("gloo_flight_recorder") if self.run is not None else ()
        for message in [one for one in self._raised if one.pid not in awaited]:
            self._raised.remove(message)
            # Without a descriptor for the answer to one, the others are still told.
            with contextlib.suppress(OSError):
                self._mailbox.acknowledge(message, ack="stacks_captured", incident=incident)

    # -- carried out

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
        """Begin an incident. It is gathered, too, where it cannot be written anywhere."""
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
        # While a core is written no process is to be signalled, as a sample may.
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
        """Tell the server of a death that it may not have noticed, as its own children would."""
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
        # Those of an incident that is over are not what the sender wants to know.
        known = self.run.incident if self.run is not None and not self.run.finished else None
        captured = sum(
            any(piece.kind == "stack" and piece.status == "captured" for piece in report.evidence)
            for report in (known.processes if known else ())
        )
        self._mailbox.acknowledge(message, captured=captured, incident=known and known.id)

    def _answer(self, message: Message) -> None:
        """Acknowledge a message with the current incident, if there is one that is finished."""
        run = self.run
        if run is None or not run.finished:
            self._mailbox.acknowledge(message, ack="finished", path=None)
            return
        # That of a server which goes on says nothing of its end.
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
