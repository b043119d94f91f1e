"""The record of an exception that ends a process of the server: written by the process itself, while it handles it."""

from __future__ import annotations

import contextlib
import os
import sys
import time
import traceback
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import setproctitle

from sglang_crashkit.kernel.private_files import write_json
from sglang_crashkit.settings import SPOOL_VARIABLE
from sglang_crashkit.srt.hooks import PHOTOGRAPH_WAIT_SECS, never_raises, request
from sglang_crashkit.srt.on_traceback import find_batch, find_configuration, find_prompts
from sglang_crashkit.srt.paths import shorten
from sglang_crashkit.srt.redaction import redact

_MAX_REQUESTS = 64
_MAX_MESSAGE = 4000


@never_raises
def tell_exception() -> None:
    """Write down the exception being handled, and wait until the server's other processes were photographed.

    To be called from the ``except`` branch, before the parent is told: what the parent does then ends the others.
    Returns after at most `PHOTOGRAPH_WAIT_SECS`, at once where there is no crash handler or no exception.
    """
    raised, error, trace = sys.exc_info()
    if raised is None or error is None:
        return
    message = _redacted("".join(traceback.format_exception_only(raised, error)).strip()[:_MAX_MESSAGE], trace)
    record = _write_record(message, trace)
    request(
        "exception",
        PHOTOGRAPH_WAIT_SECS,
        message=message.splitlines()[0][:300],
        record=str(record) if record else None,
    )


def _write_record(message: str, trace: TracebackType | None) -> Path | None:
    spool = os.environ.get(SPOOL_VARIABLE)
    if not spool:
        return None
    with contextlib.suppress(OSError):
        # Another server's crash handler removes it where this one's was killed.
        Path(spool).mkdir(mode=0o700)
    path = Path(spool) / f"exception-{os.getpid()}.json"
    record = {
        "pid": os.getpid(),
        "title": setproctitle.getproctitle(),
        "time": time.time(),
        "message": message,
        "traceback": _format_frames(traceback.extract_tb(trace)),
        "batch": _describe_batch(trace),
        "threads": _threads(),
    }
    try:
        write_json(path, record)
    except OSError:
        return None
    return path


def _redacted(message: str, trace: TracebackType | None) -> str:
    prompts = never_raises(find_prompts)(trace) or []
    return redact(message, never_raises(find_configuration)(trace), prompts=prompts)


def _format_frames(frames: traceback.StackSummary) -> list[str]:
    return [f"{frame.name} ({shorten(frame.filename)}:{frame.lineno})" for frame in frames]


def _threads() -> dict[str, list[str]]:
    frames: dict[int, FrameType] = sys._current_frames()
    return {str(ident): _format_frames(traceback.extract_stack(frame)) for ident, frame in frames.items()}


@never_raises
def _describe_batch(trace: TracebackType | None) -> dict[str, Any]:
    """Describe the batch that the scheduler on the traceback was running; no prompt and no token."""
    scheduler, batch = find_batch(trace)
    if batch is None:
        return {}
    requests = list(getattr(batch, "reqs", None) or [])
    return {
        "forward_mode": str(getattr(batch, "forward_mode", None)),
        "size": len(requests),
        "request_ids": [str(getattr(request, "rid", "")) for request in requests[:_MAX_REQUESTS]],
        "forward_count": getattr(scheduler, "forward_ct", None),
    }
