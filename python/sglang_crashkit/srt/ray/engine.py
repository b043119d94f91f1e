"""Hooks of ``sglang/srt/ray/engine.py``: an engine launches its ranks as Ray actors, and ends them."""

from __future__ import annotations

import functools
import os
from typing import Any

from sglang_crashkit.srt import crash_exit, startup, supervisor
from sglang_crashkit.srt.entrypoints.engine import on_ranks_ready
from sglang_crashkit.srt.hooks import Function, before, never_raises
from sglang_crashkit.srt.ray.scheduler_actor import let_carry
from sglang_crashkit.srt.server_args import withdraw_crash_dump_env
from sglang_crashkit.srt.startup import StartupError


def on_ray_launch(launch: Function) -> Function:
    """Wrap ``RayEngine._launch_scheduler_processes``: tell actors of the handler, and report a failed launch to it."""

    @functools.wraps(launch)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        let_carry(*args, **kwargs)
        try:
            result = launch(*args, **kwargs)
        except Exception as error:
            _report(error)
            raise
        finally:
            withdraw_crash_dump_env()
        on_ranks_ready()
        return result

    return wrapper


@never_raises
def _report(error: Exception) -> None:
    crash_exit.end_by_status(error, startup.report(StartupError([], f"{type(error).__name__}: {error}")))


def on_ray_shutdown(shutdown: Function) -> Function:
    """Wrap ``RayEngine.shutdown``: announce that it kills the actors on purpose."""
    return before(shutdown, lambda *_args: supervisor.announce_teardown(os.getpid(), whole=False))
