"""The incident at hand: what `triage` decides is carried out on it, and whoever waits for it is answered."""

from __future__ import annotations

import contextlib
import functools
import logging
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from sglang_crashkit import policy
from sglang_crashkit.errors import CrashkitError
from sglang_crashkit.handler.collectors.gpu import GpuEvidence
from sglang_crashkit.handler.collectors.received import Received, secs_before
from sglang_crashkit.handler.folders import Place
from sglang_crashkit.handler.incident import IncidentRun
from sglang_crashkit.handler.processes import ProcessTree, TrackedProcess, ended_before, learn_exit_status, learn_ranks
from sglang_crashkit.handler.reporting import Answers, Commands, HtmlPage, ServerLog
from sglang_crashkit.handler.shortages import Shortages
from sglang_crashkit.handler.state import Action, ActionKind, Seen
from sglang_crashkit.handler.triage import LAST_EXITS_SECS, Triage
from sglang_crashkit.incident.exit_status import FATAL_SIGNALS, write_termination_message
from sglang_crashkit.kernel import clock, procfs, signals
from sglang_crashkit.kernel.procfs import is_host_namespace
from sglang_crashkit.kernel.shared_memory import OrphanedSegment
from sglang_crashkit.model.incident import Trigger, iso_time
from sglang_crashkit.policy import Event
from sglang_crashkit.protocol import Mailbox, Message
from sglang_crashkit.settings import Settings

logger = logging.getLogger(__name__)

#: A scheduler whose server's health check failed is silent when it gave no sign for so long, in seconds: an idle one
#: gives one every second.
SILENT_SECS = 2.0
#: One sample does not tell who stays where he is from who passes by. The second one is taken this much later, in
#: seconds: upstream ends such a server within 5 s.
_SECOND_SAMPLE_SECS = 0.7
#: Whether a rank that raised has told what it alone can tell is looked at this often, in seconds.
_RAISED_SECS = 0.03
#: An incident that could not be finished so many times is left as its last checkpoint has it.
_MAX_FINISHES = 3


@dataclass(frozen=True)
class Subject:
    """What actions are about: whom, when (since the epoch), and what was said, where something was."""

    process: TrackedProcess
    seconds: float
    message: Message | None = None


