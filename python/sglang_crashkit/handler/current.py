"""The incident at hand: opened once, joined by later events, finished when its time has come."""

from __future__ import annotations

import contextlib
import logging
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Protocol

from sglang_crashkit.errors import CrashkitError
from sglang_crashkit.handler.answers import Answers
from sglang_crashkit.handler.awaited import ANSWER_SECS, Awaited
from sglang_crashkit.handler.gpu_evidence import GpuEvidence
from sglang_crashkit.handler.incident_run import IncidentRun
from sglang_crashkit.handler.last_resort import LastResort
from sglang_crashkit.handler.outlook import Outlook
from sglang_crashkit.handler.place import Place
from sglang_crashkit.handler.request_journals import RequestJournals
from sglang_crashkit.handler.tree import ProcessTree, TrackedProcess
from sglang_crashkit.incident.exit_status import exit_status_of, write_termination_message
from sglang_crashkit.incident.summary import format_termination_message
from sglang_crashkit.kernel import procfs, signals
from sglang_crashkit.kernel.shared_memory import LeftSegment
from sglang_crashkit.memory.heartbeat import Beat
from sglang_crashkit.policy import Action, Event
from sglang_crashkit.protocol import Mailbox, Message
from sglang_crashkit.settings import Settings

logger = logging.getLogger(__name__)

#: For what of this upstream may end a server that the kit would let live.
_ENDS_A_SERVER = frozenset({Event.DIED, Event.RAISED, Event.FAILED, Event.TIMED_OUT})
#: A server that lives on this long after an incident, in seconds, may have another one.
_NEXT_INCIDENT_SECS = 60.0
#: What a server that goes on reported, such as a soft watchdog, is whole after this time, in seconds.
_OBSERVED_SECS = 5.0
#: What dies with the server is waited for this long, in seconds; its own workers, which write their stacks then and on
#: a busy machine take seconds to give their memory back, until those that live on were killed.
_LAST_EXITS_SECS, _LAST_WORKERS_SECS = 0.5, 4.0


class Eyes(Protocol):
    """What looks at the processes before they are photographed and judged."""

    def look(self) -> None:
        """Find new processes."""

    def collect_exits(self) -> None:
        """Take in the exits that were not told of yet."""

    def unexplained(self) -> Iterable[TrackedProcess]:
        """Return the children that died lately before they said what they are."""


