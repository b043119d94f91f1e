"""Hooks of ``sglang/srt/entrypoints/engine.py``: the server launches, waits for its ranks, and its launch fails."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from sglang_crashkit.core.readiness import StartupError
from sglang_crashkit.core.settings import Settings
from sglang_crashkit.core.startup_report import Member
from sglang_crashkit.srt import handler_process, startup
from sglang_crashkit.srt.hooks import never_raises, request

logger = logging.getLogger(__name__)

Handler = TypeVar("Handler", bound=Callable[..., Any])


@never_raises
def on_engine_launch(server_args: Any) -> None:
    """Start the crash handler before the first child process, where a crash folder is set or diagnostics are on.

    Args:
        server_args: SGLang's ``ServerArgs``.
    """
    settings = Settings.from_environ()
    crash_folder = getattr(server_args, "crash_dump_folder", None)
    if settings.enabled and (crash_folder or settings.diagnostics):
        handler_process.start(crash_folder)


def on_launch_phase_sigquit(handler: Handler) -> Handler:
    """Wrap the SIGQUIT handler of the launch phase: the evidence is whole before the process tree is killed.

    A child sends SIGQUIT when it fails. Waits for the crash handler at most ``SGLANG_CRASHKIT_BUDGET_SECS``.
    """

    @functools.wraps(handler)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        _report_failed_launch()
        return handler(*args, **kwargs)

    return wrapper  # type: ignore[return-value]


def on_wait_for_scheduler_ready(wait: Handler) -> Handler:
    """Take over from ``_wait_for_scheduler_ready``: any rank's death ends the wait at once.

    Returns what upstream's function returns: what each rank sent, in order. RuntimeError says which rank died, and of
    what; closed its pipe; sent something else; reported that it failed; or was silent for longer than
    ``SGLANG_CRASHKIT_STARTUP_TIMEOUT_SECS``. It is raised when the incident is whole, so that what ends the server then
    loses nothing.
    """

    @functools.wraps(wait)
    def wrapper(scheduler_pipe_readers: Sequence[Any], scheduler_procs: Sequence[Any]) -> Any:
        if not startup.is_on() or not startup.can_watch(scheduler_pipe_readers, scheduler_procs):
            return wait(scheduler_pipe_readers, scheduler_procs)
        try:
            return startup.await_ready(_members(scheduler_pipe_readers, scheduler_procs))
        except StartupError as error:
            startup.report(error)
            raise

    return wrapper  # type: ignore[return-value]


def _members(readers: Sequence[Any], processes: Sequence[Any]) -> list[Member]:
    # Processes beyond the pipes are those that the data-parallel controller speaks for; their order is not their rank.
    is_rank = len(readers) == len(processes)
    members = []
    for position in range(max(len(readers), len(processes))):
        reader = readers[position] if position < len(readers) else None
        process = processes[position] if position < len(processes) else None
        members.append(Member(f"Rank {position} scheduler" if is_rank or process is None else "", process, reader))
    return members


@never_raises
def _report_failed_launch() -> None:
    answer = request("launch_failed", Settings.from_environ().budget_secs)
    if answer and answer.get("path"):
        logger.error("crash kit: incident %s", answer["path"])
