"""The heartbeat of a scheduler, in each round and each batch: hooks of ``sglang/srt/managers/scheduler.py``.

The two hooks are called in every round of the event loop and take well under a microsecond together, and some 20 ns
more for each new request. An error in them switches the heartbeat off and has no other effect.
"""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Sequence
from time import monotonic
from typing import Any

from sglang_crashkit.memory.heartbeat import (
    BATCH_TIME,
    BATCHES,
    BUSY,
    COLLECTING_SINCE,
    COLLECTION_ENDED,
    COLLECTION_SECS,
    FLAGS,
    LONG_COLLECTIONS,
    LONG_SECS,
    LOOP_TIME,
    MODE,
    OFF,
    PAUSED,
    REQUESTS,
    TOKENS,
    HeartbeatWriter,
)
from sglang_crashkit.srt import supervisor
from sglang_crashkit.srt.hooks import note_gone
from sglang_crashkit.srt.managers.loop_heartbeat import open_heartbeat

logger = logging.getLogger(__name__)

#: How the names of those classes of requests (``sglang/srt/managers/io_struct.py``) begin that are handled at once: new
#: work and queries. Any other request, such as an update of the weights, may take minutes.
_QUICK = ("Tokenized", "BatchTokenized", "Abort", "Get", "OpenSession", "CloseSession")

#: The request to leave the event loop and end; until the scheduler has ended, the main process waits in its own loop.
_LEAVE = "ShutdownReq"

_writer: HeartbeatWriter | None = None
_words: memoryview[float] | None = None
_is_off = False
#: See `known_gpu`.
_gpu: str | None = None
#: The classes of requests that are handled at once, as far as they are known.
_quick: set[type] = set()


def on_iteration(scheduler: Any, requests: Sequence[Any]) -> None:
    """Record that the scheduler begins a round of its event loop.

    Call it when the round's new requests have arrived, before they are handled: every event loop gets there in every
    round, also when it is idle or paused.
    """
    if _is_off:
        return
    try:
        words = _words
        if words is None:
            words = _begin()
            if words is None:
                return
        try:
            flags = PAUSED if scheduler._engine_paused else 0
        except AttributeError as error:
            flags = note_gone(error, 0)
        # Several tokenizers may send requests: a slow request may be at any place among the others.
        if requests and not _quick.issuperset(map(type, requests)):
            for kind in set(map(type, requests)) - _quick:
                flags |= _flag_of(kind)
        words[FLAGS] = flags
        words[LOOP_TIME] = monotonic()
    except Exception:  # noqa: BLE001 - it is logged there
        _switch_off()


def on_batch(scheduler: Any, batch: Any) -> None:
    """Record that the scheduler begins a batch; call it once ``Scheduler.forward_ct`` counts the batch."""
    words = _words
    if words is None:
        return
    try:
        try:
            words[BATCHES] = scheduler.forward_ct
        except AttributeError as error:
            words[BATCHES] = note_gone(error, words[BATCHES] + 1)
        words[REQUESTS] = len(batch.reqs)
        words[MODE] = batch.forward_mode or 0
        words[TOKENS] = batch.extend_num_tokens or 0
        words[BATCH_TIME] = monotonic()
    except Exception:  # noqa: BLE001 - it is logged there
        _switch_off()


def known_gpu() -> str | None:
    """Return the UUID of the GPU that this process computes on, which is the same in a container; None without a GPU.

    It was read when the heartbeat began: the driver may not answer any more.
    """
    return _gpu


def _flag_of(kind: type) -> int:
    """Return the flag of a class of requests, 0 for one that is handled at once, which is also remembered."""
    if kind.__name__ == _LEAVE:
        return OFF
    if not kind.__name__.startswith(_QUICK):
        return BUSY
    _quick.add(kind)
    return 0


def _begin() -> memoryview[float] | None:
    """Make the heartbeat and send its memory to the crash handler; return None if there is no handler."""
    global _writer, _words, _is_off
    _is_off = True
    supervisor.join(is_ready=True)
    writer = open_heartbeat("scheduler", _describe)
    if writer is None:
        return None
    _writer, _words, _is_off = writer, writer.words, False
    gc.callbacks.append(_on_collection)
    return _words


def _on_collection(phase: str, _about: object) -> None:
    """Record since when Python collects garbage, and how long a long collection took."""
    words = _words
    if words is None:
        return
    now = monotonic()
    if phase == "start":
        words[COLLECTING_SINCE] = now
        return
    began = words[COLLECTING_SINCE]
    words[COLLECTING_SINCE] = 0.0
    # The beginning of a collection that was running when this callback was added is not known.
    if began and now - began > LONG_SECS:
        words[COLLECTION_SECS], words[COLLECTION_ENDED] = now - began, now
        words[LONG_COLLECTIONS] += 1


def _describe() -> dict[str, Any]:
    global _gpu
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    try:
        if cuda is not None and cuda.is_initialized():
            _gpu = str(cuda.get_device_properties(cuda.current_device()).uuid)
    except Exception as error:  # noqa: BLE001 - the heartbeat does not need it, and a platform may have none
        logger.debug("the GPU's UUID is not known: %s", error)
    return {"modes": forward_modes(), "gpu": _gpu}


def forward_modes() -> dict[str, str]:
    """Return the names of the release's forward modes by number; empty if they are not where the kit looks."""
    module = sys.modules.get("sglang.srt.model_executor.forward_batch_info")
    return {str(int(mode)): mode.name.lower() for mode in getattr(module, "ForwardMode", ())}


def _switch_off() -> None:
    """Stop the heartbeat, and log the exception being handled."""
    global _words, _is_off
    logger.warning("crash kit: hangs of this scheduler are no longer detected", exc_info=True)
    words, _words, _is_off = _words, None, True
    if words is not None:
        # From now on the heartbeat does not change, which is not a hang.
        words[FLAGS] = OFF
