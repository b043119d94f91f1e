"""Hooks of SGLang's scheduler and model runner: a scheduler records its steps for the crash handler, if there is one.

A step is a batch; `memory.steps` describes its record. Ranks are compared by a hash, so everything that goes into it
is the same on all ranks that do the same work: no clock, no address, no order of a set.

If batches overlap, a step is processed after the next one was launched. The recorder knows that a forward pass is done
if the CPU computes it, or if the copy of its results has arrived; the recorder does not wait for the copy.
"""

# ruff: noqa: BLE001 - `_fail` logs what a hook caught
from __future__ import annotations

import logging
import re
import zlib
from collections import deque
from collections.abc import Sequence
from hashlib import blake2b
from itertools import islice
from operator import add, attrgetter
from time import monotonic
from typing import Any

from sglang_crashkit.memory.steps import StepWriter
from sglang_crashkit.model.step import short_rid
from sglang_crashkit.settings import Settings
from sglang_crashkit.srt.hooks import held_memory, note_gone
from sglang_crashkit.srt.managers.scheduler_heartbeat import forward_modes

logger = logging.getLogger(__name__)

#: Forward modes in which a batch computes input tokens; the mode of requests that a prefill server computed.
_EXTENDS = frozenset({"extend", "mixed", "split_prefill", "dllm_extend"})
_PREBUILT = "prebuilt"
#: The forward mode of a batch in which each request gains one token, or more with speculative decoding.
_DECODE = "decode"
#: At most this many of the requests received for one step are read; the others are counted.
_MAX_RECEIVED = 256
#: No event loop has more batches than this in progress.
_MAX_PENDING = 64
#: The recorder switches itself off after this many errors of its own.
_MAX_FAILURES = 8
#: Decisions (see `memory.steps.DECISIONS`) of a hierarchical cache, and the cache's attribute that holds the requests.
_CACHE = {"prefetch": "ongoing_prefetch", "write_back": "ongoing_write_through"}
#: Prefixes of the request classes that are no control requests: requests for an answer, aborts, and read-only requests,
#: which routers send all the time. `_END_OF_NAME` is removed from the class name of a control request.
_NO_CONTROL = ("Tokenized", "BatchTokenized", "Abort", "GetLoad", "GetInternalState")
_END_OF_NAME = re.compile(r"Req(Input|uest)?$")
_WORDS = re.compile(r"LoRA|[A-Z][a-z0-9]*")
#: Part of the ``abort_message`` of a request that timed out.
_TIMED_OUT = "timeout reached"
_output_of, _input_of = attrgetter("output_ids"), attrgetter("origin_input_ids")

_recorder: StepRecorder | None = None
_is_off = False