class CurrentIncident:
    """The one incident that events of now belong to, if there is any.

    Attributes:
        run: what it gathered; None where nothing happened yet. It stays when it is finished, until another may come.
        hang: the incident of a hang that is not over; other incidents meanwhile say so.
        journals: what the server's processes noted of their requests.
        awaited: what `run` waits for.
        gpus: what `run` asks of the GPUs.
        last_signs: returns what the schedulers' heartbeats said last, by pid.
    """

    def __init__(
        self, tree: ProcessTree, mailbox: Mailbox, place: Place, settings: Settings, outlook: Outlook, eyes: Eyes
    ) -> None:
        self.run: IncidentRun | None = None
        self.hang: IncidentRun | None = None
        self.last_signs: Callable[[], Mapping[int, Beat]] = dict
        self._tree = tree
        self._mailbox = mailbox
        self._place = place
        self._settings = settings
        self._outlook = outlook
        self._eyes = eyes
        self.journals = RequestJournals()
        self._answers = Answers(mailbox, max(1.0, settings.core_wait_secs))
        self.awaited = Awaited(tree.root.pid)
        self.gpus = GpuEvidence(tree, place, settings)
        self._last_resort = LastResort(tree.root, 2 * settings.end_secs)

    # -- what comes in

    def open(self, kind: str, trigger: str, process: TrackedProcess, seconds: float) -> IncidentRun:
        """Begin an incident; see `IncidentRun`. It is gathered, too, where it cannot be written anywhere."""
        folder = self._place.make_folder(kind, seconds, self._settings.disk)
        self.run = run = IncidentRun(
            kind, trigger, process, seconds, self._tree, folder, self._place.runtime, self._settings
        )
        for dead in self._eyes.unexplained():
            # Whoever begins an incident with an exit adds that one.
            if dead is not process:
                run.add_exit(dead)
        if self.hang is not None:
            run.note(time.time(), "hang_not_over", incident=self.hang.incident.id)
            run.add_afterword(f"The server made no progress before: incident {self.hang.incident.id}.")
        return run

    def apply(self, event: Event) -> Action:
        """Take in what `policy` says of an event of the incident at hand, and return it."""
        action = self._outlook.decide(event)
        if self.run is not None:
            self.run.permit(action.captures)
        self.awaited.may_end = self.awaited.may_end or event in _ENDS_A_SERVER
        if event is Event.FAILED and not action.ends:
            # Whoever was told so may go on without a server, and launch another one.
            self.awaited.observed = True
        return action

    def open_observed(
        self, kind: str, trigger: str, process: TrackedProcess, seconds: float, event: Event = Event.HUNG
    ) -> IncidentRun | None:
        """Begin an incident of a server that goes on, to be photographed; whoever begins it finishes it.

        Returns:
            None where another one is at hand.
        """
        self._eyes.collect_exits()
        self.make_room()
        if self.run is not None:
            return None
        run = self.open(kind, trigger, process, seconds)
        self.apply(event)
        self.observe(self._settings.budget_secs)
        return run

    def join(
        self, kind: str, trigger: str, process: TrackedProcess, seconds: float, event: Event
    ) -> IncidentRun | None:
        """Return the incident at hand, photographed; begin one of `kind` where there is none.

        Args:
            kind: see `IncidentRun`.
            trigger: see `IncidentRun`.
            process: whom the event came from.
            seconds: when, since the epoch.
            event: what happened; see `apply`.

        Returns:
            None where it turned out to be none. One that is finished is that of a server which ends for it.
        """
        if self.run is None:
            self.open(kind, trigger, process, seconds)
        if self.run is not None and not self.run.finished:
            self.apply(event)
        if self.run is not None and not self.run.photographed and not self.run.finished:
            self.photograph()
        return self.run

    def photograph(self) -> None:
        """Capture what the living processes are doing, of those that are there now."""
        run = self.run
        assert run is not None
        self._eyes.look()
        # An exit that was not told of yet would be photographed in vain.
        self._eyes.collect_exits()
        # With the exits it may be no incident any more, or another one.
        if self.run is run:
            run.photograph()
            if not self.awaited.may_be_shutdown:
                self.gpus.ask_flight_recorders(run)

    def make_room(self) -> None:
        """Let what comes be an incident of its own, where the one at hand tells of a server that went on."""
        if self.awaited.observed and self.run is not None and not (self.awaited.may_end and self.is_open):
            self._write(self.run)
            self._forget()

    def begin_anew(self) -> None:
        """Let what comes be another incident: the program launches another server."""
        if self.run is not None and self.run.finished:
            self._forget()

    def make_room_for_hang(self, process: TrackedProcess) -> None:
        """Let the hang of a process be an incident of its own, unless what it belongs to is gathered at this moment.

        Schedulers hang together, as they wait for each other; any other process hangs by itself.
        """
        run = self.run
        if run is None:
            return
        if run.finished and not self.awaited.observed:
            # The server was to end for it and is still there.
            self._forget()
        elif run.finished or run.incident.kind != "hang" or not _hang_together(run, process):
            self.make_room()

    @property
    def is_ending(self) -> bool:
        """Whether the server ends for the incident at hand, which is finished: what fails now is a consequence."""
        return self.run is not None and self.run.finished and not self.awaited.observed

    def discard(self) -> None:
        """Remove the incident at hand: it was none."""
        if self.run is not None:
            try:
                self.run.discard()
            except OSError as error:
                logger.error("incident %s could not be removed: %s", self.run.path, error)
            self._forget()

    # -- what it waits for

    def observe(self, seconds: float = _OBSERVED_SECS) -> None:
        """Note that the incident tells of a server that goes on, unless more comes within so many seconds."""
        if self.run is not None:
            self.awaited.observe(seconds)

    def finish_observed(self) -> None:
        """Write the incident of a server that goes on."""
        if self.run is not None:
            self.run.set_requests({"reason": "the server went on"})
            self.finish()

    def answer(self, message: Message) -> None:
        """Acknowledge a message with the incident at hand, if there is one that is finished."""
        run = self.run
        if run is None or not run.finished:
            self._mailbox.acknowledge(message, ack="finished", path=None)
            return
        # That of a server which goes on says nothing of its end.
        status = None if self.awaited.observed else exit_status_of(run.incident)
        path = None if run.problem else str(run.path)
        self._mailbox.acknowledge(message, ack="finished", path=path, problem=run.problem or None, exit_status=status)

    def answer_when_finished(self, message: Message) -> None:
        """Acknowledge a message when the incident is whole."""
        self._answers.add(message, self.gpus.cores_secs_left)

    # -- time and end

    @property
    def is_open(self) -> bool:
        """Whether there is an incident that is not finished."""
        return self.run is not None and not self.run.finished

    def next_due(self) -> float:
        """Return when `act_on_time` has something to do, by the monotonic clock."""
        run = self.run
        if run is None or run.finished:
            return self._last_resort.next_due()
        if self.gpus.are_awaited:
            return self.gpus.next_due()
        dues = [
            run.opened + self._settings.budget_secs,
            self.gpus.next_due(),
            self.awaited.next_due(),
            self._last_exits_due(),
        ]
        return min(due for due in dues if due is not None)

    def act_on_time(self) -> None:
        """Do what is due by now."""
        run, now, gone_at = self.run, time.monotonic(), self._outlook.gone_at
        if not self.is_open:
            self._last_resort.act_on_time()
        if run is None:
            return
        if run.finished:
            if gone_at is None and now >= run.opened + self._settings.budget_secs + _NEXT_INCIDENT_SECS:
                self._forget()
            return
        if self.gpus.are_awaited:
            # Until then nobody is told to end: a process that is killed leaves half a core.
            if gone_at is not None and now >= gone_at + _LAST_EXITS_SECS:
                self.gpus.give_up_cores("the server ended")
            self.gpus.look()
            self._answers.tell(self.gpus.cores_secs_left)
            if not self.gpus.are_awaited:
                self.finish()
            return
        self.gpus.look()
        if self.awaited.take_quit():
            self._ask_server_to_end(run)
        if gone_at is not None:
            # Nothing more is to come but the exits of those that die with it.
            if not self._tree.alive() or now >= (self._last_exits_due() or 0.0):
                self.finish()
        elif self.awaited.is_observed_long_enough:
            self.finish_observed()
        elif self.awaited.has_no_answer:
            run.set_requests({"reason": f"the server did not begin to save them within {ANSWER_SECS:g} s"})
            self.finish()
        elif now >= run.opened + self._settings.budget_secs:
            run.note(time.time(), "budget_spent", seconds=self._settings.budget_secs)
            self.finish()

    def _last_exits_due(self) -> float | None:
        """Return until when exits are waited for, by the monotonic clock; None while the server lives."""
        if self._outlook.gone_at is None:
            return None
        is_worker_left = any(process.matters for process in self._tree.alive())
        return self._outlook.gone_at + (_LAST_WORKERS_SECS if is_worker_left else _LAST_EXITS_SECS)

    def finish(self) -> None:
        """Write the incident and answer those that wait for it."""
        run = self.run
        if run is not None and not run.finished:
            # Before what stops a process for a moment, and before its GPU is busy with a core.
            if not self.gpus.are_flight_recorders_done(run):
                return
            if not self.gpus.are_cores_asked:
                # Least perishable of all that is taken from the living: whoever waits for the end waits for it. It
                # stops them, so not while they write their cores.
                run.capture_native()
            self._eyes.collect_exits()
            if self.run is not run:
                # One of the exits was an incident of its own.
                return
            is_ending = not self.awaited.observed
            of_living = is_ending and self._outlook.gone_at is None
            if not self.gpus.are_cores_done(run, of_living=of_living, of_dead=is_ending):
                self._answers.tell(self.gpus.cores_secs_left)
                return
            self._write(run)
            if self.awaited.told:
                self._last_resort.arm(run.opened + self._settings.exit_secs)
            if not self.awaited.observed:
                path = "not written" if run.problem else str(run.path)
                write_termination_message(format_termination_message(run.incident.to_json(), path))
        self._answers.give(self.answer)
        self.awaited.let_go()

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

    def _ask_server_to_end(self, run: IncidentRun) -> None:
        """Tell the server of a death that it may not have noticed, as its own children would, and see to its end."""
        root = self._tree.root
        if root.exited_at is not None:
            return
        if not procfs.catches_signal(root.pid, signal.SIGQUIT):
            run.set_requests({"reason": "the server has no handler for SIGQUIT"})
            self.finish()
            return
        seconds = time.time()
        if signals.tell(root.handle):
            run.note(seconds, "sigquit_sent", pid=root.pid)
            self.awaited.told = True
        self.awaited.await_answer()

    def _write(self, run: IncidentRun) -> None:
        if run.finished:
            return
        self.gpus.give_up_flight_recorders("the incident was finished before")
        run.tell_last_signs(self.last_signs())
        if not run.problem:
            self.journals.add_to(run)
        try:
            run.finish()
        except (OSError, CrashkitError) as error:
            logger.error("incident %s could not be finished: %s", run.path, error)
            run.finished = True
            self.journals.keep()
        else:
            self.journals.remove_taken()

    def _forget(self) -> None:
        self.run = None
        self.gpus.forget()
        self.awaited = Awaited(self._tree.root.pid)
        self._tree.forget_dead()


def _hang_together(run: IncidentRun, process: TrackedProcess) -> bool:
    """Say whether a process hangs with the one whose hang began an incident."""
    first = run.incident.trigger.pid
    report = run.incident.process(first)
    return first == process.pid or (process.role == "scheduler" and report is not None and report.role == "scheduler")
