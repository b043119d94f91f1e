"""Wait for ranks in place of upstream: in the launching process, and in the data-parallel controller."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from sglang_crashkit.kernel.pidfd import ProcessHandle
from sglang_crashkit.settings import LAUNCH_VARIABLE, Settings
from sglang_crashkit.srt.hooks import log_incident, never_raises, request
from sglang_crashkit.srt.readiness import Readiness, StartupError, no_more_to_come
from sglang_crashkit.srt.redaction import redact
from sglang_crashkit.srt.startup_report import Member

logger = logging.getLogger(__name__)

_MOST_MESSAGE = 4000


def is_on() -> bool:
    """Say whether the kit is switched on."""
    return Settings.from_environ().enabled


def note_launch() -> None:
    """Let the processes that this one is about to start know since when their readiness is waited for."""
    os.environ[LAUNCH_VARIABLE] = str(time.monotonic())


def launched_at() -> float | None:
    """Return when the server was launched, by the monotonic clock, the first time; None later and elsewhere."""
    with contextlib.suppress(KeyError, ValueError):
        return float(os.environ.pop(LAUNCH_VARIABLE))
    return None


def can_watch(readers: Iterable[Any], processes: Iterable[Any]) -> bool:
    """Say whether these are pipes and processes that the kernel knows, and not stand-ins such as Ray's actors."""
    try:
        descriptors = [reader.fileno() for reader in readers] + [process.sentinel for process in processes]
    except (AttributeError, OSError, TypeError, ValueError):
        return False
    return all(type(descriptor) is int for descriptor in descriptors)


def await_ready(
    members: Sequence[Member], all_known: Callable[[], bool] = no_more_to_come, waited_secs: float = 0.0
) -> list[Any]:
    """Return what each member with a pipe sent when it was ready, in order; what comes between is in the log.

    Args:
        members: see `Readiness`.
        all_known: see `Readiness`.
        waited_secs: see `Readiness`.

    Raises:
        StartupError: a RuntimeError; one of them will not get ready.
    """
    timeout_secs = Settings.from_environ().startup_timeout_secs
    wait = Readiness(
        members,
        timeout_secs=timeout_secs,
        on_silence=_report_silence,
        all_known=all_known,
        waited_secs=waited_secs,
    )
    try:
        return wait.wait()
    except StartupError as error:
        # Now: a signal may end this process before whoever catches the error writes it down.
        logger.error("crash kit: %s", error)
        raise


@never_raises
def report(error: StartupError) -> dict[str, Any] | None:
    """Tell the crash handler, and wait until the incident is whole, at most ``SGLANG_CRASHKIT_BUDGET_SECS``.

    Returns:
        What the crash handler answered; None where there is none.
    """
    event = "startup_timeout" if error.kind == "timeout" else "launch_failed"
    named = [member for member in error.members if member.process is not None]
    titles = {str(member.process.pid): member.title or member.name or member.short() for member in named}
    # `multiprocessing` may have reaped one before the crash handler looked for the first time.
    codes = {str(member.process.pid): member.exit_code for member in named if member.exit.known}
    words = redact(str(error)[:_MOST_MESSAGE])
    answer = request(event, Settings.from_environ().budget_secs, message=words, titles=titles, exit_codes=codes)
    log_incident(answer)
    return answer


def _report_silence(text: str) -> None:
    logger.warning("crash kit: %s", text)


class ForeignProcess:
    """A process that is another's child, in the form of `multiprocessing.Process`.

    Raises:
        ProcessLookupError: there is none with this pid.
        OSError: the kernel gives no pidfd.
    """

    exitcode = None

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._handle = ProcessHandle(pid)

    @property
    def sentinel(self) -> int:
        """A descriptor that is readable once it has ended."""
        return self._handle.fd
