"""End this process, a server program, after a crash, with a status that names the cause; see `incident.exit_status`.

A user's program ends as upstream does it, after its incident is complete; see `policy`. All waits of one exit together
take at most ``SGLANG_CRASHKIT_EXIT_SECS``.

Upstream ends its server with SIGKILL to itself, which process 1 of a container ignores. Here the process calls
``_exit``, at a deadline even if something hangs: a thread that takes no lock calls it. If Python itself hangs, the
timer of `faulthandler`, which needs no interpreter, ends the process with status 1.
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
#: Time for a process that ends by an uncaught exception to finish, in seconds.
_FINISH_SECS = 30.0


@dataclass
class State:
    """What this process knows about its server, and about the server's crash."""

    mode: Mode | None = None  # the mode of this process; None if it launched no server
    is_program: bool = False  # this process runs SGLang's own server launcher, not a user's program
    started: bool = False  # the ranks have been ready once: from then on no crash is a failed start
    #: This process waits for the ranks of a server, its first or a later one; that wait handles deaths of the ranks.
    launching: bool = False
    draining: bool = False  # the server was asked to end; its exit is no crash
    #: Called with the ``ServerArgs`` when a program that launches its ranks without an ``Engine`` configures its
    #: logger; None in any other process.
    launch: Callable[[Any], object] | None = None
    #: Looks for a crash that is not noted yet, notes it, and returns whether there was a crash; called before this
    #: process ends its children or itself.
    has_failed: Callable[[], bool] | None = None
    status: int | None = None  # the exit status to use; None as long as there is no crash
    deadline: float = math.inf  # the process ends no later than this, by the monotonic clock
    latest: float = math.inf  # the deadline is never moved beyond this, by the monotonic clock
    null: int = -1  # a descriptor of the null device; -1 until it is needed


state = State()


def note_launch(server_args: Any) -> Mode:
    """Note that this process launches a server; return its mode, which children read from ``MODE_VARIABLE``."""
    state.launching, state.draining = True, False
    state.mode = policy.mode_of(server_args, is_program=state.is_program)
    os.environ[MODE_VARIABLE] = state.mode.value
    return state.mode


def ends_with_the_server() -> bool:
    """Return whether a crash of this process's server ends this process; see `policy`."""
    mode = state.mode.value if state.mode is not None else os.environ.get(MODE_VARIABLE)
    return mode in tuple(Mode) and policy.decide(Mode(mode), Event.DIED).ends


def note_started() -> None:
    """Note that the ranks are ready."""
    state.started, state.launching = True, False


def begin(status: int, within_secs: float) -> None:
    """Note a crash. If it ends this process, the process exits `within_secs` from now, with `status` unless updated."""
    if not ends_with_the_server():
        return
    is_first = state.status is None
    if is_first:
        state.latest = time.monotonic() + Settings.from_environ().exit_secs
        state.status = status if state.started else while_starting(status)
    allow(within_secs)
    if is_first:
        # Not threading.Thread: its start waits for a lock, which the code that a signal interrupted may hold. If the
        # system gives no thread, the timer of `faulthandler` alone ends the process.
        never_raises(start_new_thread)(_watch_the_time, ())


def has_begun() -> bool:
    """Return whether there was a crash that ends this process."""
    return state.status is not None


def allow(seconds: float) -> None:
    """Move the deadline to `seconds` from now, but not beyond ``state.latest``; without a crash, do nothing."""
    if state.status is not None:
        state.deadline = min(time.monotonic() + seconds, state.latest)
        _start_timer(state.deadline - time.monotonic() + TIMER_SECS)


def await_evidence(seconds: float) -> None:
    """Move the deadline so that the crash handler has the `seconds` more that it asked for."""
    allow(seconds + Settings.from_environ().end_secs)


def report(event: str, **fields: Any) -> dict[str, Any] | None:
    """Report a crash to the crash handler, wait until its incident is complete, and take the exit status from it.

    Returns the crash handler's answer, None without one. Waits at most ``SGLANG_CRASHKIT_BUDGET_SECS``, or longer if
    the handler asks for more time.
    """
    answer = request(event, Settings.from_environ().budget_secs, on_wait=await_evidence, **fields)
    learn(answer)
    log_incident(answer)
    return answer


def learn(answer: dict[str, Any] | None) -> None:
    """Take the exit status from the crash handler's `answer`, if it contains one."""
    if state.status is None:
        return
    status = _status_in(answer)
    if answer and answer.get("orderly") is True:
        # It was no crash: a process that was asked to end has ended, and upstream goes on to end this process.
        state.status = None
        faulthandler.cancel_dump_traceback_later()
    elif status is not None:
        state.status = status if state.started else while_starting(status)


def is_due(*, whole: bool) -> bool:
    """Return whether this process, about to end itself (`whole`) or its children, ends because of a crash.

    If this process knows of no crash, it asks the crash handler and waits for the incident, at most
    ``SGLANG_CRASHKIT_BUDGET_SECS``.
    """
    settings = Settings.from_environ()
    if not settings.enabled:
        return False
    # Called after a known crash too: the thread that noted it may still be waiting for its incident.
    if state.has_failed is not None and never_raises(state.has_failed)():
        return True
    if state.status is not None:
        return True
    if not whole or state.draining:
        return False
    answer = request("await_incident", settings.budget_secs, on_wait=await_evidence)
    if not ends_with_the_server():
        # Upstream ends this process, and the incident is complete.
        return False
    status = _status_in(answer)
    # Process 1 ignores its own SIGKILL, and would end with status 0.
    if status is not None or os.getpid() == 1:
        begin(ServerExit.CRASHED if status is None else status, _FINISH_SECS)
    return state.status is not None


def end(kill_children: Callable[[], object]) -> NoReturn:
    """End the children, then this process. An exception of `kill_children` is logged; the deadline bounds its time."""
    try:
        if not Settings.from_environ().keeps_exit_status:
            logger.error("crash kit: the server ends with exit status %d", _status())
        kill_children()
    except Exception:
        logger.exception("crash kit: the server's processes could not be ended")
    finally:
        _leave()


def end_by_status(error: BaseException, answer: dict[str, Any] | None) -> None:
    """If nothing catches `error`, exit with the status in the crash handler's `answer`, else that of a failed start."""
    if not ends_with_the_server() or Settings.from_environ().keeps_exit_status:
        return
    status, report = while_starting(_status_in(answer)), sys.excepthook

    def hook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        report(kind, value, trace)
        if any(link is error for link in chain_of(value)):
            begin(status, _FINISH_SECS)
            # The interpreter uses it as exit status, and shuts down as usual.
            raise SystemExit(status)

    sys.excepthook = hook


def chain_of(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception and, transitively, its contexts and causes, each once."""
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
        # Not standard error: a write to a full pipe that nothing reads would block forever.
        state.null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    faulthandler.dump_traceback_later(seconds, exit=True, file=state.null)


def _watch_the_time() -> None:
    # No logging and no lock: the thread that holds the lock may be the one that hangs.
    while (left := state.deadline - time.monotonic()) > 0:
        time.sleep(min(left, 1.0))
        if state.status is None:
            return
    try:
        # If this is process 1 of a container, the crash handler is among its descendants.
        signals.kill_below(os.getpid(), {handler_pid() or 0})
    finally:
        _leave()


def _status() -> int:
    return ServerExit.CRASHED if state.status is None else state.status


def _leave() -> NoReturn:
    status = _status()
    if Settings.from_environ().keeps_exit_status:
        # As upstream does. Process 1 of a container ignores the signal, and ends with status 0.
        signals.kill_itself()
        status = 0
    os._exit(status)
