"""Heartbeats of the processes that every answer needs, besides the schedulers.

The asyncio loop of a tokenizer manager, in each tokenizer worker, and that of their router beat once a second. The
detokenizer has no such loop: it records when it begins to handle a message and when it waits for the next. No patch
calls this for the detokenizer: methods of SGLang's class, if found by name, are wrapped as its process begins.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from time import monotonic
from typing import Any

from sglang_crashkit.memory.heartbeat import BEAT_SECS, FLAGS, LOOP_TIME, OFF, WAITING, HeartbeatWriter
from sglang_crashkit.settings import Settings
from sglang_crashkit.srt.hooks import before, held_memory, never_raises

_DETOKENIZER = "sglang.srt.managers.detokenizer_manager"
#: The loops of a `DetokenizerManager`, with one tokenizer and with several.
_DETOKENIZER_LOOPS = ("event_loop", "multi_http_worker_event_loop")
#: The tasks that beat; an event loop holds its tasks by weak references only.
_tasks: set[asyncio.Task[None]] = set()


def open_heartbeat(who: str, describe: Callable[[], dict[str, Any]] = dict) -> HeartbeatWriter | None:
    """Return a heartbeat of this process, `who` in the log; None if detection of hangs is off, or see `held_memory`."""
    if not Settings.from_environ().hang_secs:
        return None
    return held_memory("heartbeat", HeartbeatWriter, f"hangs of this {who} are not detected", describe)


@never_raises
def start_loop_heartbeat(manager: Any) -> None:
    """Have the event loop of a ``TokenizerManager`` beat, from the first request on, when its tasks are created.

    Don't call it in a user's program, which runs the event loop only during each call.
    """
    create = manager.auto_create_handle_loop

    def create_and_beat() -> None:
        create()
        # From now on the method of the class is called again.
        vars(manager).pop("auto_create_handle_loop", None)
        _begin(manager.event_loop)

    manager.auto_create_handle_loop = create_and_beat


def start_router_heartbeat(router: Any) -> None:
    """Have the event loop of a ``MultiTokenizerRouter`` beat, which runs in a separate thread."""
    loop = getattr(router, "_loop", None)
    if loop is not None:
        loop.call_soon_threadsafe(_begin, loop)


@never_raises
def _begin(loop: asyncio.AbstractEventLoop) -> None:
    task = loop.create_task(_beat())
    _tasks.add(task)
    task.add_done_callback(_tasks.discard)


async def _beat() -> None:
    # Not earlier: only here is it certain that the loop runs.
    writer = never_raises(open_heartbeat)("tokenizer manager")
    if writer is None:
        return
    words = writer.words
    try:
        while True:
            words[LOOP_TIME] = monotonic()
            await asyncio.sleep(BEAT_SECS)
    finally:
        # The loop ends, which is not a hang.
        words[FLAGS] = OFF


@never_raises
def start_detokenizer_heartbeat() -> None:
    """Have the detokenizer beat from the start of its event loop on; call it in its process before that."""
    kind = getattr(sys.modules.get(_DETOKENIZER), "DetokenizerManager", None)
    for name in _DETOKENIZER_LOOPS:
        loop = getattr(kind, name, None)
        if loop is not None:
            setattr(kind, name, before(loop, _beat_with_messages))


def _beat_with_messages(manager: Any) -> None:
    dispatch = manager._request_dispatcher
    writer = open_heartbeat("detokenizer")
    if writer is None:
        return
    words = writer.words
    words[FLAGS] = WAITING

    def dispatch_and_beat(message: Any) -> Any:
        words[LOOP_TIME] = monotonic()
        words[FLAGS] = 0
        try:
            return dispatch(message)
        finally:
            words[LOOP_TIME] = monotonic()
            words[FLAGS] = WAITING

    # Keeps the writer alive. Only the detokenizer's loop calls the function.
    dispatch_and_beat.writer = writer  # type: ignore[attr-defined]
    manager._request_dispatcher = dispatch_and_beat
