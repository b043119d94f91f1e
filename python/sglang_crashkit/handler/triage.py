"""Decide what is done about what happens to a server: (state, event, now) → actions, which `session` carries out.

Nothing here reads a clock, a process or a file; all times are by the monotonic clock, in seconds. What ends without
being expected opens an incident. Expected is what a process of the server announced: a teardown
(``kill_process_tree``), or an orderly exit while the server drains after SIGTERM. An exit by an orderly signal or by a
status is *soft*: it may be a shutdown whose announcement is on its way, so it is judged a moment later.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from sglang_crashkit import policy
from sglang_crashkit.incident.exit_status import FATAL_SIGNALS, is_orderly
from sglang_crashkit.incident.judging import UNHEALTHY
from sglang_crashkit.kernel.pidfd import ExitStatus
from sglang_crashkit.model.incident import NOT_SERVING
from sglang_crashkit.policy import Capture, Event, Mode

SOFT_SECS = 1.0  # a soft exit is a shutdown when it is announced within this time
EXCEPTION_GRACE_SECS = 0.5  # a rank that raised tells the server itself; after this time the handler does
ANSWER_SECS = 5.0  # the server answers SIGQUIT by saving its requests; so long is waited for it to begin
OBSERVED_SECS = 5.0  # an incident of a server that goes on is finished so long after it was captured
NEXT_INCIDENT_SECS = 60.0  # a server that lives on so long after an incident may have another one
#: One sample does not tell who stays from who passes by. Upstream ends a server that is unhealthy within 5 s.
SECOND_SAMPLE_SECS = 0.7
#: After the main process has ended, other processes are waited for the shorter time, and the server's own workers for
#: the longer one: they write their stacks then, and on a busy machine take seconds to give their memory back.
LAST_EXITS_SECS, LAST_WORKERS_SECS = 0.5, 4.0

#: Events after which upstream may end a server that the kit would let live.
_ENDS_A_SERVER = frozenset({Event.DIED, Event.RAISED, Event.FAILED, Event.TIMED_OUT})
_WORKER = "tokenizer_worker"
_UNKNOWN = ExitStatus()


#: What is to be done; what concerns the current incident, or answers a message, is nothing without one.
Do: TypeAlias = (
    Literal["open", "permit", "capture", "capture_again", "write", "forget", "discard", "finish", "send_sigquit"]
    | Literal["note", "add_exit", "add_exception", "add_dead_thread", "add_hang", "add_silence"]
    | Literal["add_requests", "set_requests", "close_journals", "drop_record"]
    | Literal["mark_exited", "keep_process", "forget_process", "learn_ranks"]
    | Literal["answer", "answer_when_finished", "answer_captured", "answer_stacks", "answer_saved", "answer_orderly"]
)


@dataclass(frozen=True)
class Action:
    """Something to be done."""

    do: Do
    kind: str = ""
    words: str = ""  # of ``open`` the trigger, of ``note`` the event, of ``set_requests`` why none were saved
    captures: Capture = Capture.NONE


@dataclass(frozen=True)
class Seen:
    """Something that happened, with all that it is judged by."""

    what: str  # a message's event, or ``exited``, ``observed`` (the handler itself saw a hang or a loss) or ``tick``
    pid: int = 0  # whom it concerns, or who says so
    role: str = ""
    status: ExitStatus = _UNKNOWN
    matters: bool = True  # it is the server's own, so that its end concerns it
    is_unknown: bool = False  # it ended before it said what it is
    is_foreign: bool = False  # it is of another server that this one started
    others_serve: bool = True  # processes of this server are alive whose end was not announced
    soft: bool = False  # the watchdog ends nothing; the exception only ends a process, such as ``SystemExit``
    caught: bool = False  # SGLang caught the exception, and serves on
    unhealthy: bool = False  # the server's health check failed
    silent: bool = False  # a scheduler gave no sign for a while
    tree_of: int = 0  # the process whose tree is ended
    members: Set[int] = frozenset()  # processes whose end is announced, or, of a launch, those that are there
    mode: Mode = Mode.LIBRARY
    #: Of the incident that is to be opened for what was observed, whole after `secs`.
    kind: str = ""
    trigger: str = ""
    event: Event = Event.HUNG
    secs: float = OBSERVED_SECS
    withdrawable: bool = False  # it is no incident where the server goes on or ends in good order
    workers_left: bool = True  # processes of the server itself live
    any_left: bool = True  # any process lives


@dataclass
class Shutdown:
    """What is known of the server's end."""

    mode: Mode = Mode.LIBRARY  # LIBRARY ends nothing; it holds until the launching program reports its mode
    expected: set[int] = field(default_factory=set)  # the processes whose end was announced
    draining: bool = False  # it was asked to end and finishes its requests
    has_left: bool = False  # a process of it ended for that, too
    ended_well: bool = False  # its main process ended in good order; a program of a user's with any status
    gone_at: float | None = None  # when the end of its main process was noticed; None while it lives


