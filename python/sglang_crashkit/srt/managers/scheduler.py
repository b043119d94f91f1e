"""Hooks of ``sglang/srt/managers/scheduler.py``: the scheduler process hit an exception, and told its parent."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
import traceback
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import setproctitle

from sglang_crashkit.core.pidfd import ProcessHandle
from sglang_crashkit.core.private_files import write_json
from sglang_crashkit.core.settings import SPOOL_VARIABLE, Settings, read_bool
from sglang_crashkit.srt.hooks import PHOTOGRAPH_WAIT_SECS, never_raises, request
from sglang_crashkit.srt.on_traceback import find_batch, find_configuration, find_prompts
from sglang_crashkit.srt.paths import shorten
from sglang_crashkit.srt.process_group import find_server, kill_own_group
from sglang_crashkit.srt.redaction import redact

_MAX_REQUESTS = 64
_MAX_MESSAGE = 4000
#: The incident is written within this time once its own is spent, and the server ends within it, in seconds.
_FINISH_SECS = 2.0


@never_raises
def on_scheduler_exception() -> None:
    """Write down the exception being handled, and wait until the other ranks were photographed.

    To be called from the ``except`` branch, before the parent is told: what the parent does then ends the other ranks.
    Returns after at most `PHOTOGRAPH_WAIT_SECS`.
    """
    raised, error, trace = sys.exc_info()
    if raised is None or error is None:
        return
    message = _redacted("".join(traceback.format_exception_only(raised, error)).strip()[:_MAX_MESSAGE], trace)
    record = _write_record(message, trace)
    request(
        "scheduler_exception",
        PHOTOGRAPH_WAIT_SECS,
        message=message.splitlines()[0][:300],
        record=str(record) if record else None,
    )


@never_raises
def on_parent_told() -> None:
    """Kill the server's process group where ``SGLANG_KILLPG_ON_SCHEDULER_EXCEPTION`` asks for it.

    To be called once the parent was sent SIGQUIT, on which it saves the requests. The kill comes when they are saved
    and the incident is whole, after ``SGLANG_CRASHKIT_BUDGET_SECS`` at the latest. Where the kit is off nothing is done
    here: the branch that some releases have of their own then does as upstream says.
    """
    if not read_bool(os.environ, "SGLANG_KILLPG_ON_SCHEDULER_EXCEPTION", False) or not hasattr(os, "killpg"):
        return
    settings = Settings.from_environ()
    if settings.enabled:
        answer = request("await_incident", settings.budget_secs + _FINISH_SECS)
        # The server ends its processes, this one too, with a status that tells of the crash, which a kill would not.
        _await_server(settings.budget_secs if answer is None else _FINISH_SECS)
        kill_own_group()


def _await_server(timeout_secs: float) -> None:
    """Wait until the server has ended by itself: where there is no crash handler, this tells of the dump too."""
    with contextlib.suppress(OSError):
        server = ProcessHandle(find_server(os.getpid()))
        poller = select.poll()
        poller.register(server, select.POLLIN)
        poller.poll(timeout_secs * 1000)
        server.close()


def _write_record(message: str, trace: TracebackType | None) -> Path | None:
    spool = os.environ.get(SPOOL_VARIABLE)
    if not spool:
        return None
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
