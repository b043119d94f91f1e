"""Decide what is done about what happens to a server: (state, event, now) → actions.

Nothing here reads a clock, a process or a file. `session` carries the actions out, in their order.

What ends without being expected opens an incident. Expected is what a process of the server announced: a teardown
(``kill_process_tree``), or an orderly exit while the server drains after SIGTERM. So is the end of the server's main
process by SIGTERM or another signal that asks for it, as long as it has no handler for it. An exit by an orderly signal
or by a status is *soft*: it may be a shutdown whose announcement is on its way, so it is captured at once and judged a
moment later.

All times are by the monotonic clock, in seconds.
"""

from __future__ import annotations

from collections.abc import Callable

from sglang_crashkit import policy
from sglang_crashkit.analysis.verdict import UNHEALTHY
from sglang_crashkit.handler.state import Action, Do, Seen, Shutdown, Stage
from sglang_crashkit.incident.exit_status import FATAL_SIGNALS, is_orderly
from sglang_crashkit.policy import Event, Mode

#: A soft exit is a shutdown when it is announced within this time.
SOFT_SECS = 1.0
#: A rank that raised tells the server itself; after this time the handler does.
EXCEPTION_GRACE_SECS = 0.5
#: The server answers SIGQUIT by saving its requests; this long is waited for it to begin.
ANSWER_SECS = 5.0
#: A server that lives on this long after an incident may have another one.
NEXT_INCIDENT_SECS = 60.0
#: What dies with the server is waited for this long; its own workers, which write their stacks then and on a busy
#: machine take seconds to give their memory back, until those that live on were killed.
LAST_EXITS_SECS, LAST_WORKERS_SECS = 0.5, 4.0

#: For what of this upstream may end a server that the kit would let live.
_ENDS_A_SERVER = frozenset({Event.DIED, Event.RAISED, Event.FAILED, Event.TIMED_OUT})
_WORKER = "tokenizer_worker"


