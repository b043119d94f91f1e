"""The incident at hand: what `triage` decides is carried out on it, and whoever waits for it is answered."""

from __future__ import annotations

import contextlib
import functools
import logging
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

from sglang_crashkit.errors import CrashkitError
from sglang_crashkit.handler.after import AfterIncident
from sglang_crashkit.handler.collectors.environment import Surroundings
from sglang_crashkit.handler.collectors.gpu import GpuEvidence
from sglang_crashkit.handler.collectors.logs import ProcessLogs
from sglang_crashkit.handler.collectors.requests import RequestJournals
from sglang_crashkit.handler.collectors.steps import StepRecords
from sglang_crashkit.handler.folders import Place
from sglang_crashkit.handler.incident import IncidentRun
from sglang_crashkit.handler.processes import ProcessTree, TrackedProcess, learn_ranks
from sglang_crashkit.handler.state import Action, Do, Seen
from sglang_crashkit.handler.triage import LAST_EXITS_SECS, Triage
from sglang_crashkit.incident.exit_status import exit_status_of, write_termination_message
from sglang_crashkit.incident.summary import format_termination_message
from sglang_crashkit.kernel import procfs, signals
from sglang_crashkit.kernel.identity_key import is_host_namespace
from sglang_crashkit.kernel.shared_memory import LeftSegment
from sglang_crashkit.memory.heartbeat import Beat
from sglang_crashkit.policy import Event
from sglang_crashkit.protocol import WAIT_FIELD, Mailbox, Message
from sglang_crashkit.settings import Settings

logger = logging.getLogger(__name__)

#: What comes after the last GPU core, up to the answer, takes no longer than this, in seconds.
_LAST_LOOK_SECS = 5.0
#: A scheduler whose server's health check failed is silent when it gave no sign for so long, in seconds: an idle one
#: gives one every second.
SILENT_SECS = 2.0
#: One sample does not tell who stays where he is from who passes by. The second one is taken this much later, in
#: seconds: upstream ends such a server within 5 s.
_SECOND_SAMPLE_SECS = 0.7
#: An incident that could not be finished so many times is left as its last checkpoint has it.
_MAX_FINISHES = 3
_UNSAVED = "the server has no handler for SIGQUIT"


class Watch(Protocol):
    """What looks at the processes before they are captured and judged."""

    def look(self) -> None:
        """Find new processes."""

    def collect_exits(self) -> None:
        """Take in the exits that were not reported yet."""

    def unexplained(self) -> Iterable[TrackedProcess]:
        """Return the children that died lately before they said what they are."""


class Silences(Protocol):
    """What follows the schedulers' heartbeats."""

    def last_signs(self) -> Mapping[int, Beat]:
        """Return what they said last, by pid."""

    def add_silence(self, run: IncidentRun, secs: float) -> None:
        """Take into an incident who gave no sign for so many seconds."""

    def begin_at_end(self) -> None:
        """Look for a hang, as the server is asked to end."""


@dataclass(frozen=True)
class Subject:
    """What actions are about.

    Attributes:
        process: whom it concerns.
        seconds: when it happened, since the epoch.
        message: what was said, where something was.
    """

    process: TrackedProcess
    seconds: float
    message: Message | None = None


