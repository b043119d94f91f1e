"""What `triage` works on: what was seen of a server, how far its incident is, and what is to be done."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field
from enum import Enum

from sglang_crashkit.kernel.pidfd import ExitStatus
from sglang_crashkit.policy import Capture, Event, Mode

#: What a server that goes on reported, such as a soft watchdog, is whole after this time.
OBSERVED_SECS = 5.0

_UNKNOWN = ExitStatus()


class ActionKind(str, Enum):
    """What is to be done; each of them concerns the incident at hand, and is nothing where there is none."""

    OPEN = "open"
    PERMIT = "permit"
    CAPTURE = "capture"
    CAPTURE_AGAIN = "capture_again"
    WRITE = "write"
    FORGET = "forget"
    DISCARD = "discard"
    FINISH = "finish"
    TELL = "tell"
    NOTE = "note"
    SET_REQUESTS = "set_requests"
    ADD_REQUESTS = "add_requests"
    ADD_EXIT = "add_exit"
    ADD_EXCEPTION = "add_exception"
    ADD_HANG = "add_hang"
    DROP_RECORD = "drop_record"
    ADD_SILENCE = "add_silence"
    LEARN_RANKS = "learn_ranks"
    NAME_UNKNOWN = "name_unknown"
    #: These concern the process whose exit was seen.
    MARK_EXITED = "mark_exited"
    KEEP_PROCESS = "keep_process"
    FORGET_PROCESS = "forget_process"
    #: These answer the message at hand.
    ANSWER = "answer"
    ANSWER_WHEN_FINISHED = "answer_when_finished"
    ANSWER_CAPTURED = "answer_captured"
    ANSWER_STACKS = "answer_stacks"
    ANSWER_SAVED = "answer_saved"
    ANSWER_ORDERLY = "answer_orderly"
    LOOK_FOR_SILENCE = "look_for_silence"
    CLOSE_JOURNALS = "close_journals"


@dataclass(frozen=True)
class Action:
    """Something to be done; the words are a trigger, the event that is noted, or why no requests were saved."""

    do: ActionKind
    kind: str = ""
    words: str = ""
    captures: Capture = Capture.NONE


@dataclass(frozen=True)
class Seen:
    """Something that happened, with all that it is judged by.

    Attributes:
        what: a message's event, or ``exited``, ``observed`` (the handler itself saw a hang or a loss), ``captured``,
            ``told`` (SIGQUIT was sent), ``finished`` or ``tick``.
        pid: whom it concerns, or who says so.
        matters: it is the server's own, so that its end concerns it.
        is_unknown: it ended before it said what it is.
        is_foreign: it is of another server that this one started.
        others_serve: processes of the server are there whose end was not announced.
        soft: the watchdog ends nothing; the exception only ends a process, such as ``SystemExit``.
        silent: a scheduler gave no sign for a while.
        names_ranks: the message names ranks that failed.
        tree_of: the process whose tree is ended.
        members: processes whose end is announced, or, of a launch, those that are there.
        kind, trigger, event: of the incident that is to be opened for what was observed, whole after `secs`.
        withdrawable: it is no incident where the server goes on or ends in good order.
        workers_left: its own processes live; `any_left`: any does.
    """

    what: str
    pid: int = 0
    role: str = ""
    status: ExitStatus = _UNKNOWN
    matters: bool = True
    is_unknown: bool = False
    is_foreign: bool = False
    others_serve: bool = True
    soft: bool = False
    unhealthy: bool = False
    silent: bool = False
    names_ranks: bool = False
    tree_of: int = 0
    members: Set[int] = frozenset()
    mode: Mode = Mode.LIBRARY
    kind: str = ""
    trigger: str = ""
    event: Event = Event.HUNG
    secs: float = OBSERVED_SECS
    withdrawable: bool = False
    workers_left: bool = True
    any_left: bool = True


@dataclass
class Shutdown:
    """What is known of the server's end.

    Attributes:
        mode: until the program that launched it says so, the one in which nothing is ended.
        expected: the processes whose end was announced.
        draining: it was asked to end and finishes its requests; `has_left`: a process of it ended for that, too.
        ended_well: its main process ended with status 0.
        gone_at: when the end of its main process was noticed; None while it lives.
    """

    mode: Mode = Mode.LIBRARY
    expected: set[int] = field(default_factory=set)
    draining: bool = False
    has_left: bool = False
    ended_well: bool = False
    gone_at: float | None = None


@dataclass
class Stage:
    """How far the incident at hand is.

    Attributes:
        first: what opened it.
        captured_at: when what the living did was captured.
        finished: it is written; what is added still is written anew.
        observed: the server goes on, so that what comes next is another incident; whole at `observed_until`.
        may_end: upstream may end it for what happened, which would then belong to the same incident.
        withdrawable: the server was asked to end before, and it is no incident where it goes on or ends in good order.
        soft_until: nothing but exits was seen that an announcement would explain, which may come until then.
        tell_secs: so long after the capture the server is sent SIGQUIT; None where it is not, or was.
        answer_by: when the server, which was told, should have begun to save its requests.
        dumping: who saves its requests; `dump_begun`: somebody did.
        exits: how those ended that count.
    """

    kind: str
    first: Seen
    opened: float
    captured_at: float | None = None
    finished: bool = False
    observed: bool = False
    observed_until: float | None = None
    may_end: bool = False
    withdrawable: bool = False
    soft_until: float | None = None
    tell_secs: float | None = None
    answer_by: float | None = None
    dump_begun: bool = False
    dumping: set[int] = field(default_factory=set)
    exits: list[Seen] = field(default_factory=list)

    @property
    def may_be_shutdown(self) -> bool:
        """Whether nothing but exits that an announcement would explain was seen."""
        return self.soft_until is not None and not self.dump_begun

    @property
    def tell_at(self) -> float | None:
        """When the server is sent SIGQUIT; None where it is not, or not before the capture."""
        return None if self.tell_secs is None or self.captured_at is None else self.captured_at + self.tell_secs