class StepRecorder:
    """Records the steps of one scheduler; `modes` maps the numbers of the release's forward modes to their names."""

    def __init__(self, scheduler: Any, writer: StepWriter, modes: dict[int, str]) -> None:
        self.writer = writer
        self.failures = 0
        self._extends = frozenset(number for number, name in modes.items() if name in _EXTENDS)
        by_name = {name: number for number, name in modes.items()}
        self._prebuilt, self._decode = by_name.get(_PREBUILT, -1), by_name.get(_DECODE, -1)
        self._is_cpu = str(getattr(scheduler, "device", None)) == "cpu"
        #: A pipeline stage that has nothing to do in one round may still have another batch in progress.
        self._is_staged = getattr(scheduler, "pp_size", 1) > 1
        self._grammars = getattr(scheduler, "grammar_manager", scheduler)
        self._cache = [
            (name, attribute)
            for name, attribute in _CACHE.items()
            # In newer releases the cache has these attributes even if it is not hierarchical.
            if getattr(scheduler, "enable_hierarchical_cache", True)
            and hasattr(getattr(scheduler, "tree_cache", None), attribute)
        ]
        self._began = monotonic()
        #: The number of batches that began, and whether one began in this round.
        self._batches, self._has_begun = 0, False
        #: Steps whose results may be unprocessed; the step whose results are in process, else 0; the last such step.
        self._pending: deque[int] = deque(maxlen=_MAX_PENDING)
        self._processing = self._processed = 0
        #: On a decode server: the last step of prebuilt requests that contains an idle batch; that idle batch's step.
        self._inner_of = self._inner = 0
        #: The requests of the last recorded step, if it is a decode step. The next step continues it if it has the same
        #: list at the same length: SGLang makes a new list when a request ends, and appends to it when one is added.
        self._reqs: list[Any] = []
        self._size = 0
        #: Hash of all requests ever received, as bytes and as a number.
        self._received_hash, self._received_sum = bytes(8), 0
        self._no_controls: set[type] = set()
        self._forget_received()

    def _forget_received(self) -> None:
        self._has_received = False
        self._rids: list[str] = []
        self._lengths: list[int] = []
        self._decisions: dict[str, int] = {}

    def receive(self, scheduler: Any, requests: Sequence[Any]) -> None:
        """Record that a round of the event loop begins with these new requests."""
        self._began = now = monotonic()
        number = self._number_of(scheduler) + 1
        has_begun, self._has_begun = self._has_begun, False
        if requests:
            self._has_received = True
            for request in islice(requests, _MAX_RECEIVED):
                self._take(request)
            if len(requests) > _MAX_RECEIVED:
                self._mix(f"of {len(requests)}")
            self._received_sum = int.from_bytes(self._received_hash, "little")
            self.writer.begin_round(number, now)
            self.writer.receive(number, now, list(self._rids), self._lengths)
            if not self._no_controls.issuperset(map(type, requests)):
                self._note_control(requests)
        elif self._has_received or _is_at_work(scheduler, has_begun=has_begun):
            self.writer.begin_round(number, now)
        else:
            if not self._is_staged:
                self._pending.clear()
            # This may be the last reference to the requests.
            self._reqs = []
            self.writer.begin_round(0, now)

    def _number_of(self, scheduler: Any) -> int:
        try:
            number: int = scheduler.forward_ct
        except AttributeError as error:
            number = note_gone(error, self._batches)
        return number

    def _note_control(self, requests: Sequence[Any]) -> None:
        for kind in dict.fromkeys(map(type, requests)):
            if not kind.__name__.startswith(_NO_CONTROL):
                # Make the name of its HTTP route, such as ``update_weights_from_disk``, from the name of its class.
                words = "_".join(word.lower() for word in _WORDS.findall(_END_OF_NAME.sub("", kind.__name__)))
                # The route and the scheduler's function have "weights" where the class has "weight".
                self.writer.begin_control(words.replace("update_weight_", "update_weights_") or kind.__name__)
                break
            self._no_controls.add(kind)

    def _take(self, request: Any) -> None:
        name, rid = type(request).__name__, short_rid(getattr(request, "rid", None) or "")
        self._mix(f"{name} {rid}")
        if name == "AbortReq":
            # From 0.5.23 on one rank decides on timeouts, and sends the decision to all ranks.
            message = getattr(request, "abort_message", None)
            is_timeout = isinstance(message, str) and _TIMED_OUT in message[:256]
            self._decide("timeout" if is_timeout else "abort", rid)
        elif name.startswith("BatchTokenized"):
            self._mix(f"of {len(request.batch)}")
            for one in islice(request.batch, _MAX_RECEIVED):
                self._take(one)
        elif name.startswith("Tokenized") and len(self._rids) < _MAX_RECEIVED:
            self._rids.append(rid)
            self._lengths.append(len(getattr(request, "input_ids", None) or ()))

    def _mix(self, said: str) -> None:
        told = said.encode(errors="surrogatepass")
        self._received_hash = blake2b(told, key=self._received_hash, digest_size=8).digest()

    def _decide(self, name: str, rid: str) -> None:
        """Add a request to the checksum of the decision `name`, which depends on the requests' ids and their order."""
        self._decisions[name] = zlib.crc32(f"{rid} ".encode(errors="surrogatepass"), self._decisions.get(name, 0))

    def retract(self, requests: Sequence[Any]) -> None:
        """Record that these requests are about to be put back into the queue for lack of memory."""
        for request in islice(requests, _MAX_RECEIVED):
            self._decide("retract", short_rid(request.rid))

    def schedule(self, scheduler: Any, batch: Any) -> None:
        """Record that a batch begins; to be called after ``Scheduler.forward_ct`` was incremented for it."""
        self._batches, self._has_begun = self._batches + 1, True
        number, reqs, mode = self._number_of(scheduler), batch.reqs, int(batch.forward_mode or 0)
        decisions = self._decisions
        if queue := getattr(self._grammars, "grammar_queue", None):
            decisions["grammar"] = len(queue)
        for name, attribute in self._cache:
            decisions[name] = len(getattr(scheduler.tree_cache, attribute))
        goes_on = reqs is self._reqs and len(reqs) == self._size and mode == self._decode
        if not goes_on or self._has_received or decisions or not self.writer.schedule_again(number, self._began):
            self._write_out(number, batch, mode)
        if self._inner_of and self._inner_of == number - 1:
            # The inner idle batch has no results of its own.
            self._inner = number
        else:
            self._pending.append(number)
        if mode == self._prebuilt:
            self._inner_of = number if batch.inner_idle_batch is not None else 0
        if self._has_received or decisions:
            self._forget_received()

    def _write_out(self, number: int, batch: Any, mode: int) -> None:
        reqs, is_extend, self._reqs = batch.reqs, mode in self._extends, []
        is_counted = False
        tokens: Sequence[int] | None = None
        lengths: Sequence[int]
        # Beam search has more rows than requests.
        if is_extend and len(batch.extend_lens) == len(batch.prefix_lens) == len(reqs):
            tokens = batch.extend_lens
            lengths = list(map(add, batch.prefix_lens, tokens))
        else:
            counted, algorithm = batch.seq_lens_cpu, batch.spec_algorithm
            if counted is not None and (algorithm is None or algorithm.is_none()) and len(counted) == len(reqs):
                lengths, is_counted = counted.tolist(), True
            else:
                # With speculative decoding ``seq_lens_cpu`` comes from the GPU later, so count each request's tokens.
                inputs, outputs = map(len, map(_input_of, reqs)), map(len, map(_output_of, reqs))
                lengths = list(map(add, inputs, outputs))
        self.writer.schedule(
            number,
            self._began,
            mode,
            [one.rid for one in reqs],
            lengths,
            tokens,
            sum(tokens) if tokens is not None else (is_extend and batch.extend_num_tokens) or len(reqs),
            self._decisions,
            self._received_sum,
        )
        if is_counted and mode == self._decode:
            self._reqs, self._size = reqs, len(reqs)

    def take_results(self, batch: Any, result: Any) -> None:
        """Record that the scheduler begins to process the results of a batch, its oldest unprocessed one."""
        number = getattr(batch, "forward_iter", None)
        if not number:
            pending = self._pending
            while pending and pending[0] <= self._processed:
                pending.popleft()
            number = pending[0] if pending else 0
        if number:
            if self._is_cpu or _has_arrived(result):
                self.writer.begin_results(number)
            else:
                self.writer.wait_for_results(number)
        self._processing = self._processed = number

    def end(self) -> None:
        """Record that the results were processed."""
        number, self._processing = self._processing, 0
        if number:
            now = monotonic()
            if self._inner and self._inner == number + 1:
                self.writer.end(self._inner, now)
            self.writer.end(number, now)


