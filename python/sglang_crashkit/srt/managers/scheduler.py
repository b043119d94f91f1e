"""Hook of ``sglang/srt/managers/scheduler.py``: the scheduler process hit an exception."""

from __future__ import annotations

import os
import sys
import time
import traceback
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import setproctitle

from sglang_crashkit.core.private_files import write_json
from sglang_crashkit.core.settings import SPOOL_VARIABLE
from sglang_crashkit.srt.hooks import never_raises, request

#: The longest that the failing rank waits for the other ranks to be photographed, in seconds.
PHOTOGRAPH_WAIT_SECS = 2.0
_MAX_REQUESTS = 64


@never_raises
def on_scheduler_exception() -> None:
    """Write down the exception being handled, and wait until the other ranks were photographed.

    To be called from the ``except`` branch, before the parent is told: what the parent does then ends the other ranks.
    Returns after at most `PHOTOGRAPH_WAIT_SECS`.
    """
    raised, error, trace = sys.exc_info()
    if raised is None or error is None:
        return
    message = "".join(traceback.format_exception_only(raised, error)).strip()
    record = _write_record(message, trace)
    request(
        "scheduler_exception",
        PHOTOGRAPH_WAIT_SECS,
        message=message.splitlines()[0][:300],
        record=str(record) if record else None,
    )


def _write_record(message: str, trace: TracebackType | None) -> Path | None:
    spool = os.environ.get(SPOOL_VARIABLE)
    if not spool:
        return None
    path = Path(spool) / f"exception-{os.getpid()}.json"
    record = {
        "pid": os.getpid(),
        "title": setproctitle.getproctitle(),
        "time": time.time(),
        "message": message[:4000],
        "traceback": _format_frames(traceback.extract_tb(trace)),
        "batch": _describe_batch(trace),
        "threads": _threads(),
    }
    try:
        write_json(path, record)
    except OSError:
        return None
    return path


def _format_frames(frames: traceback.StackSummary) -> list[str]:
    return [f"{frame.name} ({_short(frame.filename)}:{frame.lineno})" for frame in frames]


def _short(filename: str) -> str:
    # The longest entry: a checkout on the path may hold the environment that the module is installed in.
    roots = (root.rstrip("/") + "/" for root in sys.path if root)
    longest = max((root for root in roots if filename.startswith(root)), key=len, default="")
    return filename[len(longest) :]


def _threads() -> dict[str, list[str]]:
    frames: dict[int, FrameType] = sys._current_frames()
    return {str(ident): _format_frames(traceback.extract_stack(frame)) for ident, frame in frames.items()}


@never_raises
def _describe_batch(trace: TracebackType | None) -> dict[str, Any]:
    """Describe the batch that the scheduler on the traceback was running; no prompt and no token."""
    while trace is not None:
        scheduler = trace.tb_frame.f_locals.get("self")
        batch = getattr(scheduler, "cur_batch", None) or getattr(scheduler, "running_batch", None)
        if batch is not None:
            requests = list(getattr(batch, "reqs", None) or [])
            return {
                "forward_mode": str(getattr(batch, "forward_mode", None)),
                "size": len(requests),
                "request_ids": [str(getattr(request, "rid", "")) for request in requests[:_MAX_REQUESTS]],
                "forward_count": getattr(scheduler, "forward_ct", None),
            }
        trace = trace.tb_next
    return {}