class Answers:
    """The messages that are answered when the incident is whole.

    Args:
        mailbox: how they are answered.
        step_secs: who waits is told anew when the end of the wait has moved by so many seconds. More often it is not
            done: of a sender that reads nothing, as it is stopped, the kernel keeps ten answers and loses the last.
    """

    def __init__(self, mailbox: Mailbox, step_secs: float) -> None:
        self._mailbox = mailbox
        self._step_secs = step_secs
        self._waiting: list[Message] = []
        self._told_until = 0.0

    def add(self, message: Message, secs_left: float | None) -> None:
        """Note that the sender of `message` waits.

        Args:
            message: see above.
            secs_left: how long the cores may take from now on, in seconds; None where none is awaited.
        """
        self._waiting.append(message)
        if secs_left is not None:
            self._ask_to_wait(message, secs_left)

    def tell(self, secs_left: float | None) -> None:
        """Ask all of them to wait on, where they were not told of so late an end; see `add`."""
        if secs_left is None or time.monotonic() + secs_left < self._told_until + self._step_secs:
            return
        self._told_until = time.monotonic() + secs_left
        for message in self._waiting:
            self._ask_to_wait(message, secs_left)

    def give(self, answer: Callable[[Message], None]) -> None:
        """Answer all of them."""
        for message in self._waiting:
            answer(message)
        self._waiting.clear()
        self._told_until = 0.0

    def _ask_to_wait(self, message: Message, secs_left: float) -> None:
        self._mailbox.acknowledge(message, ack="wait", **{WAIT_FIELD: secs_left + _LAST_LOOK_SECS})


