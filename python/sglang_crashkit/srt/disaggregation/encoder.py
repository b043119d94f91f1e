"""Hooks of ``sglang/srt/disaggregation/encoder/``, before 0.5.19 ``encode_server.py``: an encoder-only server.

Its main process is the first rank. It starts the other ranks, and serves on without a rank that ends. SGLang sets no
titles for these processes.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

from sglang_crashkit.srt.entrypoints.engine import on_engine_launch
from sglang_crashkit.srt.hooks import Function, before, never_raises
from sglang_crashkit.srt.managers.scheduler import on_scheduler_exception
from sglang_crashkit.srt.stack_hooks import install_in_worker


def on_encoder_launch(launch: Function) -> Function:
    """Wrap the server's launch function, for HTTP or gRPC: the crash handler starts before the first rank."""
    return before(launch, on_engine_launch)


def on_encoder_rank(run: Function) -> Function:
    """Wrap the function that a rank runs: the rank joins its server, and reports the exception that ends it."""

    @functools.wraps(run)
    async def wrapper(*args: Any, **kwargs: Any) -> Any:
        _join(run, *args, **kwargs)
        try:
            return await run(*args, **kwargs)
        except Exception:
            on_scheduler_exception()
            raise

    return wrapper


@never_raises
def _join(run: Function, *args: Any, **kwargs: Any) -> None:
    told = inspect.signature(run).bind(*args, **kwargs).arguments
    rank = f"TP{told['rank']}" if "rank" in told else f"DP{told['dp_rank']}"
    install_in_worker(told["server_args"], title=f"sglang::encoder_{rank}")
