"""End this process, a server program, after a crash, with a status that tells of it; see `incident.exit_status`.

A user's program ends as upstream has it, once its incident is whole; see `policy`. All that one end waits for is over
within ``SGLANG_CRASHKIT_EXIT_SECS``.

Upstream ends its server by SIGKILL of itself, to which process 1 of a container is deaf. Here the process ends by
``_exit``, at a deadline whatever hangs: a thread that takes no lock sees to it, and where Python itself stands still
the timer of `faulthandler`, which needs no interpreter, ends it with 1.
"""

from __future__ import annotations

import faulthandler
import logging
import math
import os
import sys
import time
from _thread import start_new_thread
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NoReturn

from sglang_crashkit import policy
from sglang_crashkit.incident.exit_status import ServerExit, while_starting
from sglang_crashkit.kernel import signals
from sglang_crashkit.policy import Event, Mode
from sglang_crashkit.settings import MODE_VARIABLE, Settings
from sglang_crashkit.srt.hooks import handler_pid, log_incident, never_raises, request

logger = logging.getLogger(__name__)

#: The timer of `faulthandler` ends the process this long after the deadline, in seconds.
TIMER_SECS = 10.0
#: A process that ends by an uncaught exception is given this long to finish, in seconds.
_FINISH_SECS = 30.0


@dataclass
class State:
    """What is known of this process's server, and of its crash."""

    mode: Mode | None = None  # what this process is, where it launched a server
    is_program: bool = False  # SGLang's own launcher of servers runs in this process, and not a library's user
    started: bool = False  # the ranks were ready at some time: from then on no crash is a failed start
    #: It waits for the ranks of a server, the first one or another; deaths are told to those who wait.
    launching: bool = False
    draining: bool = False  # the server was asked to end, and may do so without a crash
    #: Called with the ``ServerArgs`` where a program configures its logger that launches its ranks without an
    #: ``Engine``; None in any other process.
    launch: Callable[[Any], object] | None = None
    #: Looks whether there was a crash that is not noted yet, and notes it; asked before this process ends its children
    #: or itself.
    has_failed: Callable[[], bool] | None = None
    status: int | None = None  # what this process ends with; None while there was no crash
    deadline: float = math.inf  # when it ends at the latest, by the monotonic clock
    latest: float = math.inf  # beyond this the deadline does not move
    null: int = -1  # a descriptor of the null device; -1 before it is needed


state = State()


def note_launch(server_args: Any) -> Mode:
    """Note that this process launches a server with these ``ServerArgs``; return what it is, and tell its children."""
    state.launching, state.draining = True, False
    state.mode = policy.mode_of(server_args, is_program=state.is_program)
    os.environ[MODE_VARIABLE] = state.mode.value
    return state.mode


def ends_with_the_server() -> bool:
    """Say whether a crash of the server that this process is of ends this process; see `policy`."""
    mode = state.mode.value if state.mode is not None else os.environ.get(MODE_VARIABLE)
    return mode in tuple(Mode) and policy.decide(Mode(mode), Event.DIED).ends


def note_started() -> None:
    """Note that the ranks are ready."""
    state.started, state.launching = True, False


def begin(status: int, within_secs: float) -> None:
    """Note a crash: where it ends this process, that ends by itself `within_secs` from now, as yet with `status`."""
    if not ends_with_the_server():
        return
    is_first = state.status is None
    if is_first:
        state.latest = time.monotonic() + Settings.from_environ().exit_secs
        state.status = status if state.started else while_starting(status)
    allow(within_secs)
    if is_first:
        # Not threading.Thread: its start waits for a lock that the code which a signal interrupted may hold. Where the
        # system gives no thread, the timer of `faulthandler` sees to the end alone.
        never_raises(start_new_thread)(_watch_the_time, ())


def has_begun() -> bool:
    """Say whether there was a crash that ends this process."""
    return state.status is not None


def allow(seconds: float) -> None:
    """Move the deadline to `seconds` from now, within the cap of all waits; nothing without a crash."""
    if state.status is not None:
        state.deadline = min(time.monotonic() + seconds, state.latest)
        _start_timer(state.deadline - time.monotonic() + TIMER_SECS)


def await_evidence(seconds: float) -> None:
    """Let the crash handler have `seconds` more, which it asked for."""
    allow(seconds + Settings.from_environ().end_secs)


