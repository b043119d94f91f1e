"""What every hook shares: it never raises, knows how to reach the crash handler, and writes to the server's log."""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import select
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeAlias, TypeVar

from sglang_crashkit import protocol
from sglang_crashkit.errors import CrashkitError
from sglang_crashkit.kernel.stack_hooks import read_handler_pid
from sglang_crashkit.settings import SOCKET_VARIABLE, Settings, published
from sglang_crashkit.visible import visible

logger = logging.getLogger(__name__)

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
#: A class with an attribute ``fd`` and a method ``close``.
Memory = TypeVar("Memory", bound=Any)
#: A function of SGLang's, whose types the kit does not know.
Function: TypeAlias = Callable[..., Any]

#: The longest that a process waits for the crash handler to capture the other processes' stacks, in seconds.
CAPTURE_WAIT_SECS = 2.0
_STDERR = 2
_SAY_SECS = 1.0
_MAX_LINE_BYTES = 4000


def never_raises(hook: Callable[Parameters, Result]) -> Callable[Parameters, Result | None]:
    """Log the exception that a hook raises and return None instead: the server must go on."""

    @functools.wraps(hook)
    def guarded(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result | None:
        try:
            return hook(*args, **kwargs)
        except Exception:  # noqa: BLE001 - whatever it is, upstream goes on
            note_failure(hook)
            return None

    return guarded


def note_failure(hook: Function) -> None:
    """Log the exception being handled, which `hook` raised. An error of a log filter or log handler is suppressed."""
    with contextlib.suppress(Exception):
        logger.warning("crash kit: %s failed", hook.__qualname__, exc_info=True)


_gone: set[str] = set()


def note_gone(error: AttributeError, instead: Result) -> Result:
    """Return `instead` for an attribute that this release's scheduler does not have, and log each such name once."""
    name = error.name or str(error)
    if name not in _gone:
        _gone.add(name)
        logger.warning("crash kit: the scheduler of this SGLang has no %s, and the kit does without it", name)
    return instead


class Lately:
    """Limits reports: each is made once in `secs` seconds, and at most `most` different ones are. Thread-safe."""

    def __init__(self, secs: float, most: int) -> None:
        self._secs, self._most = secs, most
        self._quiet_until: dict[object, float] = {}
        self._lock = threading.Lock()

    def is_news(self, what: object) -> bool:
        """Return whether to report `what`; if so, it counts as reported."""
        now = time.monotonic()
        with self._lock:
            self._quiet_until = {each: until for each, until in self._quiet_until.items() if now < until}
            if what in self._quiet_until or len(self._quiet_until) >= self._most:
                return False
            self._quiet_until[what] = now + self._secs
        return True


def in_place_of(function: Function, action: Function, *, meant: type[Exception] | tuple[()] = ()) -> Function:
    """Wrap `function`: ``action(function, ...)`` runs in its place, with the same arguments.

    If `action` fails before it calls `function`, the wrapper calls `function`. If it fails after
    the call returned, the wrapper returns the call's result. Where the call itself failed, what `action` raises is
    raised, and errors of the types in `meant` always are.
    """

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        results: list[Any] = []
        is_called = False

        def call(*given: Any, **named: Any) -> Any:
            nonlocal is_called
            is_called = True
            results.append(function(*given, **named))
            return results[-1]

        try:
            return action(call, *args, **kwargs)
        except meant:
            raise
        except Exception:
            if is_called and not results:
                raise
            note_failure(action)
        return results[-1] if results else function(*args, **kwargs)

    return wrapper


def before(function: Function, action: Callable[..., object]) -> Function:
    """Wrap `function`: `action` is called first, with the same arguments, and never raises."""
    guarded = never_raises(action)

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        guarded(*args, **kwargs)
        return function(*args, **kwargs)

    return wrapper


def after(function: Function, action: Callable[..., object]) -> Function:
    """Wrap `function`: `action` is called with its result and the same arguments once it returns, and never raises."""
    guarded = never_raises(action)

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        guarded(result, *args, **kwargs)
        return result

    return wrapper


def after_construction(kind: type, action: Callable[[Any], object]) -> None:
    """Extend a class in place: `action` is called with each instance once it is constructed, and never raises."""
    guarded = never_raises(action)
    kind.__init__ = after(kind.__init__, lambda _none, self, /, *_args, **_kwargs: guarded(self))  # type: ignore[misc]


@never_raises
def notify(event: str, **fields: Any) -> bool:
    """Send an event to this server's crash handler without waiting, and return whether it was delivered."""
    socket_path = published(SOCKET_VARIABLE)
    if not socket_path:
        return False
    try:
        protocol.notify(socket_path, event, **fields)
    except protocol.HandlerUnreachableError:
        return False
    return True


def held_memory(
    event: str, make: Callable[[], Memory], loss: str, describe: Callable[[], dict[str, Any]] = dict
) -> Memory | None:
    """Return memory that this process writes to, and whose ``fd`` is sent to the server's crash handler as well.

    The message to the handler carries the fields that `describe` returns. Returns None if the kit is off or no handler
    is published, and where the memory cannot be made or sent (`loss` and the reason are logged).
    """
    socket_path = published(SOCKET_VARIABLE)
    if not socket_path or not Settings.from_environ().enabled:
        return None
    fields = describe()
    try:
        memory = make()
        try:
            protocol.notify(socket_path, event, descriptor=memory.fd, **fields)
        except BaseException:
            memory.close()
            raise
    except (CrashkitError, protocol.HandlerUnreachableError) as error:
        logger.warning("crash kit: %s: %s", loss, error)
        return None
    return memory


@never_raises
def request(
    event: str,
    timeout_secs: float,
    *,
    on_wait: Callable[[float], object] | None = None,
    **fields: Any,
) -> dict[str, Any] | None:
    """Send an event to this server's crash handler and return its acknowledgement or None; see `protocol.request`.

    The wait never exceeds ``SGLANG_CRASHKIT_EXIT_SECS``, even if the handler asks for more time.
    """
    socket_path = published(SOCKET_VARIABLE)
    if not socket_path:
        return None
    max_secs = Settings.from_environ().exit_secs
    try:
        return protocol.request(socket_path, event, timeout_secs, on_wait=on_wait, max_secs=max_secs, **fields)
    except protocol.HandlerUnreachableError as error:
        logger.warning("crash kit: no crash handler: %s", error)
        return None


def handler_pid() -> int | None:
    """Return the pid of the crash handler of this server; None if absent."""
    socket_path = published(SOCKET_VARIABLE)
    return read_handler_pid(Path(socket_path).parent) if socket_path else None


def log_incident(answer: dict[str, Any] | None) -> None:
    """Log the lines of the crash handler's answer, and the incident's path or the reason why it is not written."""
    for line in (answer or {}).get("lines") or ():
        logger.error("crash kit: %s", line)
    if answer and answer.get("path"):
        logger.error("crash kit: incident %s", answer["path"])
    elif answer and answer.get("problem"):
        logger.error(
            "crash kit: the incident is not written: %s; next: make room in the --crash-dump-folder, or name another",
            answer["problem"],
        )


def say(text: bytes) -> None:
    """Write to standard error for one second at most, without a logger: a hanging thread may hold the logger's lock.

    Raises:
        OSError: standard error has no reader any more.
    """
    if sys.__stderr__ is None:
        # Python was started without standard error, so descriptor 2 may belong to another file.
        return
    poller = select.poll()
    poller.register(_STDERR, select.POLLOUT)
    deadline = time.monotonic() + _SAY_SECS
    # A pipe that polls as writable takes PIPE_BUF bytes without blocking.
    for start in range(0, len(text), select.PIPE_BUF):
        ready = poller.poll(max(0.0, deadline - time.monotonic()) * 1000)
        if not ready:
            return
        if ready[0][1] & (select.POLLERR | select.POLLHUP):
            # A write might raise SIGPIPE, which ends a program that does not ignore it.
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
        os.write(_STDERR, text[start : start + select.PIPE_BUF])


def say_line(text: str) -> None:
    """Write one line, prefixed with "crash kit: ", to standard error; do nothing if it has no reader."""
    line = visible(f"crash kit: {text}", keep="")
    with contextlib.suppress(OSError):
        say(line.encode(errors="backslashreplace")[:_MAX_LINE_BYTES] + b"\n")


def shorten(filename: str) -> str:
    """Return the path relative to the longest ``sys.path`` folder that holds it, or unchanged if no folder does."""
    # The longest entry: a checkout on the path may hold the environment that the module is installed in.
    # Python itself ignores entries that are not strings.
    roots = (root.rstrip("/") + "/" for root in sys.path if isinstance(root, str) and root)
    longest = max((root for root in roots if filename.startswith(root)), key=len, default="")
    return filename[len(longest) :]