class Triage:
    """Decides for one server.

    Args:
        root_pid: its main process.
        budget_secs: the longest that an incident may take.

    Attributes:
        shutdown: what is known of the server's end.
        stage: how far the incident at hand is; None where nothing happened yet. It stays when it is finished, until
            another may come.
    """

    def __init__(self, root_pid: int, budget_secs: float) -> None:
        self.shutdown = Shutdown()
        self.stage: Stage | None = None
        self._root_pid = root_pid
        self._budget_secs = budget_secs
        self._by_event: dict[str, Callable[[Seen, float], list[Action]]] = {
            "exited": self._on_exit,
            "exception": self._on_exception,
            "crash_dump_begun": self._on_dump_begun,
            "crash_dump_ended": self._on_dump_ended,
            "launch_failed": self._on_launch_failed,
            "startup_timeout": self._on_launch_failed,
            "child_failed": self._on_child_failed,
            "await_incident": self._on_await_incident,
            "watchdog_timeout": self._on_watchdog_timeout,
            "stacks_wanted": self._on_stacks_wanted,
            "draining": self._on_draining,
            "teardown": self._on_teardown,
            "farewell": self._on_farewell,
            "launch": self._on_launch,
            "observed": self._on_observed,
            "captured": self._on_captured,
            "told": self._on_told,
            "finished": self._on_finished,
            "tick": self._on_tick,
        }

    def take(self, seen: Seen, now: float) -> list[Action]:
        """Return what is to be done about something that happened.

        Args:
            seen: what.
            now: the time, by the monotonic clock.
        """
        return self._by_event[seen.what](seen, now)

    @property
    def is_open(self) -> bool:
        """Whether there is an incident that is not finished."""
        return self.stage is not None and not self.stage.finished

    @property
    def is_ending(self) -> bool:
        """Whether the server ends for the incident at hand, which is finished: what fails now is a consequence."""
        return self.stage is not None and self.stage.finished and not self.stage.observed

    def next_due(self, *, workers_left: bool) -> float:
        """Return when a tick has something to do.

        Args:
            workers_left: processes of the server itself live.
        """
        stage = self.stage
        if stage is None or stage.finished:
            return float("inf")
        dues = [stage.tell_at, stage.answer_by, stage.observed_until, stage.soft_until]
        return min([stage.opened + self._budget_secs, self._last_exits(workers_left), *(due for due in dues if due)])

    # -- exits

    def _on_exit(self, seen: Seen, now: float) -> list[Action]:
        shutdown, actions = self.shutdown, list[Action]()
        is_users_own = self._is_users_own(seen)
        expected = seen.pid in shutdown.expected or is_users_own
        if seen.matters and not expected:
            actions += self._pardon(seen) if self._is_pardonable(seen) else self._make_room()
        actions.append(Action(Do.MARK_EXITED))
        if seen.is_root:
            shutdown.gone_at = now
            # A user's program may end with any status; its ranks end with it.
            shutdown.ended_well = is_orderly(seen.status) or is_users_own
            actions += self._reconsider(seen)
        if self.stage is not None and not seen.is_foreign:
            return [*actions, *self._join_exit(self.stage, seen)]
        if not seen.matters or expected or self._is_clean(seen):
            # One that died before it said what it is may be a rank, or a worker of a pool that is of no account. It is
            # kept: if the start fails for it, the incident knows of what it died.
            if seen.is_unknown and not expected and seen.status.code != 0:
                return [*actions, Action(Do.KEEP_PROCESS)]
            return actions if seen.is_root else [*actions, Action(Do.FORGET_PROCESS)]
        return [*actions, *self._open_for_exit(seen, now)]

    def _join_exit(self, stage: Stage, seen: Seen) -> list[Action]:
        actions = [Action(Do.ADD_EXIT)]
        if seen.matters:
            stage.exits.append(seen)
        if not seen.is_root and seen.pid in stage.dumping:
            # It died while it saved its requests.
            stage.dumping.discard(seen.pid)
            if not stage.dumping:
                actions.append(Action(Do.FINISH))
        return actions

    def _open_for_exit(self, seen: Seen, now: float) -> list[Action]:
        hard = seen.status.signal in FATAL_SIGNALS
        # The HTTP server starts a tokenizer worker anew.
        event = policy.death(orderly=False, draining=False, replaced=seen.role == _WORKER)
        stage, actions = self._open("killed" if hard else "exited", "process_exited", seen, now)
        actions += self._apply(stage, event)
        stage.exits.append(seen)
        if policy.decide(self.shutdown.mode, event).tells:
            stage.tells_after = 0.0 if hard else SOFT_SECS
        else:
            stage.observes = True
        if not hard:
            stage.soft_until = now + SOFT_SECS
        return [*actions, Action(Do.ADD_EXIT), Action(Do.CAPTURE)]

    def _is_users_own(self, seen: Seen) -> bool:
        """Say whether the end of a user's program is its own matter: it has no server, or ended by itself."""
        if not seen.is_root or self.shutdown.mode is not Mode.LIBRARY:
            return False
        return not seen.others_serve or seen.status.signal not in FATAL_SIGNALS

    def _is_clean(self, seen: Seen) -> bool:
        status, shutdown = seen.status, self.shutdown
        if seen.is_root or shutdown.ended_well:
            # What outlives the main process, the kernel ends.
            return is_orderly(status) or (shutdown.ended_well and status.signal == "SIGKILL")
        event = policy.death(orderly=is_orderly(status), draining=shutdown.draining)
        shutdown.has_left = shutdown.has_left or (event is Event.LEFT and status.code != 0)
        return not policy.decide(shutdown.mode, event).records

    def _is_pardonable(self, seen: Seen) -> bool:
        return self.stage is not None and self.stage.pardonable and is_orderly(seen.status)

    def _pardon(self, seen: Seen) -> list[Action]:
        """A scheduler or server that ends in good order did not hang."""
        return self._discard() if seen.is_root or seen.role == "scheduler" else []

    def _reconsider(self, *more: Seen) -> list[Action]:
        """Take the exits seen for a shutdown where they are one by what is known now; then there is no incident."""
        if self.stage is None or not self.stage.may_be_shutdown:
            return []
        return self._discard() if all(self._is_clean(seen) for seen in [*self.stage.exits, *more]) else []

    # -- failures that are told

    def _on_exception(self, seen: Seen, now: float) -> list[Action]:
        actions, is_replaced = self._make_room(), seen.role == _WORKER
        stage = self.stage
        if stage is None:
            stage, more = self._open("exception", "exception", seen, now)
            actions += more
        if not self.is_ending:
            stage.soft_until = None
        event = Event.WORKER_DIED if is_replaced else Event.RAISED
        actions += [*self._apply(stage, event), Action(Do.ADD_EXCEPTION)]
        # Its dump, which follows, belongs to it.
        stage.may_end = stage.may_end or is_replaced
        if not stage.captured and not stage.finished:
            if policy.decide(self.shutdown.mode, event).tells:
                stage.tells_after = EXCEPTION_GRACE_SECS
            else:
                stage.observes = True
            actions.append(Action(Do.CAPTURE))
        return [*actions, Action(Do.ANSWER_CAPTURED)]

    def _on_dump_begun(self, seen: Seen, now: float) -> list[Action]:
        actions, is_new = self._make_room(), False
        if self._is_orderly_end():
            # SGLang takes it for a crash that its processes ended, which were asked to like itself.
            return actions
        if self.stage is None and self.shutdown.draining and seen.silent:
            is_new = True
            actions += self._open_at_end("crash_dump", seen, now)
        actions += self._join("child_failure", "crash_dump", seen, now, _dump_event(seen), captures=not is_new)
        stage = self.stage
        assert stage is not None
        stage.dump_begun, stage.observed, stage.observes = True, False, False
        stage.dumping.add(seen.pid)
        stage.tell_at = stage.tells_after = stage.answer_by = stage.soft_until = stage.observed_until = None
        return [*actions, Action(Do.NOTE, words=seen.what)]

    def _on_dump_ended(self, seen: Seen, now: float) -> list[Action]:
        if self._is_orderly_end():
            return [Action(Do.ANSWER_ORDERLY)]
        actions = self._make_room() if self.stage is None or seen.pid not in self.stage.dumping else []
        actions += [*self._join("child_failure", "crash_dump", seen, now, _dump_event(seen)), Action(Do.ADD_REQUESTS)]
        stage = self.stage
        assert stage is not None
        stage.dumping.discard(seen.pid)
        if stage.dumping:
            # Another tokenizer worker, or the server that waits for all of them, is not done.
            return [*actions, Action(Do.ANSWER_SAVED)]
        # The HTTP server starts a worker anew that ended by itself.
        stage.observed = seen.role == _WORKER
        return [*actions, Action(Do.ANSWER_WHEN_FINISHED), Action(Do.FINISH)]

    def _is_orderly_end(self) -> bool:
        return self.stage is None and self.shutdown.draining and self.shutdown.has_left

    def _on_launch_failed(self, seen: Seen, now: float) -> list[Action]:
        # Before the exits are taken in: a rank that died when it had hardly begun to run looks like a helper.
        learn = [Action(Do.LEARN_RANKS)]
        return self._on_failure("failed_start", seen, now, learn, "the server had not started to serve")

    def _on_child_failed(self, seen: Seen, now: float) -> list[Action]:
        # Unlike a tokenizer manager, which saves its requests, the sender has none to save.
        return self._on_failure("child_failure", seen, now, [], "the server's main process held no requests")

    def _on_failure(self, kind: str, seen: Seen, now: float, learn: list[Action], reason: str) -> list[Action]:
        """Take in the main process's word for a failure, which may be that of a finished incident."""
        actions, note = self._make_room(), Action(Do.NOTE, words=seen.what)
        if self.is_ending:
            return [*actions, note, Action(Do.ANSWER)]
        if self.stage is not None:
            self.stage.soft_until = None
        actions += [*learn, *self._join(kind, seen.what, seen, now, Event.FAILED), note]
        if not seen.names_ranks:
            actions.append(Action(Do.NAME_UNKNOWN))
        return [
            *actions,
            Action(Do.SET_REQUESTS, words=reason),
            Action(Do.ANSWER_WHEN_FINISHED),
            Action(Do.FINISH),
        ]

    def _on_await_incident(self, _seen: Seen, _now: float) -> list[Action]:
        # Whoever is about to end the server waits for what it would cut short.
        waits = self.stage is not None and self.is_open and not self.stage.may_be_shutdown
        return [Action(Do.ANSWER_WHEN_FINISHED if waits else Do.ANSWER)]

    # -- hangs and other matters of a server that goes on

    def _on_watchdog_timeout(self, seen: Seen, now: float) -> list[Action]:
        # A hard one ends the server, which is another matter than what a soft one saw before.
        actions = [] if seen.soft else self._make_room()
        actions += self._make_room_for_hang(seen)
        stage = self.stage
        if stage is None:
            stage, more = self._open("hang", seen.what, seen, now)
            actions += more
            if seen.soft:
                # The sender asks for the stacks once more; however long they took, they are the same.
                stage.observes = True
                stage.observe(now)
        actions += [*self._apply(stage, Event.HUNG if seen.soft else Event.TIMED_OUT), Action(Do.ADD_HANG)]
        if not stage.captured:
            actions.append(Action(Do.CAPTURE))
        return [*actions, Action(Do.ANSWER_STACKS)]

    def _on_stacks_wanted(self, seen: Seen, now: float) -> list[Action]:
        actions = [] if self.is_open else self._make_room()
        if self.stage is None:
            stage, more = self._open("snapshot", seen.what, seen, now)
            stage.observe(now)
            actions += [*more, *self._apply(stage, Event.STACKS_WANTED), Action(Do.CAPTURE)]
        return [*actions, Action(Do.ANSWER_STACKS)]

    def _on_observed(self, seen: Seen, now: float) -> list[Action]:
        """Open an incident of a server that goes on, to be captured by whoever saw it; none where one is at hand."""
        actions = self._make_room()
        if self.stage is None:
            stage, more = self._open(seen.kind, seen.trigger, seen, now)
            stage.observe(now, seen.secs)
            stage.pardonable = seen.pardonable
            actions += [*more, *self._apply(stage, seen.event)]
        return actions

    def _make_room_for_hang(self, seen: Seen) -> list[Action]:
        """Let a hang be an incident of its own, unless what it belongs to is gathered at this moment.

        Schedulers hang together, as they wait for each other; any other process hangs by itself.
        """
        stage = self.stage
        if stage is None:
            return []
        if stage.finished and not stage.observed:
            # The server was to end for it and is still there.
            return self._forget()
        together = seen.pid == stage.trigger or (seen.role == stage.trigger_role == "scheduler")
        return [] if not stage.finished and stage.kind == "hang" and together else self._make_room()

    # -- the server's end

    def _on_draining(self, seen: Seen, now: float) -> list[Action]:
        self.shutdown.draining = True
        actions = self._reconsider()
        if seen.unhealthy:
            # Seconds may pass before it says so itself, and it may be killed before.
            actions += [*self._make_room(), *self._open_at_end(UNHEALTHY, seen, now)]
        else:
            actions.append(Action(Do.LOOK_FOR_SILENCE))
        return [*actions, Action(Do.NOTE, words=seen.what)]

    def _on_teardown(self, seen: Seen, _now: float) -> list[Action]:
        self.shutdown.expected |= seen.members
        stage = self.stage
        if stage is None:
            return []
        # Somebody else may kill a server that hangs.
        is_no_incident = stage.may_be_shutdown or (stage.pardonable and seen.is_root)
        if is_no_incident and seen.tree_of == self._root_pid:
            return self._discard()
        return [Action(Do.NOTE, words=seen.what)]

    def _on_farewell(self, seen: Seen, _now: float) -> list[Action]:
        # What is ended after it is announced to nobody any more: a program's exit handlers run last in, first out.
        self.shutdown.expected |= seen.members
        return []

    def _on_launch(self, seen: Seen, _now: float) -> list[Action]:
        """Begin anew: what was announced before concerned an earlier server of the same program.

        Of those whose end was announced before, some may end still: releases before 0.5.11 do not wait for it.
        """
        shutdown = self.shutdown
        # Where no server of before is left, nothing that it was asked is under way.
        actions = [] if seen.others_serve else [Action(Do.CLOSE_JOURNALS)]
        shutdown.mode = seen.mode
        shutdown.expected &= seen.members
        shutdown.draining = shutdown.has_left = False
        return [*actions, *self._forget()] if self.stage is not None and self.stage.finished else actions

    def _open_at_end(self, trigger: str, seen: Seen, now: float) -> list[Action]:
        """Capture a server that hangs when SIGTERM comes: it ends soon, by itself or by whoever sent the signal."""
        stage = self.stage
        if stage is not None:
            captures = [] if stage.captured else [Action(Do.CAPTURE)]
            return [*self._apply(stage, Event.HUNG_AT_END), *captures]
        stage, actions = self._open("hang", trigger, seen, now)
        actions += [*self._apply(stage, Event.HUNG_AT_END), Action(Do.ADD_SILENCE)]
        return [*actions, Action(Do.CAPTURE), Action(Do.CAPTURE_AGAIN)]

    # -- what was done, and time

    def _on_captured(self, _seen: Seen, now: float) -> list[Action]:
        stage = self.stage
        if stage is None:
            return []
        stage.captured = True
        if stage.soft_until is not None:
            stage.soft_until = now + SOFT_SECS
        if stage.tells_after is not None:
            stage.tell_at, stage.tells_after = now + stage.tells_after, None
        if stage.observes:
            stage.observes = False
            stage.observe(now)
        return []

    def _on_told(self, _seen: Seen, now: float) -> list[Action]:
        if self.stage is not None:
            self.stage.answer_by = now + ANSWER_SECS
        return []

    def _on_finished(self, _seen: Seen, _now: float) -> list[Action]:
        if self.stage is not None:
            self.stage.finished = True
        return []

    def _on_tick(self, seen: Seen, now: float) -> list[Action]:
        stage, gone_at = self.stage, self.shutdown.gone_at
        if stage is None:
            return []
        if stage.finished:
            is_over = gone_at is None and now >= stage.opened + self._budget_secs + NEXT_INCIDENT_SECS
            return self._forget() if is_over else []
        actions = []
        if stage.soft_until is not None and now >= stage.soft_until:
            stage.soft_until = None
        if stage.tell_at is not None and now >= stage.tell_at and stage.soft_until is None:
            # Nobody is told while it may be a shutdown.
            stage.tell_at = None
            actions.append(Action(Do.TELL))
        if gone_at is not None:
            # Nothing more is to come but the exits of those that die with it.
            if not seen.any_left or now >= self._last_exits(seen.workers_left):
                actions.append(Action(Do.FINISH))
        elif stage.observed_until is not None and now >= stage.observed_until:
            actions += [Action(Do.SET_REQUESTS, words="the server went on"), Action(Do.FINISH)]
        elif stage.answer_by is not None and now >= stage.answer_by:
            reason = f"the server did not begin to save them within {ANSWER_SECS:g} s"
            actions += [Action(Do.SET_REQUESTS, words=reason), Action(Do.FINISH)]
        elif now >= stage.opened + self._budget_secs:
            actions += [Action(Do.NOTE, words="budget_spent"), Action(Do.FINISH)]
        return actions

    def _last_exits(self, workers_left: bool) -> float:
        """Return until when exits are waited for; forever while the server lives."""
        gone_at = self.shutdown.gone_at
        secs = LAST_WORKERS_SECS if workers_left else LAST_EXITS_SECS
        return float("inf") if gone_at is None else gone_at + secs

    # -- the incident at hand

    def _open(self, kind: str, trigger: str, seen: Seen, now: float) -> tuple[Stage, list[Action]]:
        self.stage = stage = Stage(kind, seen.pid, seen.role, now)
        return stage, [Action(Do.OPEN, kind, trigger)]

    def _join(
        self, kind: str, trigger: str, seen: Seen, now: float, event: Event, *, captures: bool = True
    ) -> list[Action]:
        """Join the incident at hand, captured; open one of `kind` where there is none.

        One that is finished is that of a server which ends for it.
        """
        stage, actions = self.stage, list[Action]()
        if stage is None:
            stage, actions = self._open(kind, trigger, seen, now)
        if not stage.finished:
            actions += self._apply(stage, event)
            if captures and not stage.captured:
                actions.append(Action(Do.CAPTURE))
        return actions

    def _apply(self, stage: Stage, event: Event) -> list[Action]:
        """Take in what `policy` says of an event of the incident at hand."""
        action = policy.decide(self.shutdown.mode, event)
        stage.may_end = stage.may_end or event in _ENDS_A_SERVER
        if event is Event.FAILED and not action.ends:
            # Whoever was told so may go on without a server, and launch another one.
            stage.observed = True
        return [Action(Do.PERMIT, captures=action.captures)]

    def _make_room(self) -> list[Action]:
        """Let what comes be an incident of its own, where the one at hand tells of a server that went on."""
        stage = self.stage
        if stage is None or not stage.observed or (stage.may_end and not stage.finished):
            return []
        return [Action(Do.WRITE), *self._forget()]

    def _forget(self) -> list[Action]:
        self.stage = None
        return [Action(Do.FORGET)]

    def _discard(self) -> list[Action]:
        """It was none."""
        self.stage = None
        return [Action(Do.DISCARD)]


def _dump_event(seen: Seen) -> Event:
    """Return which event it is that a process saves its requests: the HTTP server starts a tokenizer worker anew."""
    return Event.WORKER_DIED if seen.role == _WORKER else Event.DUMPED