class Session:
    """The one incident that events of now belong to, if there is any.

    Attributes:
        log: the server's own.
        run: what the incident gathered; None where nothing happened yet.
        hang: the incident of a hang that is not over; other incidents meanwhile say so.
        begin_hang_at_end: looks for a hang, as the server is asked to end.
        gpus: what `run` asks of the GPUs.
        page: what makes a page of an incident that is whole.
        commands: runs the user's command for an incident that is whole.
        shortages: says what this process is short of.
    """

    def __init__(
        self,
        tree: ProcessTree,
        mailbox: Mailbox,
        place: Place,
        settings: Settings,
    ) -> None:
        self.triage = Triage(tree.root.pid, secs_before(settings.budget_secs))
        self.run: IncidentRun | None = None
        self.hang: IncidentRun | None = None
        self.begin_hang_at_end: Callable[[], None] = lambda: None
        self.log = ServerLog(tree.root, place.runtime)
        self.received = Received(tree, settings)
        self.gpus = GpuEvidence(tree, place, settings)
        self.page = HtmlPage(settings.html)
        self.commands = Commands()
        self.shortages = Shortages(self.log)
        self._lacking: set[str] = set()
        self._tree = tree
        self._mailbox = mailbox
        self._place = place
        self._settings = settings
        self._answers = Answers(mailbox, max(1.0, settings.core_wait_secs))
        self._exiting: list[Message] = []
        self._raised: list[Message] = []
        self._sampled_again: IncidentRun | None = None
        self._second_sample = float("inf")
        self._finishes_after_it = False
        self._failed_finishes = 0

    # -- what happens, and what is decided

    def take(self, seen: Seen, subject: Subject | None = None) -> None:
        """Have `triage` judge what happened, by default to the main process and now; carry out what it decides."""
        subject = subject or Subject(self._tree.root, clock.now())
        for action in self.triage.take(seen, time.monotonic()):
            try:
                self._carry_out(action, subject)
            except Exception as error:  # noqa: BLE001 - told in the log and the incident
                # One that fails must not cost what the others are for.
                self.note_error(action.do.name.lower(), error)

    def collect_exits(self) -> None:
        """Take in the exits that the kernel has not reported yet."""
        for process in self._tree.alive():
            if process.handle.has_exited():
                self.take_exit(process)

    def take_exit(self, process: TrackedProcess, *, again: bool = False) -> None:
        """Take in an exit, once, after those that it follows from; what goes wrong with it ends no other exit.

        `again` is for an exit that was handled as a helper's before the launch registered the process.
        """
        try:
            for earlier in ended_before(self._tree, process) if process.exited_at is None else ():
                self.take_exit(earlier)
            # The incident that one of those opened may have taken it in.
            if again or process.exited_at is None:
                self._take_exit(process)
        except Exception as error:  # noqa: BLE001 - as above
            self.note_error(f"the exit of process {process.pid}", error, "could not be taken in")
        finally:
            process.exited_at = process.exited_at or clock.now()

    def _take_exit(self, process: TrackedProcess) -> None:
        expected = self.triage.shutdown.expected
        if process.matters and process.pid not in expected:
            learn_exit_status(process, self._place.runtime)
        status = process.exit_status()
        if process.is_own and status.signal in FATAL_SIGNALS - {"SIGKILL"}:
            self.log.report_fault()
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

    def _carry_out(self, action: Action, subject: Subject) -> None:
        process, run, message = subject.process, self.run, subject.message
        match action.do:
            case ActionKind.OPEN:
                self._open(action.kind, action.words, subject)
            case ActionKind.MARK_EXITED:
                process.exited_at = process.exited_at or clock.now()
            case ActionKind.KEEP_PROCESS:
                # How it ended is known by now as well as it will be.
                process.handle.close()
                self._tree.forget_unknown()
            case ActionKind.FORGET_PROCESS:
                self._tree.forget(process)
            case ActionKind.CAPTURE:
                self.capture()
            case ActionKind.FINISH:
                self.finish(after_second_sample=message is not None and message.event == "crash_dump_ended")
            case ActionKind.FORGET:
                self._forget()
            case ActionKind.DISCARD:
                self._discard()
            case ActionKind.LEARN_RANKS if message is not None:
                expected = self.triage.shutdown.expected
                for rank, is_exit in learn_ranks(self._tree, message.fields, subject.seconds, expected):
                    if run is not None and is_exit:
                        run.add_exit(rank)
                    elif run is not None and not run.finished:
                        run.count_exit(rank)
            case ActionKind.DROP_RECORD if message is not None:
                if (record := self._place.record_of(message.fields.get("record"))) is not None:
                    record.unlink(missing_ok=True)
            case ActionKind.LOOK_FOR_SILENCE:
                self.begin_hang_at_end()
            case ActionKind.CLOSE_JOURNALS:
                self.received.forget_requests()
            case _:
                if message is not None:
                    self._answer_by(action, message)
                if run is not None:
                    self._add_to(run, action, subject)

    def _add_to(self, run: IncidentRun, action: Action, subject: Subject) -> None:
        process, seconds = subject.process, subject.seconds
        fields = subject.message.fields if subject.message is not None else {}
        match action.do:
            case ActionKind.PERMIT:
                run.permit(action.captures)
            case ActionKind.ADD_EXIT:
                run.add_exit(process)
            case ActionKind.ADD_EXCEPTION:
                record = self._place.record_of(fields.get("record"))
                run.add_exception(process, seconds, fields.get("message", ""), record)
            case ActionKind.ADD_HANG:
                run.add_hang(process, seconds, fields)
            case ActionKind.ADD_REQUESTS:
                run.add_requests(fields)
            case ActionKind.SET_REQUESTS:
                run.set_requests({"reason": action.words})
            case ActionKind.ADD_SILENCE:
                for heartbeat in self.received.heartbeats.silent(SILENT_SECS):
                    run.add_silence(heartbeat.process, heartbeat.sign, heartbeat.silent_secs)
            case ActionKind.NAME_UNKNOWN:
                run.name_unknown()
            case ActionKind.NOTE:
                self._note(run, action.words, subject)
            case ActionKind.CAPTURE_AGAIN:
                self._sampled_again, self._second_sample = run, time.monotonic() + _SECOND_SAMPLE_SECS
            case ActionKind.TELL:
                self._tell_server(run)
            case ActionKind.WRITE:
                self._write(run)

    def _note(self, run: IncidentRun, event: str, subject: Subject) -> None:
        message = subject.message
        if message is None:
            run.note(clock.now(), event, seconds=self._settings.budget_secs)
            return
        said = {}
        if event == "teardown":
            said = {"tree_of": message.fields.get("pid"), "by_server": message.pid == self._tree.root.pid}
        elif "message" in message.fields:
            said = {"message": message.fields["message"].encode(errors="backslashreplace").decode()}
        run.note(subject.seconds, event, pid=message.pid, **said)

    def _answer_by(self, action: Action, message: Message) -> None:
        run, answer = self.run, functools.partial(self._mailbox.acknowledge, message)
        match action.do:
            case ActionKind.ANSWER:
                self._answer(message)
            case ActionKind.ANSWER_WHEN_FINISHED:
                self._answers.add(message, self.gpus.cores_secs_left)
            case ActionKind.ANSWER_CAPTURED:
                self._raised.append(message)
                self._release_raised()
            case ActionKind.ANSWER_STACKS:
                # Those of an incident that is over are not what the sender wants to know.
                known = run if run is not None and not run.finished else None
                answer(captured=known.stacks if known else 0, incident=known and known.incident.id)
            case ActionKind.ANSWER_SAVED:
                answer(ack="saved")
            case ActionKind.ANSWER_ORDERLY:
                logger.info("process %d saved its requests because other processes got SIGTERM, too", message.pid)
                answer(ack="finished", path=None, orderly=True)

    # -- the incident

    def open_observed(self, seen: Seen, process: TrackedProcess) -> IncidentRun | None:
        """Begin an incident, None where another one is at hand; whoever begins it captures and finishes it."""
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
        try:
            run.capture()
            if self.triage.stage is not None and not self.triage.stage.may_be_shutdown:
                self.gpus.ask(run)
        except Exception as error:  # noqa: BLE001 - as above
            run.captured = True
            self.note_error("capture", error)
        # Whatever came of it: what is done to the server follows from the failure, and not from the stacks.
        self.take(Seen("captured"))

    def finish(self, *, after_second_sample: bool = False) -> None:
        """Write the incident and answer those that wait for it; where a second sample is to come, after that."""
        if after_second_sample and self._sampled_again is not None:
            self._finishes_after_it = True
            return
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
                    # The next tick tries again.
                    return
                # It stays as its last checkpoint has it, for recovery.
                run.finished = True
                self.take(Seen("finished"))
        self._answers.give(self._answer)
        if run is not None:
            self.page.begin(run)

    def _gather_the_rest(self, run: IncidentRun) -> bool:
        """Take what is taken last, and write the incident; say whether it is written, or no more is to come."""
        # Before what stops a process for a moment, and before its GPU is busy with a core.
        if not self.gpus.have_answered(run):
            return False
        if not self.gpus.are_cores_asked:
            # Least perishable of all that is taken from the living: whoever waits for the end waits for it. It stops
            # them, so not while they write their cores.
            run.capture_native()
        self.collect_exits()
        if not run.is_open:
            # One of the exits was an incident of its own.
            return False
        is_ending = not self._is_observed
        of_living = is_ending and self.triage.shutdown.gone_at is None
        if not self.gpus.are_cores_done(run, of_living=of_living, of_dead=is_ending):
            self._answers.ask_all_to_wait(self.gpus.cores_secs_left)
            return False
        self._write(run)
        self.take(Seen("finished"))
        if is_ending:
            write_termination_message(run.conclusion.message if run.conclusion is not None else "")
        return True

    def note_error(self, what: str, error: Exception, how: str = "failed") -> None:
        """Log an error of the handler's own, and note it in the incident at hand."""
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
            self.run.note(clock.now(), "handler_error", what=what, message=words[:200])

    def finish_observed(self) -> None:
        """Write the incident of a server that goes on."""
        if self.run is not None:
            self.run.set_requests({"reason": "the server went on"})
            self.finish()

    def is_withdrawable(self, run: IncidentRun) -> bool:
        """Say whether an incident is none where the server goes on."""
        return self.run is run and self.triage.stage is not None and self.triage.stage.withdrawable

    def withdraw(self, run: IncidentRun) -> None:
        """Remove an incident, the one at hand or an earlier one: it was none."""
        self.page.cancel()
        if self.run is run:
            self.triage.stage = None
            self._discard()
        else:
            run.discard()

    def close(self, removed: Sequence[str] = (), left: Sequence[OrphanedSegment] = ()) -> None:
        """Add the server's own end, and what it left in shared memory, to an incident that is finished."""
        run, root = self.run, self._tree.root
        if run is not None and run.finished:
            status = root.exit_status()
            run.note(root.exited_at or clock.now(), "server_exited", code=status.code, signal=status.signal)
            if removed:
                run.note(clock.now(), "shared_memory_removed", names=list(removed))
            if left:
                run.note(clock.now(), "shared_memory_left", segments=[asdict(segment) for segment in left])
            run.checkpoint()
            run.refresh()
            self.page.begin(run, again=True)
        self.received.close()
        self.gpus.close()
        self.commands.act_on_time()

    def on_exiting(self, message: Message) -> None:
        """Take in that the main process is about to end in good order, and with it maybe this process.

        Where the main process is process 1 of a container, or what it runs below ends with it, such as ``tini`` or a
        shell, the kernel kills everything that is in the container at that moment. So what is left goes before.
        """
        if self.triage.is_open and is_host_namespace():
            # This process outlives it, and takes the time that the incident needs.
            self._mailbox.acknowledge(message, ack="at work")
            return
        if self.triage.is_open:
            self.finish()
        self._exiting.append(message)
        if self.triage.is_open:
            self._answers.ask_to_wait(message, self.gpus.cores_secs_left or 0.0)

    # -- time

    def next_due(self) -> float:
        """Return when `act_on_time` has something to do, by the monotonic clock."""
        if self.gpus.are_awaited and self.triage.is_open:
            return min(self.gpus.next_due(), self._second_sample)
        due = self.triage.next_due(workers_left=self._are_workers_left)
        if self._raised:
            due = min(due, time.monotonic() + _RAISED_SECS)
        return min(due, self._second_sample, self.gpus.next_due() if self.triage.is_open else float("inf"))

    def act_on_time(self) -> None:
        """Do what is due by now."""
        if self.triage.is_open and self.gpus.are_awaited:
            self._await_gpus()
        else:
            if self.triage.is_open:
                self.gpus.look()
            self.take(Seen("tick", workers_left=self._are_workers_left, any_left=bool(self._tree.alive())))
        if time.monotonic() >= self._second_sample:
            self._sample_again()
        self._release_raised()
        if self.run is not None:
            self.run.refresh()
        while self._exiting and not self.triage.is_open:
            with self._mailbox.line_to(self._exiting.pop()) as answer:
                # From here on no other process of the server reaches this one; they are about to be killed.
                self._place.remove_own()
                answer(ack="clean")
                logger.info("the server ends in good order")

    def _release_raised(self) -> None:
        """Answer those that raised and wait for the capture of the others, once they have told of gloo."""
        incident = self.run and self.run.incident.id
        for message in [one for one in self._raised if not self.gpus.awaits_gloo_of(one.pid)]:
            self._raised.remove(message)
            # Without a descriptor for the answer to one, the others are still told.
            with contextlib.suppress(OSError):
                self._mailbox.acknowledge(message, ack="stacks_captured", incident=incident)

    def _await_gpus(self) -> None:
        # Until then nobody is told to end: a process that is killed leaves half a core.
        gone_at = self.triage.shutdown.gone_at
        if gone_at is not None and time.monotonic() >= gone_at + LAST_EXITS_SECS:
            self.gpus.give_up_cores("the server ended")
        self.gpus.look()
        self._answers.ask_all_to_wait(self.gpus.cores_secs_left)
        if not self.gpus.are_awaited:
            self.finish()

    def _sample_again(self) -> None:
        run, self._sampled_again, self._second_sample = self._sampled_again, None, float("inf")
        # While a core is written nobody is to be signalled, as a capture may.
        is_over = self.triage.shutdown.gone_at is not None or self.gpus.are_cores_asked
        if run is not None and run.is_open and not is_over:
            run.capture()
        if self._finishes_after_it:
            self._finishes_after_it = False
            self.finish()

    # -- carried out

    @property
    def _is_observed(self) -> bool:
        return self.triage.stage is not None and self.triage.stage.observed

    @property
    def _are_workers_left(self) -> bool:
        return any(process.matters for process in self._tree.alive())

    def _open(self, kind: str, trigger: str, subject: Subject) -> None:
        """Begin an incident. It is gathered, too, where it cannot be written anywhere."""
        self.shortages.look()
        folder = self._place.make_folder(kind, subject.seconds, self._settings.disk)
        its = Trigger(trigger, iso_time(subject.seconds), subject.process.pid, subject.process.title)
        self.run = run = IncidentRun(kind, its, self._tree, folder, self._place.runtime, self._settings)
        for dead in self._tree.recent_unexplained():
            # The caller adds the exit that opened the incident. Once the server is ready, all ranks have titles.
            if dead is not subject.process and not self.received.environment.is_ready:
                run.add_exit(dead)
        if self.hang is not None:
            run.note(clock.now(), "hang_not_over", incident=self.hang.incident.id)
            run.add_remark(f"The server made no progress before: incident {self.hang.incident.id}.")

    def _tell_server(self, run: IncidentRun) -> None:
        """Tell the server of a death that it may not have noticed, as its own children would."""
        root = self._tree.root
        if root.exited_at is not None:
            return
        if not procfs.catches_signal(root.pid, signal.SIGQUIT):
            run.set_requests({"reason": "the server has no handler for SIGQUIT"})
            self.finish()
            return
        seconds = clock.now()
        if signals.tell(root.handle):
            run.note(seconds, "sigquit_sent", pid=root.pid)
        self.take(Seen("told"))

    def _answer(self, message: Message) -> None:
        """Acknowledge a message with the incident at hand, if there is one that is finished."""
        run = self.run
        if run is None or not run.finished:
            self._mailbox.acknowledge(message, ack="finished", path=None)
            return
        # That of a server which goes on says nothing of its end.
        made = run.conclusion
        status = made.status if made is not None and not self._is_observed else None
        path = None if run.problem else str(run.path)
        ends = policy.decide(self.triage.shutdown.mode, Event.DIED).ends and not self._settings.keeps_exit_status
        lines = (made.ending_lines if ends and status is not None else made.lines) if made is not None else []
        self._mailbox.acknowledge(
            message, ack="finished", path=path, problem=run.problem or None, exit_status=status, lines=lines
        )

    def _write(self, run: IncidentRun) -> None:
        if run.finished:
            return
        self.gpus.give_up_answers("the incident was finished before")
        self.received.add_to(run, self.note_error)
        try:
            run.finish()
        except (OSError, CrashkitError) as error:
            logger.error("incident %s could not be finished: %s", run.path, error)
            run.finished = True
            self.received.release(is_written=False)
        else:
            self.received.release(is_written=True)
            if not run.problem:
                self.commands.begin(run.path)

    def _discard(self) -> None:
        logger.info("it was no incident")
        if self.run is not None:
            self.run.discard()
        self._forget()
        self._answers.give(self._answer)

    def _forget(self) -> None:
        self.run, self._failed_finishes = None, 0
        self.gpus.forget()
        self._tree.forget_dead()
