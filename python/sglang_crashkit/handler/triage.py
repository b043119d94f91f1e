"""Decide how to handle each event of a server: (state, event, now) → actions, which `session` carries out.

Nothing here reads a clock, a process or a file; all times are by the monotonic clock, in seconds. An unexpected exit
opens an incident. An exit is expected when a process of the server announced it: as a teardown
(``kill_process_tree``), or as an orderly exit while the server drains after SIGTERM. An exit by an orderly signal or
with a status is *soft*: the announcement of a shutdown may be on its way, so the exit is judged `SOFT_SECS` later.
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
EXCEPTION_GRACE_SECS = 0.5  # a rank that raised sends SIGQUIT itself; after this time the handler does
ANSWER_SECS = 5.0  # the server answers SIGQUIT by saving its requests; the longest wait for it to begin
OBSERVED_SECS = 5.0  # from the capture to the end of an incident of a server that goes on
NEXT_INCIDENT_SECS = 60.0  # a server still alive this long after an incident may have another one
#: One sample can't tell a stuck process from a working one. Upstream ends an unhealthy server within 5 s.
SECOND_SAMPLE_SECS = 0.7
#: After the main process has ended, the handler waits for the server's own workers for the longer time, and for other
#: processes for the shorter: workers write their stacks then, and on a busy machine take seconds to free their memory.
LAST_EXITS_SECS, LAST_WORKERS_SECS = 0.5, 4.0

#: Events after which upstream may end a server that the kit would let live.
_ENDS_A_SERVER = frozenset({Event.DIED, Event.RAISED, Event.FAILED, Event.TIMED_OUT})
_WORKER = "tokenizer_worker"
_UNKNOWN = ExitStatus()


#: What to do. An action on the current incident does nothing without an incident; an answer, nothing without a message.
Do: TypeAlias = (
    Literal["open", "permit", "capture", "capture_again", "write", "forget", "discard", "finish", "send_sigquit"]
    | Literal["note", "add_exit", "add_exception", "add_dead_thread", "add_hang", "add_silence"]
    | Literal["add_requests", "set_requests", "close_journals", "drop_record"]
    | Literal["mark_exited", "keep_process", "forget_process", "learn_ranks"]
    | Literal["answer", "answer_when_finished", "answer_captured", "answer_stacks", "answer_saved", "answer_orderly"]
)


@dataclass(frozen=True)
class Action:
    """An action for `session` to carry out."""

    do: Do
    kind: str = ""
    words: str = ""  # of ``open`` the trigger, of ``note`` the event, of ``set_requests`` why none were saved
    captures: Capture = Capture.NONE


@dataclass(frozen=True)
class Seen:
    """An event, with everything that it is judged by."""

    what: str  # a message's event, or ``exited``, ``observed`` (the handler itself saw a hang or a loss) or ``tick``
    pid: int = 0  # the process that the event is about, or that reported it
    role: str = ""
    status: ExitStatus = _UNKNOWN
    matters: bool = True  # the process belongs to the server, which its exit affects
    is_unknown: bool = False  # the process ended before it reported its role
    is_foreign: bool = False  # the process belongs to another server, which this one started
    others_serve: bool = True  # processes of this server live, and their exits were not announced
    soft: bool = False  # the watchdog ends nothing; or the exception, such as ``SystemExit``, ends only its process
    caught: bool = False  # SGLang caught the exception and keeps serving
    unhealthy: bool = False  # the server's health check failed
    silent: bool = False  # a scheduler's heartbeat stood still for a while
    tree_of: int = 0  # the root of the process tree that is killed
    members: Set[int] = frozenset()  # processes whose exits are announced; for a launch, those that exist
    mode: Mode = Mode.LIBRARY
    #: The incident to open for an observation; it is complete after `secs`.
    kind: str = ""
    trigger: str = ""
    event: Event = Event.HUNG
    secs: float = OBSERVED_SECS
    withdrawable: bool = False  # removed as a false alarm if the server goes on or ends in good order
    workers_left: bool = True  # processes of the server itself are alive
    any_left: bool = True  # any process is alive


@dataclass
class Shutdown:
    """What is known about the server's shutdown."""

    mode: Mode = Mode.LIBRARY  # LIBRARY ends nothing; it holds until the launching program reports its mode
    expected: set[int] = field(default_factory=set)  # the processes whose exits were announced
    draining: bool = False  # the server got SIGTERM and finishes its requests
    has_left: bool = False  # a process of the server exited because of that, too
    ended_well: bool = False  # the main process exited in good order; a user's program with any status
    gone_at: float | None = None  # when the main process's exit was noticed; None while it lives


