"""Hooks of ``sglang/srt/entrypoints/engine.py``: the server launches, and its launch fails."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar

from sglang_crashkit.core.settings import Settings
from sglang_crashkit.srt import handler_process
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


@never_raises
def _report_failed_launch() -> None:
    answer = request("launch_failed", Settings.from_environ().budget_secs)
    if answer and answer.get("path"):
        logger.error("crash kit: incident %s", answer["path"])
