"""Hooks of SGLang's scheduler and model runner: a scheduler notes its steps, where a crash handler listens.

A step is a batch; `memory.steps` says what is noted of it. What goes into the hash that ranks are compared by is the
same on all ranks that do the same: no clock, no address, no order of a set.

Where batches overlap, a step is processed after the next one was launched. That its forward pass is done is known where
the CPU computes it, or once the copy of its results has arrived, for which the recorder does not wait.
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

#: Names of the modes in which a batch takes in tokens, and of the one that only stands for what was received elsewhere.
_EXTENDS = frozenset({"extend", "mixed", "split_prefill", "dllm_extend"})
_PREBUILT = "prebuilt"
#: That of a batch each of whose requests gets one token more, unless it speculates.
_DECODE = "decode"
#: So many of the requests that were received for one step are looked at; the others are counted.
_MAX_RECEIVED = 256
#: More batches than these are under way in no event loop.
_MAX_PENDING = 64
#: So many errors of the recorder's own switch it off.
_MAX_FAILURES = 8
#: What `memory.steps.DECISIONS` calls the requests that a hierarchical cache is about.
_CACHE = {"prefetch": "ongoing_prefetch", "write_back": "ongoing_write_through"}
#: Prefixes of the classes of requests that are no control requests: for an answer, for its end, and such as only read,
#: which routers send all the time. Then the suffix that the name of a control request is told without.
_NO_CONTROL = ("Tokenized", "BatchTokenized", "Abort", "GetLoad", "GetInternalState")
_END_OF_NAME = re.compile(r"Req(Input|uest)?$")
_WORDS = re.compile(r"LoRA|[A-Z][a-z0-9]*")
#: What an abort says that is of a timeout.
_TIMED_OUT = "timeout reached"
_output_of, _input_of = attrgetter("output_ids"), attrgetter("origin_input_ids")

_recorder: StepRecorder | None = None
_is_off = False


class StepRecorder:
    """The steps of one scheduler; `modes` has the names of the release's forward modes by their number."""

    def __init__(self, scheduler: Any, writer: StepWriter, modes: dict[int, str]) -> None:
        self.writer = writer
        self.failures = 0
        self._extends = frozenset(number for number, name in modes.items() if name in _EXTENDS)
        by_name = {name: number for number, name in modes.items()}
        self._prebuilt, self._decode = by_name.get(_PREBUILT, -1), by_name.get(_DECODE, -1)
        self._is_cpu = str(getattr(scheduler, "device", None)) == "cpu"
        #: While a stage of a pipeline has nothing to do in one round, another batch may be under way.
        self._is_staged = getattr(scheduler, "pp_size", 1) > 1
        self._grammars = getattr(scheduler, "grammar_manager", scheduler)
        self._cache = [
            (name, attribute)
            for name, attribute in _CACHE.items()
            # The cache of newer releases has them in any case.
            if getattr(scheduler, "enable_hierarchical_cache", True)
            and hasattr(getattr(scheduler, "tree_cache", None), attribute)
        ]
        self._began = monotonic()
        #: How many batches began, and whether one did in this round.
        self._batches, self._has_begun = 0, False
        #: Steps whose results may not be processed yet; the one whose results are; the last one whose results were.
        self._pending: deque[int] = deque(maxlen=_MAX_PENDING)
        self._processing = self._processed = 0
        #: On the decode side of a pair: the last step of prebuilt requests that contains an idle batch, and the number
        #: of that idle batch's own step.
        self._inner_of = self._inner = 0
        #: The requests of a decode that was noted last, and goes on where the next one has the same: SGLang makes
        #: another list where one ends, and lengthens it where one comes.
        self._reqs: list[Any] = []
        self._size = 0
        #: Of all that was ever received, as bytes and as a number.
        self._received_hash, self._received_sum = bytes(8), 0
        self._no_controls: set[type] = set()
        self._forget_received()

    def _forget_received(self) -> None:
        self._has_received = False
        self._rids: list[str] = []
        self._lengths: list[int] = []
        self._decisions: dict[str, int] = {}

    def receive(self, scheduler: Any, requests: Sequence[Any]) -> None:
        """Note that a round of the event loop begins with these new requests."""
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
                # It is called as its route, such as ``update_weights_from_disk``, by the name of its class.
                words = "_".join(word.lower() for word in _WORDS.findall(_END_OF_NAME.sub("", kind.__name__)))
                # What the route and the scheduler's function say.
                self.writer.begin_control(words.replace("update_weight_", "update_weights_") or kind.__name__)
                break
            self._no_controls.add(kind)

    def _take(self, request: Any) -> None:
        name, rid = type(request).__name__, short_rid(getattr(request, "rid", None) or "")
        self._mix(f"{name} {rid}")
        if name == "AbortReq":
            # From 0.5.23 on one rank decides on timeouts, and tells all.
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
        """Note what was decided about a request: a number that tells the same requests in the same order."""
        self._decisions[name] = zlib.crc32(f"{rid} ".encode(errors="surrogatepass"), self._decisions.get(name, 0))

    def retract(self, requests: Sequence[Any]) -> None:
        """Note that requests are put back into the queue, as there is no room for them; before they are."""
        for request in islice(requests, _MAX_RECEIVED):
            self._decide("retract", short_rid(request.rid))

    def schedule(self, scheduler: Any, batch: Any) -> None:
        """Note that a batch begins, once ``Scheduler.forward_ct`` counts it."""
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
            # It has no results of its own.
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
        # With beams there are more rows than requests.
        if is_extend and len(batch.extend_lens) == len(batch.prefix_lens) == len(reqs):
            tokens = batch.extend_lens
            lengths = list(map(add, batch.prefix_lens, tokens))
        else:
            counted, algorithm = batch.seq_lens_cpu, batch.spec_algorithm
            if counted is not None and (algorithm is None or algorithm.is_none()) and len(counted) == len(reqs):
                lengths, is_counted = counted.tolist(), True
            else:
                # With speculative decoding that arrives from the GPU at some time, so the requests are asked.
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
        """Note that the scheduler turns to the results of a batch, the oldest that it did not process yet."""
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
        """Note that the results were processed."""
        number, self._processing = self._processing, 0
        if number:
            now = monotonic()
            if self._inner and self._inner == number + 1:
                self.writer.end(self._inner, now)
            self.writer.end(number, now)


