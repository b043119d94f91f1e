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
#: What has an ``fd`` and `close`.
Memory = TypeVar("Memory", bound=Any)
#: One of SGLang's, of whose types the kit knows nothing.
Function: TypeAlias = Callable[..., Any]

#: The longest that a process waits for the crash handler to capture the stacks of the others, in seconds.
CAPTURE_WAIT_SECS = 2.0
_STDERR = 2
_SAY_SECS = 1.0
_MAX_LINE_BYTES = 4000


def never_raises(hook: Callable[Parameters, Result]) -> Callable[Parameters, Result | None]:
    """Log whatever a hook raises and return None instead: the server comes first."""

    @functools.wraps(hook)
    def guarded(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result | None:
        try:
            return hook(*args, **kwargs)
        except Exception:  # noqa: BLE001 - whatever it is, upstream goes on
            note_failure(hook)
            return None

    return guarded


def note_failure(hook: Function) -> None:
    """Log the exception being handled, which `hook` raised; a filter or a handler of the log may raise as well."""
    with contextlib.suppress(Exception):
        logger.warning("crash kit: %s failed", hook.__qualname__, exc_info=True)


_gone: set[str] = set()


def note_gone(error: AttributeError, instead: Result) -> Result:
    """Return what stands for an attribute that SGLang's scheduler does not have in this release, and say so once."""
    name = error.name or str(error)
    if name not in _gone:
        _gone.add(name)
        logger.warning("crash kit: the scheduler of this SGLang has no %s, and the kit does without it", name)
    return instead


class Lately:
    """What was told lately, and is not again for so many seconds, nor is more than `most` in them; for any thread."""

    def __init__(self, secs: float, most: int) -> None:
        self._secs, self._most = secs, most
        self._quiet_until: dict[object, float] = {}
        self._lock = threading.Lock()

    def is_news(self, what: object) -> bool:
        """Say whether something is to be told now; it counts as told then."""
        now = time.monotonic()
        with self._lock:
            self._quiet_until = {each: until for each, until in self._quiet_until.items() if now < until}
            if what in self._quiet_until or len(self._quiet_until) >= self._most:
                return False
            self._quiet_until[what] = now + self._secs
        return True


def in_place_of(function: Function, action: Function, *, meant: type[Exception] | tuple[()] = ()) -> Function:
    """Wrap `function`: ``action(function, ...)`` runs in its place, with the same arguments.

    Where `action` fails before it called `function`, that is called; after that, what came of the call counts. Errors
    of the types in `meant` are raised.
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
    """Tell the crash handler of this server, return at once, and say whether it got the message."""
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
    """Return memory that this process writes to, and that the crash handler of its server holds, too, by its ``fd``.

    The handler is told what `describe` returns. Returns None where the kit is off or there is no handler; where it
    cannot be, the log has `loss` and the reason.
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
    """Tell the crash handler of this server and wait for its acknowledgement, None without; see `protocol.request`.

    Whatever the handler asks for, the wait takes no longer than ``SGLANG_CRASHKIT_EXIT_SECS``.
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
    """Say in the server's log what happened, and where the incident is or why it is missing, as was answered."""
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
    """Write to standard error, without a logger, whose lock the process that hangs may hold, and for a second at most.

    Raises:
        OSError: it has no reader any more.
    """
    if sys.__stderr__ is None:
        # Python was started without: that number is another file's by now.
        return
    poller = select.poll()
    poller.register(_STDERR, select.POLLOUT)
    deadline = time.monotonic() + _SAY_SECS
    # What a pipe that is ready takes without blocking.
    for start in range(0, len(text), select.PIPE_BUF):
        ready = poller.poll(max(0.0, deadline - time.monotonic()) * 1000)
        if not ready:
            return
        if ready[0][1] & (select.POLLERR | select.POLLHUP):
            # Of a write SIGPIPE might come, which ends a program that does not ignore it.
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
        os.write(_STDERR, text[start : start + select.PIPE_BUF])


def say_line(text: str) -> None:
    """Write one line of the kit's; nothing where it has no reader."""
    line = visible(f"crash kit: {text}", keep="")
    with contextlib.suppress(OSError):
        say(line.encode(errors="backslashreplace")[:_MAX_LINE_BYTES] + b"\n")


def shorten(filename: str) -> str:
    """Return the path relative to the longest folder of ``sys.path`` that holds it, as it is where none does."""
    # The longest entry: a checkout on the path may hold the environment that the module is installed in.
    # What is no text there, Python itself passes over.
    roots = (root.rstrip("/") + "/" for root in sys.path if isinstance(root, str) and root)
    longest = max((root for root in roots if filename.startswith(root)), key=len, default="")
    return filename[len(longest) :]
