"""What is done about an event: whether the main process is told or ended, and how the living are looked at.

This is the one place that decides it; `srt.crash_exit` ends the main process, `srt.utils.common` its children.

The kit observes and upstream decides. Where upstream would have let a process live, the kit does not signal it, and
looks at it only by means that cannot hurt it. A server program is different where one of its own processes died or
raised an exception, or its main process gives up: upstream means to end it, and forgets to in some releases; it is
ended with a telling status.

``docs/policy.md`` holds the table for readers; its test compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any


class Mode(str, Enum):
    """What the program is that launched the server."""

    #: SGLang's own HTTP or gRPC launcher.
    SERVER = "server"
    #: A user's program: ``Engine``, a Ray actor, an RL trainer, a notebook.
    LIBRARY = "library"
    #: It serves on without a rank: elastic expert parallelism, or upstream's fault tolerance.
    ELASTIC = "elastic"


class Event(str, Enum):
    """What happened to a server."""

    #: A process of it ended unasked.
    DIED = "died"
    #: A process of it ended as one does that is asked to, while the server was asked to end.
    LEFT = "left"
    #: A process of it raised an exception that ends it.
    RAISED = "raised"
    #: A tokenizer worker ended, which the HTTP server starts anew.
    WORKER_DIED = "worker_died"
    #: The main process says that the ranks will not get ready, or that a child failed; it ends by itself.
    FAILED = "failed"
    #: The main process saves its requests because it is about to end.
    DUMPED = "dumped"
    #: A process of it raised an exception that SGLang caught, and serves on.
    CAUGHT = "caught"
    #: A watchdog of upstream's timed out that ends the server.
    TIMED_OUT = "timed_out"
    #: A process makes no progress, or a watchdog that ends nothing says so.
    HUNG = "hung"
    #: A thread of one of its processes ended by an exception, and the process goes on.
    THREAD_DIED = "thread_died"
    #: Another server of a prefill and decode pair is gone.
    PEER_LOST = "peer_lost"
    #: Somebody asks for the stacks.
    STACKS_WANTED = "stacks_wanted"
    #: It was asked to end while its health check failed, or one of its schedulers was silent.
    HUNG_AT_END = "hung_at_end"


class Capture(str, Enum):
    """By which means the living processes are looked at."""

    #: Not at all.
    NONE = "none"
    #: By those that cannot hurt: ``/proc``, a py-spy that does not stop its target, the process's own thread.
    OBSERVE = "observe"
    #: Also by those that may: faulthandler on a signal, GPU cores on demand, native stacks.
    FULL = "full"


@dataclass(frozen=True)
class Decision:
    """What is done about an event; `handler.triage` says after how long."""

    records: bool = True  # an incident is written
    sends_sigquit: bool = False  # to the main process, as SGLang's own processes do that failed
    ends: bool = False  # the main process ends with a status that tells the cause, by a deadline
    captures: Capture = Capture.OBSERVE  # by which means the living processes are looked at


_OBSERVED = Decision()
#: What happens to a server program; a library's and an elastic server's are only observed, unless it ends itself.
_OF_SERVER = {
    Event.DIED: Decision(sends_sigquit=True, ends=True, captures=Capture.FULL),
    Event.RAISED: Decision(sends_sigquit=True, ends=True, captures=Capture.FULL),
    Event.FAILED: Decision(ends=True, captures=Capture.FULL),
    Event.DUMPED: Decision(ends=True, captures=Capture.FULL),
    Event.TIMED_OUT: Decision(captures=Capture.FULL),
    Event.HUNG_AT_END: Decision(captures=Capture.FULL),
}
#: In every mode, where the table above has nothing: the main process ends by upstream's own decision, or stacks would
#: tell nothing.
_OF_ALL = {
    Event.DUMPED: Decision(captures=Capture.FULL),
    Event.PEER_LOST: Decision(captures=Capture.NONE),
    Event.LEFT: Decision(records=False, captures=Capture.NONE),
}


def decide(mode: Mode, event: Event) -> Decision:
    """Return what is done about an event."""
    return (_OF_SERVER if mode is Mode.SERVER else {}).get(event) or _OF_ALL.get(event, _OBSERVED)


def mode_of(server_args: Any, *, is_program: bool) -> Mode:
    """Return what the program is that launches a server; `is_program` says that SGLang's own launcher runs it."""
    # Upstream's coming arguments are not named yet; none of today's is called so.
    names = {*dir(type(server_args)), *getattr(server_args, "__dict__", {})}
    values = [getattr(server_args, name, None) for name in names if "fault_toleran" in name]
    # On the command line "none" stands for none.
    backend = getattr(server_args, "elastic_ep_backend", None)
    if backend not in (None, "", "none") or any(value not in (None, False, "", 0) for value in values):
        return Mode.ELASTIC
    return Mode.SERVER if is_program else Mode.LIBRARY