def on_received(scheduler: Any, requests: Sequence[Any]) -> None:
    """Note that the scheduler begins a round of its event loop, with new requests that are not handled yet."""
    if _is_off:
        return
    try:
        recorder = _recorder or _begin(scheduler)
        if recorder is not None:
            recorder.receive(scheduler, requests)
    except Exception:
        _fail("what was received")


# One wrapper for all of these, which passes on what it gets, would take a tenth of the whole step.
def on_retraction(requests: Sequence[Any]) -> None:
    """Note that requests are put back into the queue, as there is no room for them; before they are."""
    if _recorder is not None:
        try:
            _recorder.retract(requests)
        except Exception:
            _fail("a retraction")


def on_scheduled(scheduler: Any, batch: Any) -> None:
    """Note that a batch begins, once ``Scheduler.forward_ct`` counts it."""
    if _recorder is not None:
        try:
            _recorder.schedule(scheduler, batch)
        except Exception:
            _fail("a step")


def on_forward(forward_batch: Any) -> None:
    """Note that a pass of the model begins, of the target or of a draft."""
    if _recorder is not None:
        try:
            _recorder.writer.begin_pass(forward_batch.forward_mode or 0)
        except Exception:
            _fail("a pass of the model")


def on_results(batch: Any, result: Any) -> None:
    """Note that the scheduler turns to the results of a batch, the oldest that it did not process yet."""
    if _recorder is not None:
        try:
            _recorder.take_results(batch, result)
        except Exception:
            _fail("what a step computed")


def on_processed() -> None:
    """Note that the results were processed."""
    if _recorder is not None:
        try:
            _recorder.end()
        except Exception:
            _fail("the end of a step")


def _fail(what: str) -> None:
    """Say once what cannot be noted, and switch the recorder off where that happens again and again."""
    global _recorder, _is_off
    recorder = _recorder
    if recorder is None or recorder.failures + 1 >= _MAX_FAILURES:
        logger.warning("crash kit: the steps of this scheduler are not recorded any more", exc_info=True)
        _recorder, _is_off = None, True
        if recorder is not None:
            # What the scheduler does from now on is not known.
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
    """Say whether the scheduler has something to do; `has_begun` is whether a batch began in the last round."""
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