def report(event: str, **fields: Any) -> None:
    """Tell the crash handler of a crash, wait until its incident is whole, and take the status from it.

    Waits at most ``SGLANG_CRASHKIT_BUDGET_SECS``, and as much longer as the handler asks for.
    """
    answer = request(event, Settings.from_environ().budget_secs, on_wait=await_evidence, **fields)
    learn(answer)
    log_incident(answer)


def learn(answer: dict[str, Any] | None) -> None:
    """Take the status from what the crash handler answered, where it knows one."""
    if state.status is None:
        return
    status = _status_in(answer)
    if answer and answer.get("orderly") is True:
        # It was no crash: what was asked to end has ended, and upstream goes on to end this process.
        state.status = None
        faulthandler.cancel_dump_traceback_later()
    elif status is not None:
        state.status = status if state.started else while_starting(status)


def is_due(*, whole: bool) -> bool:
    """Say whether this process, about to end itself (`whole`) or its children, ends because of a crash.

    Asks the crash handler where this process knows of no crash, and waits for its incident, at most
    ``SGLANG_CRASHKIT_BUDGET_SECS``.
    """
    settings = Settings.from_environ()
    if not settings.enabled:
        return False
    # Asked of a known crash too: the thread that noted it may wait for its incident still.
    if state.has_failed is not None and never_raises(state.has_failed)():
        return True
    if state.status is not None:
        return True
    if not whole or state.draining:
        return False
    answer = request("await_incident", settings.budget_secs, on_wait=await_evidence)
    if not ends_with_the_server():
        # Upstream ends it, now that its incident is whole.
        return False
    status = _status_in(answer)
    # Process 1 is deaf to its own SIGKILL, and would end with 0.
    if status is not None or os.getpid() == 1:
        begin(ServerExit.CRASHED if status is None else status, _FINISH_SECS)
    return state.status is not None


def end(kill_children: Callable[[], object]) -> NoReturn:
    """End this process, after its children; what `kill_children` raises is in the log, and the deadline bounds it."""
    try:
        if not Settings.from_environ().keeps_exit_status:
            logger.error("crash kit: the server ends with exit status %d", _status())
        kill_children()
    except Exception:
        logger.exception("crash kit: the server's processes could not be ended")
    finally:
        _leave()


def end_by_status(error: BaseException, answer: dict[str, Any] | None) -> None:
    """Let `error`, if nothing catches it, end this process as a failed start, or as the crash handler answered."""
    if not ends_with_the_server() or Settings.from_environ().keeps_exit_status:
        return
    status, report = while_starting(_status_in(answer)), sys.excepthook

    def hook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        report(kind, value, trace)
        if any(link is error for link in chain_of(value)):
            begin(status, _FINISH_SECS)
            # The interpreter takes it for the status, and finishes as it would have.
            raise SystemExit(status)

    sys.excepthook = hook


def chain_of(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception, and those that led to it."""
    seen, rest = set[int](), [error]
    while rest:
        link = rest.pop()
        if link is not None and id(link) not in seen:
            seen.add(id(link))
            yield link
            rest += [link.__context__, link.__cause__]


def _status_in(answer: dict[str, Any] | None) -> int | None:
    status = answer.get("exit_status") if answer else None
    return status if isinstance(status, int) and 0 < status < 256 else None


@never_raises
def _start_timer(seconds: float) -> None:
    if state.null < 0:
        # Not the standard error: a pipe without a reader would hold it up for ever.
        state.null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    faulthandler.dump_traceback_later(seconds, exit=True, file=state.null)


def _watch_the_time() -> None:
    # No logging, no lock: the process that holds them may be what hangs.
    while (left := state.deadline - time.monotonic()) > 0:
        time.sleep(min(left, 1.0))
        if state.status is None:
            return
    try:
        # As process 1 of a container this is above the crash handler, too.
        signals.kill_below(os.getpid(), {handler_pid() or 0})
    finally:
        _leave()


def _status() -> int:
    return ServerExit.CRASHED if state.status is None else state.status


def _leave() -> NoReturn:
    status = _status()
    if Settings.from_environ().keeps_exit_status:
        # As upstream does; process 1 of a container is deaf to it, and ends with 0 there.
        signals.kill_itself()
        status = 0
    os._exit(status)