@dataclass
class IncidentStage:
    """How far the current incident is."""

    kind: str
    first: Seen  # what opened it
    opened: float
    captured_at: float | None = None  # when what the living did was captured
    sample_again_at: float | None = None  # when a second sample of the stacks is due; not before the first one
    finishes_then: bool = False  # the incident is finished after that sample
    finishing: bool = False  # nothing more is to come but evidence that is waited for
    finished: bool = False  # it is written; what is added still is written anew
    observed: bool = False  # the server goes on, so that what comes next is another incident
    observed_until: float | None = None  # when such a one is whole
    may_end: bool = False  # SGLang may still end the server for this event; that end is part of this incident
    withdrawable: bool = False  # it is no incident where the server goes on or ends in good order
    soft_until: float | None = None  # until when a shutdown may explain all that was seen; None where it cannot
    sigquit_secs: float | None = None  # when SIGQUIT is sent after the capture; None where it is not, or was
    answer_by: float | None = None  # when the server, which was told, should have begun to save its requests
    dump_begun: bool = False  # somebody saved its requests
    dumping: set[int] = field(default_factory=set)  # who does so now
    exits: list[Seen] = field(default_factory=list)  # how those ended that count

    @property
    def may_be_shutdown(self) -> bool:
        """Whether nothing but exits that an announcement would explain was seen."""
        return self.soft_until is not None and not self.dump_begun

    @property
    def sigquit_at(self) -> float | None:
        """When the server is sent SIGQUIT; None where it is not, or not before the capture."""
        return None if self.sigquit_secs is None or self.captured_at is None else self.captured_at + self.sigquit_secs