class Session:
    """The one incident that events of now belong to, if there is any.

    Attributes:
        triage: what decides.
        run: what the incident gathered; None where nothing happened yet.
        hang: the incident of a hang that is not over; other incidents meanwhile say so.
        silences: what follows the schedulers' heartbeats; None where nothing does.
        journals: what the server's processes noted of their requests.
        steps: what its schedulers noted of their last steps.
        logs: what they logged last.
        surroundings: what the server told of its launch.
        gpus: what `run` asks of the GPUs.
        after: what follows once an incident is whole.
    """

    def __init__(
        self, tree: ProcessTree, mailbox: Mailbox, place: Place, settings: Settings, triage: Triage, watch: Watch
    ) -> None:
        self.triage = triage
        self.run: IncidentRun | None = None
        self.hang: IncidentRun | None = None
        self.silences: Silences | None = None
        self.journals = RequestJournals()
        self.steps = StepRecords()
        self.logs = ProcessLogs()
        self.surroundings = Surroundings()
        self.gpus = GpuEvidence(tree, place, settings)
        self.after = AfterIncident()
        self._tree = tree
        self._mailbox = mailbox
        self._place = place
        self._settings = settings
        self._watch = watch
        self._answers = Answers(mailbox, max(1.0, settings.core_wait_secs))
        self._farewells: list[Message] = []
        self._sampled_again: IncidentRun | None = None
        self._second_sample = float("inf")
        self._finishes_after_it = False
        self._failed_finishes = 0

    # -- what is decided

    def take(self, seen: Seen, subject: Subject | None = None) -> None:
        """Have `triage` judge what happened, and carry out what it decides.

        Args:
            seen: what happened.
            subject: whom it concerns; by default the main process, now.
        """
        subject = subject or Subject(self._tree.root, time.time())
        for action in self.triage.take(seen, time.monotonic()):
            try:
                self._carry_out(action, subject)
            except Exception as error:  # noqa: BLE001 - told in the log and the incident
                # One that fails must not cost what the others are for.
                self.note_error(action.do.name.lower(), error)

    def _carry_out(self, action: Action, subject: Subject) -> None:
        process, run, message = subject.process, self.run, subject.message
        match action.do:
            case Do.OPEN:
                self._open(action.kind, action.words, subject)
            case Do.MARK_EXITED:
                process.exited_at = time.time()
            case Do.KEEP_PROCESS:
                # How it ended is known by now as well as it will be.
                process.handle.close()
                self._tree.forget_unknown()
            case Do.FORGET_PROCESS:
                self._tree.forget(process)
            case Do.CAPTURE:
                self.capture()
            case Do.FINISH:
                self.finish(after_second_sample=message is not None and message.event == "crash_dump_ended")
            case Do.FORGET:
                self._forget()
            case Do.DISCARD:
                self._discard()
            case Do.LEARN_RANKS if message is not None:
                for rank, is_exit in learn_ranks(
                    self._tree, message.fields, subject.seconds, self.triage.shutdown.expected
                ):
                    if run is not None and is_exit:
                        run.add_exit(rank)
                    elif run is not None and not run.finished:
                        run.count_exit(rank)
            case Do.LOOK_FOR_SILENCE if self.silences is not None:
                self.silences.begin_at_end()
            case Do.CLOSE_JOURNALS:
                self.journals.close()
                self.steps.close()
            case _:
                if message is not None:
                    self._answer_by(action, message)
                if run is not None:
                    self._add_to(run, action, subject)

    def _add_to(self, run: IncidentRun, action: Action, subject: Subject) -> None:
        process, seconds = subject.process, subject.seconds
        fields = subject.message.fields if subject.message is not None else {}
        match action.do:
            case Do.PERMIT:
                run.permit(action.captures)
            case Do.ADD_EXIT:
                run.add_exit(process)
            case Do.ADD_EXCEPTION:
                record = self._place.record_of(subject.message) if subject.message is not None else None
                run.add_exception(process, seconds, str(fields.get("message", "")), record)
            case Do.ADD_HANG:
                run.add_hang(process, seconds, fields)
            case Do.ADD_REQUESTS:
                run.add_requests(fields)
            case Do.SET_REQUESTS:
                run.set_requests({"reason": action.words})
            case Do.ADD_SILENCE if self.silences is not None:
                self.silences.add_silence(run, SILENT_SECS)
            case Do.NAME_UNKNOWN:
                run.name_unknown()
            case Do.NOTE:
                self._note(run, action.words, subject)
            case Do.CAPTURE_AGAIN:
                self._sampled_again, self._second_sample = run, time.monotonic() + _SECOND_SAMPLE_SECS
            case Do.TELL:
                self._tell_server(run)
            case Do.WRITE:
                self._write(run)

    def _note(self, run: IncidentRun, event: str, subject: Subject) -> None:
        message = subject.message
        if message is None:
            run.note(time.time(), event, seconds=self._settings.budget_secs)
        elif event == "teardown":
            fields = {"tree_of": message.fields.get("pid"), "by_server": message.pid == self._tree.root.pid}
            run.note(subject.seconds, event, pid=message.pid, **fields)
        else:
            words = message.fields.get("message") if event not in ("draining", "crash_dump_begun") else None
            said = {"message": words.encode(errors="backslashreplace").decode()} if isinstance(words, str) else {}
            run.note(subject.seconds, event, pid=message.pid, **said)

    def _answer_by(self, action: Action, message: Message) -> None:
        run = self.run
        match action.do:
            case Do.ANSWER:
                self._answer(message)
            case Do.ANSWER_WHEN_FINISHED:
                self._answers.add(message, self.gpus.cores_secs_left)
            case Do.ANSWER_CAPTURED:
                self._mailbox.acknowledge(message, ack="stacks_captured", incident=run and run.incident.id)
            case Do.ANSWER_STACKS:
                # Those of an incident that is over are not what the sender wants to know.
                known = run if run is not None and not run.finished else None
                stacks = known.stacks if known is not None else 0
                self._mailbox.acknowledge(message, captured=stacks, incident=known and known.incident.id)
            case Do.ANSWER_SAVED:
                self._mailbox.acknowledge(message, ack="saved")
            case Do.ANSWER_ORDERLY:
                logger.info("process %d saved its requests because others were asked to end, too", message.pid)
                self._mailbox.acknowledge(message, ack="finished", path=None, orderly=True)

    # -- the incident

    def open_observed(
        self,
        kind: str,
        trigger: str,
        process: TrackedProcess,
        secs: float,
        event: Event = Event.HUNG,
        *,
        pardonable: bool = False,
    ) -> IncidentRun | None:
        """Begin an incident of a server that goes on, to be captured; whoever begins it finishes it.

        Args:
            kind: see `IncidentRun`.
            trigger: by what it was noticed.
            process: whom it concerns.
            secs: when it is whole, in seconds.
            event: what it is for `policy`.
            pardonable: see `triage.Stage`.

        Returns:
            None where another one is at hand.
        """
        self._watch.collect_exits()
        before = self.triage.stage
        seen = Seen(
            "observed",
            process.pid,
            process.role,
            kind=kind,
            trigger=trigger,
            event=event,
            secs=secs,
            pardonable=pardonable,
        )
        self.take(seen, Subject(process, time.time()))
        return self.run if self.triage.stage is not before else None

    def capture(self) -> None:
        """Capture, once an incident, what the living processes are doing, of those that are there now."""
        self._watch.look()
        # An exit that was not reported yet would be captured in vain; with it this may be no incident, or another one.
        self._watch.collect_exits()
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
        """Write the incident and answer those that wait for it.

        Args:
            after_second_sample: wait for the second sample of a server that hangs, where one is to come.
        """
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

    def _gather_the_rest(self, run: IncidentRun) -> bool:
        """Take what is taken last, and write the incident; say whether it is written, or no more is to come."""
        # Before what stops a process for a moment, and before its GPU is busy with a core.
        if not self.gpus.have_answered(run):
            return False
        if not self.gpus.are_cores_asked:
            # Least perishable of all that is taken from the living: whoever waits for the end waits for it. It stops
            # them, so not while they write their cores.
            run.capture_native()
        self._watch.collect_exits()
        if not run.is_open:
            # One of the exits was an incident of its own.
            return False
        is_ending = not self._is_observed
        of_living = is_ending and self.triage.shutdown.gone_at is None
        if not self.gpus.are_cores_done(run, of_living=of_living, of_dead=is_ending):
            self._answers.tell(self.gpus.cores_secs_left)
            return False
        self._write(run)
        self.take(Seen("finished"))
        if is_ending:
            path = "not written" if run.problem else str(run.path)
            write_termination_message(format_termination_message(run.incident.to_json(), path))
        return True

    def note_error(self, what: str, error: Exception, how: str = "failed") -> None:
        """Log an error of the handler's own, and note it in the incident at hand."""
        logger.error("%s %s", what, how, exc_info=error)
        if self.run is not None:
            words = f"{type(error).__name__}: {error}"
            self.run.note(time.time(), "handler_error", what=what, message=words[:200])

    def finish_observed(self) -> None:
        """Write the incident of a server that goes on."""
        if self.run is not None:
            self.run.set_requests({"reason": "the server went on"})
            self.finish()

    def is_pardonable(self, run: IncidentRun) -> bool:
        """Say whether an incident is none where the server goes on."""
        return self.run is run and self.triage.stage is not None and self.triage.stage.pardonable

    def withdraw(self, run: IncidentRun) -> None:
        """Remove an incident, the one at hand or an earlier one: it was none."""
        if self.run is run:
            self.triage.stage = None
            self._discard()
        else:
            _remove(run)

    def close(self, removed: Sequence[str] = (), left: Sequence[LeftSegment] = ()) -> None:
        """Add the server's own end, and what it left in shared memory, to an incident that is finished."""
        run, root = self.run, self._tree.root
        if run is not None and run.finished:
            status = root.exit_status()
            run.note(root.exited_at or time.time(), "server_exited", code=status.code, signal=status.signal)
            if removed:
                run.note(time.time(), "shared_memory_removed", names=list(removed))
            if left:
                run.note(time.time(), "shared_memory_left", segments=[asdict(segment) for segment in left])
            with contextlib.suppress(OSError):
                run.save()
        self.journals.close()
        self.steps.close()
        self.logs.close()
        self.surroundings.close()
        self.gpus.close()
        self.after.close()

    def hear_farewell(self, message: Message) -> None:
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
        self._farewells.append(message)
        if self.triage.is_open:
            secs = (self.gpus.cores_secs_left or 0.0) + _LAST_LOOK_SECS
            self._mailbox.acknowledge(message, ack="wait", **{WAIT_FIELD: secs})

    # -- time

    def next_due(self) -> float:
        """Return when `act_on_time` has something to do, by the monotonic clock."""
        if self.gpus.are_awaited and self.triage.is_open:
            return min(self.gpus.next_due(), self._second_sample)
        due = self.triage.next_due(workers_left=self._are_workers_left)
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
        while self._farewells and not self.triage.is_open:
            self._say_farewell(self._farewells.pop())

    def _await_gpus(self) -> None:
        # Until then nobody is told to end: a process that is killed leaves half a core.
        gone_at = self.triage.shutdown.gone_at
        if gone_at is not None and time.monotonic() >= gone_at + LAST_EXITS_SECS:
            self.gpus.give_up_cores("the server ended")
        self.gpus.look()
        self._answers.tell(self.gpus.cores_secs_left)
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

    def _say_farewell(self, message: Message) -> None:
        with self._mailbox.line_to(message) as answer:
            # From here on no other process of the server reaches this one; they are about to be killed.
            self._place.remove_own()
            answer(ack="clean")
            logger.info("the server ends in good order")

    # -- carried out

    @property
    def _is_observed(self) -> bool:
        stage = self.triage.stage
        return stage is not None and (stage.observed or stage.observes)

    @property
    def _are_workers_left(self) -> bool:
        return any(process.matters for process in self._tree.alive())

    def _open(self, kind: str, trigger: str, subject: Subject) -> None:
        """Begin an incident. It is gathered, too, where it cannot be written anywhere."""
        folder = self._place.make_folder(kind, subject.seconds, self._settings.disk)
        process, runtime = subject.process, self._place.runtime
        self.run = run = IncidentRun(
            kind, trigger, process, subject.seconds, self._tree, folder, runtime, self._settings
        )
        for dead in self._watch.unexplained():
            # Whoever begins an incident with an exit adds that one.
            if dead is not process:
                run.add_exit(dead)
        if self.hang is not None:
            run.note(time.time(), "hang_not_over", incident=self.hang.incident.id)
            run.add_afterword(f"The server made no progress before: incident {self.hang.incident.id}.")

    def _tell_server(self, run: IncidentRun) -> None:
        """Tell the server of a death that it may not have noticed, as its own children would."""
        root = self._tree.root
        if root.exited_at is not None:
            return
        if not procfs.catches_signal(root.pid, signal.SIGQUIT):
            run.set_requests({"reason": _UNSAVED})
            self.finish()
            return
        seconds = time.time()
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
        status = None if self._is_observed else exit_status_of(run.incident)
        path = None if run.problem else str(run.path)
        self._mailbox.acknowledge(message, ack="finished", path=path, problem=run.problem or None, exit_status=status)

    def _write(self, run: IncidentRun) -> None:
        if run.finished:
            return
        self.gpus.give_up_answers("the incident was finished before")
        run.add_last_signs(self.silences.last_signs() if self.silences is not None else {})
        self._gather(run)
        try:
            run.finish()
        except (OSError, CrashkitError) as error:
            logger.error("incident %s could not be finished: %s", run.path, error)
            run.finished = True
            self.journals.keep()
            self.logs.keep()
        else:
            self.journals.remove_taken()
            self.logs.remove_taken()
            if not run.problem:
                self.after.begin(run.path)

    def _gather(self, run: IncidentRun) -> None:
        for part in (
            functools.partial(self.steps.add_to, run, self._tree),
            functools.partial(self.journals.add_to if not run.problem else bool, run),
            functools.partial(self.logs.add_to, run, self._tree, self._settings.log_records),
            functools.partial(self.surroundings.add_to, run, self._tree),
        ):
            try:
                part()
            except Exception as error:  # noqa: BLE001 - as above
                # One of them must not cost the others, nor the incident.
                self.note_error("what was kept in memory", error)

    def _discard(self) -> None:
        logger.info("it was no incident")
        if self.run is not None:
            _remove(self.run)
        self._forget()
        self._answers.give(self._answer)

    def _forget(self) -> None:
        self.run, self._failed_finishes = None, 0
        self.gpus.forget()
        self._tree.forget_dead()


def _remove(run: IncidentRun) -> None:
    try:
        run.discard()
    except OSError as error:
        logger.error("incident %s could not be removed: %s", run.path, error)