@dataclass
class IncidentStage:
    """The progress of the current incident."""

    kind: str
    first: Seen  # the event that opened it
    opened: float
    captured_at: float | None = None  # when the activity of the living processes was captured
    sample_again_at: float | None = None  # when a second sample of the stacks is due; inf until the first is taken
    finishes_then: bool = False  # finish the incident after that sample
    finishing: bool = False  # only evidence already asked for is still awaited
    finished: bool = False  # it is written; a later addition writes it again
    observed: bool = False  # the server goes on; its next failure is another incident
    observed_until: float | None = None  # when an observed incident is complete
    may_end: bool = False  # SGLang may still end the server for this event, which is part of this incident
    withdrawable: bool = False  # removed as a false alarm if the server goes on or ends in good order
    soft_until: float | None = None  # until when a shutdown may explain all events; None if it can't
    sigquit_secs: float | None = None  # from the capture to SIGQUIT; None if it isn't to be sent, or was sent
    answer_by: float | None = None  # by when the server, sent SIGQUIT, should have begun to save its requests
    dump_begun: bool = False  # a process of the server began to save its requests
    dumping: set[int] = field(default_factory=set)  # the processes that are saving requests
    exits: list[Seen] = field(default_factory=list)  # the exits of processes that matter

    @property
    def may_be_shutdown(self) -> bool:
        """Whether an announced shutdown would explain every event so far."""
        return self.soft_until is not None and not self.dump_begun

    @property
    def sigquit_at(self) -> float | None:
        """When to send SIGQUIT to the server; None if it isn't to be sent, or the capture is not done."""
        return None if self.sigquit_secs is None or self.captured_at is None else self.captured_at + self.sigquit_secs