class Triage:
    """Decides for one server."""

    def __init__(self, root_pid: int, budget_secs: float) -> None:
        self.shutdown = Shutdown()
        #: None where nothing happened yet. It stays when it is finished, until another may come.
        self.stage: IncidentStage | None = None
        self._root_pid = root_pid
        self._budget_secs = budget_secs
        self._actions: list[Action] = []

    def take(self, seen: Seen, now: float) -> list[Action]:
        """Return what is to be done about something that happened: `Seen.what` names the method that decides."""
        self._actions = []
        getattr(self, f"_on_{seen.what}")(seen, now)
        return self._actions

    @property
    def is_open(self) -> bool:
        """Whether there is an incident that is not finished."""
        return self.stage is not None and not self.stage.finished

    @property
    def is_ending(self) -> bool:
        """Whether the server ends for the current incident, which is finished: what fails now is a consequence."""
        return self.stage is not None and self.stage.finished and not self.stage.observed

    def next_due(self, *, workers_left: bool) -> float:
        """Return when a tick has something to do; `workers_left` says that processes of the server itself live."""
        stage = self.stage
        if stage is None or stage.finished:
            return float("inf")
        if stage.finishing:
            return stage.sample_again_at or float("inf")
        dues = [stage.sigquit_at, stage.answer_by, stage.observed_until, stage.soft_until, stage.sample_again_at]
        return min([stage.opened + self._budget_secs, self._last_exits(workers_left), *(due for due in dues if due)])

    # -- exits

    def _on_exited(self, seen: Seen, now: float) -> None:
        shutdown, is_root = self.shutdown, seen.pid == self._root_pid
        # The end of a user's program is its own matter where it has no server, or ended by itself.
        is_library = is_root and shutdown.mode is Mode.LIBRARY
        is_users_own = is_library and (not seen.others_serve or seen.status.signal not in FATAL_SIGNALS)
        expected = seen.pid in shutdown.expected or is_users_own
        if seen.matters and not expected:
            if self.stage is None or not self.stage.withdrawable or not is_orderly(seen.status):
                self._make_room()
            elif is_root or seen.role == "scheduler":
                # One that ends in good order did not hang.
                self._discard()
        self._add("mark_exited")
        if is_root:
            shutdown.gone_at = now
            # A user's program may end with any status; its ranks end with it.
            shutdown.ended_well = is_orderly(seen.status) or is_users_own
            self._reconsider(seen)
        if self.stage is not None and not seen.is_foreign:
            self._add("add_exit")
            if seen.matters:
                self.stage.exits.append(seen)
            if not is_root and seen.pid in self.stage.dumping:
                # It died while it saved its requests.
                self.stage.dumping.discard(seen.pid)
                if not self.stage.dumping:
                    self._add("finish")
        elif seen.matters and not expected and not self._take_clean_exit(seen):
            self._open_for_exit(seen, now)
        elif seen.is_unknown and not expected and seen.status.code != 0:
            # One that died before it said what it is may be a rank, or a worker of a pool that does not matter. It is
            # kept: if the start fails for it, the incident knows how it ended.
            self._add("keep_process")
        elif not is_root:
            self._add("forget_process")

    def _open_for_exit(self, seen: Seen, now: float) -> None:
        hard = seen.status.signal in FATAL_SIGNALS
        event = _event_of(seen, Event.DIED)
        stage = self._open("killed" if hard else "exited", "process_exited", seen, now)
        self._apply(stage, event)
        stage.exits.append(seen)
        if policy.decide(self.shutdown.mode, event).sends_sigquit:
            stage.sigquit_secs = 0.0 if hard else SOFT_SECS
        else:
            stage.observed = True
        if not hard:
            stage.soft_until = now + SOFT_SECS
        self._add("add_exit")
        self._add("capture")

    def _take_clean_exit(self, seen: Seen) -> bool:
        """Say whether an exit is no failure, and keep in mind that a process left as the server ends."""
        status, shutdown = seen.status, self.shutdown
        if seen.pid == self._root_pid or shutdown.ended_well:
            # What outlives the main process, the kernel ends.
            return is_orderly(status) or (shutdown.ended_well and status.signal == "SIGKILL")
        # A manager of services or jobs asks all processes of a server to end, not the main one alone.
        event = Event.LEFT if is_orderly(status) and shutdown.draining else Event.DIED
        shutdown.has_left = shutdown.has_left or (event is Event.LEFT and status.code != 0)
        return not policy.decide(shutdown.mode, event).records

    def _reconsider(self, *more: Seen) -> None:
        """Take the exits seen for a shutdown where they are one by what is known now; then there is no incident."""
        stage = self.stage
        if stage is not None and stage.may_be_shutdown and all(map(self._take_clean_exit, [*stage.exits, *more])):
            self._discard()

    # -- failures that are reported

    def _on_exception(self, seen: Seen, now: float) -> None:
        if (seen.soft or seen.caught) and (self.shutdown.draining or seen.pid in self.shutdown.expected):
            # It ends as it was asked to, or meets a peer that did.
            self._add("drop_record")
            self._add("answer_captured")
            return
        # Ranks that catch it together are one incident.
        if not seen.caught or (self.stage is not None and self.stage.finished):
            self._make_room()
        stage = self.stage or self._open("exception", "exception", seen, now)
        if not self.is_ending and not seen.caught:
            stage.soft_until = None
        event = Event.CAUGHT if seen.caught else _event_of(seen, Event.RAISED)
        self._apply(stage, event)
        self._add("add_exception")
        # Its dump, which follows, belongs to it.
        stage.may_end = stage.may_end or seen.role == _WORKER
        if stage.captured_at is None and not stage.finished:
            if not policy.decide(self.shutdown.mode, event).sends_sigquit:
                stage.observed = True
            elif seen.pid != self._root_pid:
                # The main process, which is the one that is told, ends by its own exception.
                stage.sigquit_secs = EXCEPTION_GRACE_SECS
            self._add("capture")
        self._add("answer_captured")

    def _on_thread_died(self, seen: Seen, now: float) -> None:
        """Take in that a process goes on without one of its threads; as the server ends, threads end for that."""
        if not seen.matters or self.shutdown.draining or {seen.pid, self._root_pid} & self.shutdown.expected:
            self._add("drop_record")
            return
        if self.stage is not None and self.stage.finished:
            self._make_room()
        is_new = self.stage is None
        if is_new:
            stage = self._open("thread_died", seen.what, seen, now)
            stage.observed = True
            self._apply(stage, Event.THREAD_DIED)
        self._add("add_dead_thread")
        if is_new:
            self._add("capture")

    def _on_crash_dump_begun(self, seen: Seen, now: float) -> None:
        self._make_room()
        if self._is_orderly_end():
            # SGLang takes it for a crash that its processes ended, which were asked to like itself.
            return
        if self.stage is None and self.shutdown.draining and seen.silent:
            stage = self._open_at_end("crash_dump", seen, now)
            self._apply(stage, _event_of(seen, Event.DUMPED))
        else:
            stage = self._join("child_failure", "crash_dump", seen, now, _event_of(seen, Event.DUMPED))
        stage.dump_begun, stage.observed = True, False
        stage.dumping.add(seen.pid)
        stage.sigquit_secs = stage.answer_by = stage.soft_until = stage.observed_until = None
        self._add("note", words=seen.what)

    def _on_crash_dump_ended(self, seen: Seen, now: float) -> None:
        if self._is_orderly_end():
            self._add("answer_orderly")
            return
        if self.stage is None or seen.pid not in self.stage.dumping:
            self._make_room()
        stage = self._join("child_failure", "crash_dump", seen, now, _event_of(seen, Event.DUMPED))
        self._add("add_requests")
        stage.dumping.discard(seen.pid)
        if stage.dumping:
            # Another tokenizer worker, or the server that waits for all of them, is not done.
            self._add("answer_saved")
            return
        # The HTTP server starts a worker anew that ended by itself.
        stage.observed = seen.role == _WORKER
        self._add("answer_when_finished")
        stage.finishes_then = stage.sample_again_at not in (None, float("inf"))
        if not stage.finishes_then:
            self._add("finish")

    def _is_orderly_end(self) -> bool:
        return self.stage is None and self.shutdown.draining and self.shutdown.has_left

    def _on_failure(self, seen: Seen, now: float) -> None:
        """Take in the main process's word for a failure, which may be that of a finished incident."""
        is_start = seen.what != "child_failed"
        self._make_room()
        if self.is_ending:
            self._add("note", words=seen.what)
            self._add("answer")
            return
        if self.stage is not None:
            self.stage.soft_until = None
        if is_start:
            # Before the exits are taken in: a rank that died when it had hardly begun to run looks like a helper.
            self._add("learn_ranks")
        self._join("failed_start" if is_start else "child_failure", seen.what, seen, now, Event.FAILED)
        self._add("note", words=seen.what)
        # Unlike a tokenizer manager, which saves its requests, the sender has none to save.
        self._add("set_requests", words=NOT_SERVING if is_start else "the server's main process held no requests")
        self._add("answer_when_finished")
        self._add("finish")

    _on_launch_failed = _on_startup_timeout = _on_child_failed = _on_failure

    def _on_await_incident(self, _seen: Seen, _now: float) -> None:
        # What is about to end the server waits for what it would cut short.
        waits = self.stage is not None and self.is_open and not self.stage.may_be_shutdown
        self._add("answer_when_finished" if waits else "answer")

    # -- hangs and other matters of a server that goes on

    def _on_watchdog_timeout(self, seen: Seen, now: float) -> None:
        if not seen.soft:
            # It ends the server, which is another matter than what a soft one saw before.
            self._make_room()
        stage = self.stage
        # Schedulers hang together, any other process by itself.
        together = stage is not None and (seen.pid == stage.first.pid or seen.role == stage.first.role == "scheduler")
        if self.is_ending:
            # The server was to end for it and is still there.
            self._forget()
        elif stage is not None and (stage.finished or stage.kind != "hang" or not together):
            self._make_room()
        stage = self.stage
        if stage is None:
            stage = self._open("hang", seen.what, seen, now)
            # The sender asks for the stacks once more; however long they took, they are the same.
            stage.observed = seen.soft
        self._apply(stage, Event.HUNG if seen.soft else Event.TIMED_OUT)
        self._add("add_hang")
        if stage.captured_at is None:
            self._add("capture")
        self._add("answer_stacks")

    def _on_stacks_wanted(self, seen: Seen, now: float) -> None:
        if not self.is_open:
            self._make_room()
        if self.stage is None:
            stage = self._open("snapshot", seen.what, seen, now)
            stage.observed = True
            self._apply(stage, Event.STACKS_WANTED)
            self._add("capture")
        self._add("answer_stacks")

    def _on_observed(self, seen: Seen, now: float) -> None:
        """Open an incident of a server that goes on, captured by the handler that saw it; not where there is one."""
        self._make_room()
        if self.stage is None:
            stage = self._open(seen.kind, seen.trigger, seen, now)
            stage.observed, stage.observed_until, stage.withdrawable = True, now + seen.secs, seen.withdrawable
            self._apply(stage, seen.event)

    # -- the server's end

    def _on_draining(self, seen: Seen, now: float) -> None:
        self.shutdown.draining = True
        self._reconsider()
        if seen.unhealthy:
            # Seconds may pass before it says so itself, and it may be killed before.
            self._make_room()
            self._open_at_end(UNHEALTHY, seen, now)
        self._add("note", words=seen.what)

    def _on_teardown(self, seen: Seen, _now: float) -> None:
        self.shutdown.expected |= seen.members
        stage = self.stage
        if stage is None:
            return
        # Somebody else may kill a server that hangs.
        is_no_incident = stage.may_be_shutdown or (stage.withdrawable and seen.pid == self._root_pid)
        if is_no_incident and seen.tree_of == self._root_pid:
            self._discard()
        else:
            self._add("note", words=seen.what)

    def _on_exiting(self, seen: Seen, _now: float) -> None:
        # What is ended after it is not announced any more: a program's exit handlers run last in, first out.
        self.shutdown.expected |= seen.members

    def _on_launch(self, seen: Seen, _now: float) -> None:
        """Begin anew; of those whose end was announced, some may end still: before 0.5.11 nothing waits for it."""
        if not seen.others_serve:
            # Where no server of before is left, nothing that it was asked is under way.
            self._add("close_journals")
        shutdown = self.shutdown
        shutdown.mode = seen.mode
        shutdown.expected &= seen.members
        shutdown.draining = shutdown.has_left = False
        if self.stage is not None and self.stage.finished:
            self._forget()

    def _open_at_end(self, trigger: str, seen: Seen, now: float) -> IncidentStage:
        """Capture a server that hangs when SIGTERM comes: it ends soon, by itself or by the sender of the signal."""
        is_new = self.stage is None
        stage = self.stage or self._open("hang", trigger, seen, now)
        self._apply(stage, Event.HUNG_AT_END)
        if is_new:
            stage.sample_again_at = float("inf")
            self._add("add_silence")
        if stage.captured_at is None:
            self._add("capture")
        return stage

    # -- what was done, and time

    def done(self, do: Do, now: float) -> None:
        """Take in that an action was carried out: what follows from it counts from `now`."""
        stage = self.stage
        if stage is None:
            return
        if do == "capture":
            stage.captured_at = now
            if stage.soft_until is not None:
                stage.soft_until = now + SOFT_SECS
            if stage.observed and stage.observed_until is None:
                stage.observed_until = now + OBSERVED_SECS
            if stage.sample_again_at is not None:
                stage.sample_again_at = now + SECOND_SAMPLE_SECS
        elif do == "send_sigquit":
            stage.answer_by = now + ANSWER_SECS
        elif do == "finish":
            # Once it is whole, others were told of it.
            stage.finished, stage.withdrawable = True, False

    def _on_tick(self, seen: Seen, now: float) -> None:
        stage, gone_at = self.stage, self.shutdown.gone_at
        if stage is None:
            return
        if stage.finished:
            if gone_at is None and now >= stage.opened + self._budget_secs + NEXT_INCIDENT_SECS:
                self._forget()
            return
        if stage.sample_again_at is not None and now >= stage.sample_again_at:
            stage.sample_again_at = None
            if gone_at is None:
                self._add("capture_again")
            if stage.finishes_then:
                self._add("finish")
                return
        if stage.finishing:
            return
        if stage.soft_until is not None and now >= stage.soft_until:
            stage.soft_until = None
        if stage.sigquit_at is not None and now >= stage.sigquit_at and stage.soft_until is None:
            # Nothing is told while it may be a shutdown.
            stage.sigquit_secs = None
            self._add("send_sigquit")
        if gone_at is not None:
            # Nothing more is to come but the exits of those that die with it.
            if not seen.any_left or now >= self._last_exits(seen.workers_left):
                self._add("finish")
            return
        if stage.observed_until is not None and now >= stage.observed_until:
            self._add("set_requests", words="the server went on")
        elif stage.answer_by is not None and now >= stage.answer_by:
            self._add("set_requests", words=f"the server did not begin to save them within {ANSWER_SECS:g} s")
        elif now >= stage.opened + self._budget_secs:
            self._add("note", words="budget_spent")
        else:
            return
        self._add("finish")

    def _last_exits(self, workers_left: bool) -> float:
        """Return until when exits are waited for; forever while the server lives."""
        gone_at = self.shutdown.gone_at
        secs = LAST_WORKERS_SECS if workers_left else LAST_EXITS_SECS
        return float("inf") if gone_at is None else gone_at + secs

    # -- the current incident

    def _add(self, do: Do, kind: str = "", words: str = "", captures: Capture = Capture.NONE) -> None:
        self._actions.append(Action(do, kind, words, captures))

    def _open(self, kind: str, trigger: str, seen: Seen, now: float) -> IncidentStage:
        self.stage = IncidentStage(kind, seen, now)
        self._add("open", kind, trigger)
        return self.stage

    def _join(self, kind: str, trigger: str, seen: Seen, now: float, event: Event) -> IncidentStage:
        """Join the current incident, captured; open one of `kind` if there is no incident."""
        stage = self.stage or self._open(kind, trigger, seen, now)
        if not stage.finished:
            self._apply(stage, event)
            if stage.captured_at is None:
                self._add("capture")
        return stage

    def _apply(self, stage: IncidentStage, event: Event) -> None:
        """Take in what `policy` says of an event of the current incident."""
        action = policy.decide(self.shutdown.mode, event)
        stage.may_end = stage.may_end or event in _ENDS_A_SERVER
        if event is Event.FAILED and not action.ends:
            # A program that was told so may go on without a server, and launch another one.
            stage.observed = True
        self._add("permit", captures=action.captures)

    def _make_room(self) -> None:
        """Let what comes be an incident of its own, where the server of the current one went on."""
        stage = self.stage
        if stage is not None and stage.observed and (stage.finished or not stage.may_end):
            self._add("write")
            self._forget()

    def _forget(self) -> None:
        self.stage = None
        self._add("forget")

    def _discard(self) -> None:
        """It was a false alarm."""
        self.stage = None
        self._add("discard")


def _event_of(seen: Seen, event: Event) -> Event:
    """Return `event`, or that of a tokenizer worker, which the HTTP server starts anew."""
    return Event.WORKER_DIED if seen.role == _WORKER else event
