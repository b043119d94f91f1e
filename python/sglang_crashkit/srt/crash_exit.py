"""End this process after a crash, with a status that tells of it (see `sglang_crashkit.incident.exit_status`).

That is done to a server program only; see `sglang_crashkit.policy`. A user's program ends as upstream has it, once
its incident is whole. All that one end waits for is over within ``SGLANG_CRASHKIT_EXIT_SECS``.

Upstream ends its server by SIGKILL of itself, to which process 1 of a container is deaf. Here the process ends by
``_exit``; and it does so by a deadline, whatever hangs in the handling of the crash: a thread that takes no lock sees
to it, and where Python itself stands still the timer of `faulthandler`, which needs no interpreter, ends it with 1.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import time
from _thread import start_new_thread
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, NoReturn

from sglang_crashkit import policy
from sglang_crashkit.incident.exit_status import ServerExit, while_starting
from sglang_crashkit.kernel import signals
from sglang_crashkit.policy import Event, Mode
from sglang_crashkit.settings import MODE_VARIABLE, Settings
from sglang_crashkit.srt.hooks import handler_pid, never_raises, request

logger = logging.getLogger(__name__)

#: Python's last words are given this long after the deadline, in seconds.
_LAST_RESORT_SECS = 10.0
#: A process that ends by an uncaught exception is given this long to finish, in seconds.
_FINISH_SECS = 30.0


class _Crash:
    """What is known of the crash of this process's server.

    Attributes:
        mode: what this process is, where it launched a server; None where it did not.
        is_program: SGLang's own launcher of servers runs in this process, and not a library's user.
        started: the ranks were ready at some time.
        launching: it waits for the ranks of a server, the first one or another.
        draining: the server was asked to end.
        has_failed: looks whether there was a crash that nobody noted yet.
        status: what this process ends with; None while there was no crash.
        deadline: when it ends at the latest, by the monotonic clock.
        latest: beyond this the deadline does not move.
        nowhere: a descriptor that takes all that is written; -1 before it is needed.
    """

    def __init__(self) -> None:
        self.mode: Mode | None = None
        self.is_program = False
        self.started = False
        self.launching = False
        self.draining = False
        self.has_failed: Callable[[], bool] | None = None
        self.status: int | None = None
        self.deadline = self.latest = float("inf")
        self.nowhere = -1


_crash = _Crash()


def note_server_program() -> None:
    """Note that SGLang's own launcher of servers runs in this process, and not a library's user."""
    _crash.is_program = True


def note_launch(server_args: Any) -> Mode:
    """Note that this process launches a server, and let the processes that it starts know what it is.

    Args:
        server_args: SGLang's ``ServerArgs``.

    Returns:
        What this process is.
    """
    _crash.launching, _crash.draining = True, False
    _crash.mode = policy.mode_of(server_args, is_program=_crash.is_program)
    os.environ[MODE_VARIABLE] = _crash.mode.value
    return _crash.mode


def ends_with_the_server() -> bool:
    """Say whether a crash of the server that this process is of ends this process; see `policy`."""
    mode = _crash.mode.value if _crash.mode is not None else os.environ.get(MODE_VARIABLE)
    return mode in tuple(Mode) and policy.decide(Mode(mode), Event.DIED).ends


def is_server_program() -> bool:
    """Say whether SGLang's own launcher of servers runs in this process, and not a library's user."""
    return _crash.is_program


def note_started() -> None:
    """Note that the ranks are ready: from now on no crash is a failed start."""
    _crash.started, _crash.launching = True, False


def has_started() -> bool:
    """Say whether the ranks were ready at some time."""
    return _crash.started


def is_serving() -> bool:
    """Say whether the ranks are ready, and no others are waited for, whose deaths are told to whoever waits."""
    return _crash.started and not _crash.launching


def note_draining() -> None:
    """Note that the server was asked to end: from now on it may end without a crash."""
    _crash.draining = True


def is_draining() -> bool:
    """Say whether the server was asked to end."""
    return _crash.draining


def ask_before_the_end(has_failed: Callable[[], bool]) -> None:
    """Have `has_failed` asked before this process ends its children or itself; it notes the crash that it finds."""
    _crash.has_failed = has_failed


def begin(status: int, within_secs: float) -> None:
    """Note a crash; this process ends by itself `within_secs` from now at the latest.

    Does nothing where no crash ends this process; see `ends_with_the_server`.

    Args:
        status: what it ends with as long as nothing better is known.
        within_secs: the longest that the handling of the crash may take, in seconds.
    """
    if not ends_with_the_server():
        return
    is_first = _crash.status is None
    if _crash.status is None:
        _crash.latest = time.monotonic() + Settings.from_environ().exit_secs
        _crash.status = status if _crash.started else while_starting(status)
    allow(within_secs)
    if is_first:
        # Not threading.Thread: its start waits for a lock that the code which a signal interrupted may hold.
        start_new_thread(_watch_the_time, ())


def withdraw() -> None:
    """Note that it was no crash: what was asked to end has ended, and upstream goes on to end this process."""
    if _crash.status is not None:
        _crash.status = None
        faulthandler.cancel_dump_traceback_later()


def has_begun() -> bool:
    """Say whether there was a crash that ends this process."""
    return _crash.status is not None


def allow(seconds: float) -> None:
    """Move the deadline to `seconds` from now, within the cap of all waits; nothing without a crash."""
    if _crash.status is not None:
        _crash.deadline = min(time.monotonic() + seconds, _crash.latest)
        _arm_last_resort(_crash.deadline - time.monotonic() + _LAST_RESORT_SECS)


def await_evidence(seconds: float) -> None:
    """Let the crash handler have `seconds` more; to be given to `request` as ``on_wait``."""
    allow(seconds + Settings.from_environ().end_secs)


def learn(answer: dict[str, Any] | None) -> None:
    """Take the status from what the crash handler answered, where it knows one."""
    if answer and answer.get("orderly") is True:
        withdraw()
        return
    status = _status_in(answer)
    if _crash.status is not None and status is not None:
        _crash.status = status if _crash.started else while_starting(status)


def is_due(*, whole: bool) -> bool:
    """Say whether this process, about to be ended by itself, ends because of a crash.

    Asks the crash handler where nobody here knows of one, and waits for its incident, at most
    ``SGLANG_CRASHKIT_BUDGET_SECS``.

    Args:
        whole: this process ends itself, and not its children alone.
    """
    settings = Settings.from_environ()
    if not settings.enabled:
        return False
    # Asked of a known crash too: the thread that noted it may wait for its incident still.
    if _crash.has_failed is not None and never_raises(_crash.has_failed)():
        return True
    if _crash.status is not None:
        return True
    if not whole or _crash.draining:
        return False
    answer = request("await_incident", settings.budget_secs, on_wait=await_evidence)
    if not ends_with_the_server():
        # Upstream ends it, now that its incident is whole.
        return False
    status = _status_in(answer)
    # Process 1 is deaf to its own SIGKILL, and would end with 0.
    if status is not None or os.getpid() == 1:
        begin(ServerExit.CRASHED if status is None else status, _FINISH_SECS)
    return _crash.status is not None


def end(kill_children: Callable[[], object]) -> NoReturn:
    """End this process, after its children.

    Args:
        kill_children: ends them; what it raises is in the log, and how long it takes is bounded by the deadline.
    """
    status = ServerExit.CRASHED if _crash.status is None else _crash.status
    try:
        if not Settings.from_environ().keeps_exit_status:
            logger.error("crash kit: the server ends with exit status %d", status)
        kill_children()
    except Exception:
        logger.exception("crash kit: the server's processes could not be ended")
    finally:
        _leave(status)


def end_by_status(error: BaseException, answer: dict[str, Any] | None) -> None:
    """Let `error`, if nobody catches it, end this process with the status of a failed start instead of 1.

    Args:
        error: about to be raised.
        answer: what the crash handler answered.
    """
    if not ends_with_the_server() or Settings.from_environ().keeps_exit_status:
        return
    status, report = while_starting(_status_in(answer)), sys.excepthook

    def hook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        report(kind, value, trace)
        if any(link is error for link in _chain(value)):
            begin(status, _FINISH_SECS)
            # The interpreter takes it for the status, and finishes as it would have.
            raise SystemExit(status)

    sys.excepthook = hook


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _status_in(answer: dict[str, Any] | None) -> int | None:
    status = answer.get("exit_status") if answer else None
    return status if isinstance(status, int) and 0 < status < 256 else None


@never_raises
def _arm_last_resort(seconds: float) -> None:
    if _crash.nowhere < 0:
        # Not the standard error: a pipe that nobody reads would hold it up for ever.
        _crash.nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    faulthandler.dump_traceback_later(seconds, exit=True, file=_crash.nowhere)


def _watch_the_time() -> None:
    # No logging, no lock: whoever holds them may be what hangs.
    while (left := _crash.deadline - time.monotonic()) > 0:
        time.sleep(min(left, 1.0))
        if _crash.status is None:
            return
    try:
        # As process 1 of a container this is above the crash handler, too.
        signals.kill_below(os.getpid(), {handler_pid() or 0})
    finally:
        _leave(ServerExit.CRASHED if _crash.status is None else _crash.status)


def _leave(status: int) -> NoReturn:
    if Settings.from_environ().keeps_exit_status:
        # As upstream does; process 1 of a container is deaf to it, and ends with 0 there.
        signals.kill_itself()
        status = 0
    os._exit(status)