class Triage:
    """The decisions for one server."""

    def __init__(self, root_pid: int, budget_secs: float) -> None:
        self.shutdown = Shutdown()
        #: None without an incident. A finished incident stays until another one may open.
        self.stage: IncidentStage | None = None
        self._root_pid = root_pid
        self._budget_secs = budget_secs
        self._actions: list[Action] = []

    def take(self, seen: Seen, now: float) -> list[Action]:
        """Return the actions for an event: `Seen.what` names the method that decides."""
        self._actions = []
        getattr(self, f"_on_{seen.what}")(seen, now)
        return self._actions

    @property
    def is_open(self) -> bool:
        """Whether an incident is in progress."""
        return self.stage is not None and not self.stage.finished

    @property
    def is_ending(self) -> bool:
        """Whether the current incident is finished and ends the server: further failures are consequences."""
        return self.stage is not None and self.stage.finished and not self.stage.observed

    def next_due(self, *, workers_left: bool) -> float:
        """Return when the next tick is due; `workers_left`: processes of the server itself are alive."""
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
        # The exit of a user's program is no incident if it runs no server, or if no fatal signal killed it.
        is_library = is_root and shutdown.mode is Mode.LIBRARY
        is_users_own = is_library and (not seen.others_serve or seen.status.signal not in FATAL_SIGNALS)
        expected = seen.pid in shutdown.expected or is_users_own
        if seen.matters and not expected:
            if self.stage is None or not self.stage.withdrawable or not is_orderly(seen.status):
                self._make_room()
            elif is_root or seen.role == "scheduler":
                # A process that exits in good order did not hang.
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
                # The process died while it saved its requests.
                self.stage.dumping.discard(seen.pid)
                if not self.stage.dumping:
                    self._add("finish")
        elif seen.matters and not expected and not self._take_clean_exit(seen):
            self._open_for_exit(seen, now)
        elif seen.is_unknown and not expected and seen.status.code != 0:
            # A process that died before it reported its role may be a rank, or only a worker of a pool. It is kept, so
            # that if the start fails because of it, the incident has its exit status.
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
        """Return whether an exit is no failure; record in `has_left` that a process left a draining server."""
        status, shutdown = seen.status, self.shutdown
        if seen.pid == self._root_pid or shutdown.ended_well:
            # The kernel kills the processes that outlive the main process.
            return is_orderly(status) or (shutdown.ended_well and status.signal == "SIGKILL")
        # A service or job manager signals all processes of a server, not only the main one.
        event = Event.LEFT if is_orderly(status) and shutdown.draining else Event.DIED
        shutdown.has_left = shutdown.has_left or (event is Event.LEFT and status.code != 0)
        return not policy.decide(shutdown.mode, event).records

    def _reconsider(self, *more: Seen) -> None:
        """Discard the incident if its exits are part of a shutdown, as far as is known by now."""
        stage = self.stage
        if stage is not None and stage.may_be_shutdown and all(map(self._take_clean_exit, [*stage.exits, *more])):
            self._discard()

    # -- failures that are reported

    def _on_exception(self, seen: Seen, now: float) -> None:
        if (seen.soft or seen.caught) and (self.shutdown.draining or seen.pid in self.shutdown.expected):
            # The process exits as requested, or lost a peer that did.
            self._add("drop_record")
            self._add("answer_captured")
            return
        # Exceptions that several ranks catch together are one incident.
        if not seen.caught or (self.stage is not None and self.stage.finished):
            self._make_room()
        stage = self.stage or self._open("exception", "exception", seen, now)
        if not self.is_ending and not seen.caught:
            stage.soft_until = None
        event = Event.CAUGHT if seen.caught else _event_of(seen, Event.RAISED)
        self._apply(stage, event)
        self._add("add_exception")
        # The worker's crash dump, which follows, belongs to this incident.
        stage.may_end = stage.may_end or seen.role == _WORKER
        if stage.captured_at is None and not stage.finished:
            if not policy.decide(self.shutdown.mode, event).sends_sigquit:
                stage.observed = True
            elif seen.pid != self._root_pid:
                # SIGQUIT goes to the main process, which ends by its own exception.
                stage.sigquit_secs = EXCEPTION_GRACE_SECS
            self._add("capture")
        self._add("answer_captured")

    def _on_thread_died(self, seen: Seen, now: float) -> None:
        """Record that a process goes on without one of its threads; ignore it while the server shuts down."""
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
            # SIGTERM reached the other processes as well, and SGLang mistakes their exits for a crash.
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
            # Another tokenizer worker, or the server, which waits for all of them, is not done.
            self._add("answer_saved")
            return
        # The HTTP server restarts a worker that ended by itself.
        stage.observed = seen.role == _WORKER
        self._add("answer_when_finished")
        stage.finishes_then = stage.sample_again_at not in (None, float("inf"))
        if not stage.finishes_then:
            self._add("finish")

    def _is_orderly_end(self) -> bool:
        return self.stage is None and self.shutdown.draining and self.shutdown.has_left

    def _on_failure(self, seen: Seen, now: float) -> None:
        """Handle a failure that the main process reports; it may belong to a finished incident."""
        is_start = seen.what != "child_failed"
        self._make_room()
        if self.is_ending:
            self._add("note", words=seen.what)
            self._add("answer")
            return
        if self.stage is not None:
            self.stage.soft_until = None
        if is_start:
            # Do this before adding exits: a rank that died just after its start looks like a helper.
            self._add("learn_ranks")
        self._join("failed_start" if is_start else "child_failure", seen.what, seen, now, Event.FAILED)
        self._add("note", words=seen.what)
        # Unlike a tokenizer manager, the sender has no requests to save.
        self._add("set_requests", words=NOT_SERVING if is_start else "the server's main process held no requests")
        self._add("answer_when_finished")
        self._add("finish")

    _on_launch_failed = _on_startup_timeout = _on_child_failed = _on_failure

    def _on_await_incident(self, _seen: Seen, _now: float) -> None:
        # A process about to end the server waits for the incident, which it would cut short.
        waits = self.stage is not None and self.is_open and not self.stage.may_be_shutdown
        self._add("answer_when_finished" if waits else "answer")

    # -- hangs and other events of a server that goes on

    def _on_watchdog_timeout(self, seen: Seen, now: float) -> None:
        if not seen.soft:
            # This watchdog ends the server; an incident of a soft watchdog is another one.
            self._make_room()
        stage = self.stage
        # Hangs of several schedulers are one incident; any other process has its own.
        together = stage is not None and (seen.pid == stage.first.pid or seen.role == stage.first.role == "scheduler")
        if self.is_ending:
            # The finished incident should have ended the server, which is still alive.
            self._forget()
        elif stage is not None and (stage.finished or stage.kind != "hang" or not together):
            self._make_room()
        stage = self.stage
        if stage is None:
            stage = self._open("hang", seen.what, seen, now)
            # The sender asks for the stacks again; it gets the same ones, however long they took.
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
        """Open an incident of a server that goes on, unless there is one; the detector captures it."""
        self._make_room()
        if self.stage is None:
            stage = self._open(seen.kind, seen.trigger, seen, now)
            stage.observed, stage.observed_until, stage.withdrawable = True, now + seen.secs, seen.withdrawable
            self._apply(stage, seen.event)

    # -- the server's shutdown

    def _on_draining(self, seen: Seen, now: float) -> None:
        self.shutdown.draining = True
        self._reconsider()
        if seen.unhealthy:
            # The server may take seconds to report it, and may be killed first.
            self._make_room()
            self._open_at_end(UNHEALTHY, seen, now)
        self._add("note", words=seen.what)

    def _on_teardown(self, seen: Seen, _now: float) -> None:
        self.shutdown.expected |= seen.members
        stage = self.stage
        if stage is None:
            return
        # A teardown by another process may be the killing of a server that hangs.
        is_no_incident = stage.may_be_shutdown or (stage.withdrawable and seen.pid == self._root_pid)
        if is_no_incident and seen.tree_of == self._root_pid:
            self._discard()
        else:
            self._add("note", words=seen.what)

    def _on_exiting(self, seen: Seen, _now: float) -> None:
        # Exit handlers run last in, first out: those that run after this announcement can't announce what they end.
        self.shutdown.expected |= seen.members

    def _on_launch(self, seen: Seen, _now: float) -> None:
        """Reset for a new launch. Announced exits may be pending: SGLang before 0.5.11 does not wait for them."""
        if not seen.others_serve:
            # Without an earlier server, none of its requests are in progress.
            self._add("close_journals")
        shutdown = self.shutdown
        shutdown.mode = seen.mode
        shutdown.expected &= seen.members
        shutdown.draining = shutdown.has_left = False
        if self.stage is not None and self.stage.finished:
            self._forget()

    def _open_at_end(self, trigger: str, seen: Seen, now: float) -> IncidentStage:
        """Capture a server that hangs on SIGTERM: it ends soon, by itself or killed by the signal's sender."""
        is_new = self.stage is None
        stage = self.stage or self._open("hang", trigger, seen, now)
        self._apply(stage, Event.HUNG_AT_END)
        if is_new:
            stage.sample_again_at = float("inf")
            self._add("add_silence")
        if stage.captured_at is None:
            self._add("capture")
        return stage

    # -- completed actions, and time

    def done(self, do: Do, now: float) -> None:
        """Record that an action was carried out; the times that follow from it count from `now`."""
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
            # A finished incident was reported to the processes that wait for it.
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
            # Send no SIGQUIT while this may be a shutdown.
            stage.sigquit_secs = None
            self._add("send_sigquit")
        if gone_at is not None:
            # Only the exits of processes that die with the main one are still awaited.
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
        """Return until when to wait for exits; inf while the main process lives."""
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
        """Apply the `policy` for an event to the current incident."""
        action = policy.decide(self.shutdown.mode, event)
        stage.may_end = stage.may_end or event in _ENDS_A_SERVER
        if event is Event.FAILED and not action.ends:
            # A program that learns of the failure may go on without a server, and launch another one.
            stage.observed = True
        self._add("permit", captures=action.captures)

    def _make_room(self) -> None:
        """Write and close the current incident if the server went on, so that the next event opens its own."""
        stage = self.stage
        if stage is not None and stage.observed and (stage.finished or not stage.may_end):
            self._add("write")
            self._forget()

    def _forget(self) -> None:
        self.stage = None
        self._add("forget")

    def _discard(self) -> None:
        """Discard the incident: it was a false alarm."""
        self.stage = None
        self._add("discard")


def _event_of(seen: Seen, event: Event) -> Event:
    """Return `event`, or `WORKER_DIED` for a tokenizer worker, which the HTTP server restarts."""
    return Event.WORKER_DIED if seen.role == _WORKER else event