def on_received(scheduler: Any, requests: Sequence[Any]) -> None:
    """Record that the scheduler begins a round of its event loop, with new requests that are not handled yet."""
    if _is_off:
        return
    try:
        recorder = _recorder or _begin(scheduler)
        if recorder is not None:
            recorder.receive(scheduler, requests)
    except Exception:
        _fail("what was received")


# These hooks don't share a wrapper that forwards its arguments: it would take a tenth of the time of a step.
def on_retraction(requests: Sequence[Any]) -> None:
    """Record that these requests are about to be put back into the queue for lack of memory."""
    if _recorder is not None:
        try:
            _recorder.retract(requests)
        except Exception:
            _fail("a retraction")


def on_scheduled(scheduler: Any, batch: Any) -> None:
    """Record that a batch begins; to be called after ``Scheduler.forward_ct`` was incremented for it."""
    if _recorder is not None:
        try:
            _recorder.schedule(scheduler, batch)
        except Exception:
            _fail("a step")


def on_forward(forward_batch: Any) -> None:
    """Record that a forward pass of the target model or of a draft model begins."""
    if _recorder is not None:
        try:
            _recorder.writer.begin_pass(forward_batch.forward_mode or 0)
        except Exception:
            _fail("a pass of the model")


def on_results(batch: Any, result: Any) -> None:
    """Record that the scheduler begins to process the results of a batch, its oldest unprocessed one."""
    if _recorder is not None:
        try:
            _recorder.take_results(batch, result)
        except Exception:
            _fail("what a step computed")


def on_processed() -> None:
    """Record that the results were processed."""
    if _recorder is not None:
        try:
            _recorder.end()
        except Exception:
            _fail("the end of a step")


def _fail(what: str) -> None:
    """Log the first error, which says `what` is not recorded; after `_MAX_FAILURES` errors switch the recorder off."""
    global _recorder, _is_off
    recorder = _recorder
    if recorder is None or recorder.failures + 1 >= _MAX_FAILURES:
        logger.warning("crash kit: the steps of this scheduler are not recorded any more", exc_info=True)
        _recorder, _is_off = None, True
        if recorder is not None:
            # Clear the current step: what the scheduler does from now on is not known.
            recorder.writer.begin_round(0, monotonic())
        return
    if not recorder.failures:
        logger.warning("crash kit: %s is not recorded", what, exc_info=True)
    recorder.failures += 1
    recorder.writer.leave_out()


def _begin(scheduler: Any) -> StepRecorder | None:
    global _recorder, _is_off
    _is_off = True
    if not Settings.from_environ().steps:
        return None
    modes, loss = forward_modes(), "the steps of this scheduler are not recorded"
    writer = held_memory("steps", lambda: StepWriter(modes), loss, lambda: {"modes": modes})
    if writer is None:
        return None
    _recorder = StepRecorder(scheduler, writer, {int(number): name for number, name in modes.items()})
    _is_off = False
    return _recorder


def _is_at_work(scheduler: Any, *, has_begun: bool) -> bool:
    """Return whether the scheduler has work; `has_begun`, whether a batch began in the last round, is the fallback."""
    try:
        return bool(scheduler.waiting_queue) or scheduler.last_batch is not None
    except AttributeError as error:
        return note_gone(error, has_begun)


def _has_arrived(result: Any) -> bool:
    copied = getattr(result, "copy_done", None)
    try:
        return copied is not None and bool(copied.query())
    except Exception:
        return False
