"""Hooks of SGLang's scheduler and model runner: a scheduler notes its steps, where a crash handler listens.

A step is a batch. It is noted as its requests are received, as it is scheduled, as a pass of the model begins for it,
as its results are there, and as they were processed; see `memory.steps` for where. What goes into the hash that ranks
are compared by is the same on all ranks that do the same: no clock, no address, no order of a set.

Where the scheduler overlaps batches, a step is processed after the next one was launched. That its forward pass is done
is known where the CPU computes it, or the copy of its results has arrived; nobody waits for that here.

Whatever goes wrong switches the recorder off and nothing else.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from hashlib import blake2b
from operator import add, attrgetter
from time import monotonic
from typing import Any, TypeAlias

from sglang_crashkit.memory.steps import ABSENT, MAX_REPEATS, StepWriter
from sglang_crashkit.settings import SOCKET_VARIABLE, Settings
from sglang_crashkit.srt.hooks import hand_over
from sglang_crashkit.srt.managers.scheduler_heartbeat import forward_modes

logger = logging.getLogger(__name__)

#: Names of the modes in which a batch takes in tokens, and of the one that only stands for what was received elsewhere.
_EXTENDS = frozenset({"extend", "mixed", "split_prefill", "dllm_extend"})
_DECODE, _PREBUILT = "decode", "prebuilt"
#: So many of the requests that were received for one step are named before it is scheduled.
_MAX_RECEIVED = 256
#: A decode that repeats the step before is written whole once in so many steps, and the gauge of the KV pool is asked.
_WHOLE_EVERY = MAX_REPEATS + 1
#: More batches than these are under way in no event loop.
_MAX_PENDING = 64
#: What `memory.steps.DECISIONS` calls the requests that a hierarchical cache is about.
_CACHE = {"prefetch": "ongoing_prefetch", "write_back": "ongoing_write_through"}
#: How the classes of requests for an answer begin, of what ends one, and of what only reads, which routers ask for all
#: the time; what the classes of all others end with.
_NO_CONTROL = ("Tokenized", "BatchTokenized", "Abort", "GetLoad", "GetInternalState")
_END_OF_NAME = re.compile(r"Req(Input|uest)?$")
_WORDS = re.compile(r"LoRA|[A-Z][a-z0-9]*")
#: What an abort says that is of a timeout.
_TIMED_OUT = "timeout reached"
_output_of, _input_of = attrgetter("output_ids"), attrgetter("origin_input_ids")

_OFF_WARNING = "crash kit: the steps of this scheduler are not recorded any more"

#: Looks at the requests of a scheduler, and returns what says which of them were ended since, in their order.
_Look: TypeAlias = Callable[[Any], Callable[[], list[Any]]]


def _look_at_waiting(scheduler: Any) -> Callable[[], list[Any]]:
    before = scheduler.waiting_queue

    def ended() -> list[Any]:
        # It may be long. Another list is made only where somebody was ended.
        if scheduler.waiting_queue is before:
            return []
        left = set(map(id, scheduler.waiting_queue))
        return [one for one in before if id(one) not in left]

    return ended


def _look_at_running(scheduler: Any) -> Callable[[], list[Any]]:
    before = [one for one in scheduler.running_batch.reqs if getattr(one, "to_finish", None) is None]
    return lambda: [one for one in before if getattr(one, "to_finish", None) is not None]


#: Time limits of requests, what ends those that are over them by the rank's own clock, and what finds who they are.
_TIME_LIMITS: tuple[tuple[str, str, _Look], ...] = (
    ("SGLANG_REQ_WAITING_TIMEOUT", "_abort_on_waiting_timeout", _look_at_waiting),
    ("SGLANG_REQ_RUNNING_TIMEOUT", "_abort_on_running_timeout", _look_at_running),
)

_recorder: StepRecorder | None = None
_is_off = False


class StepRecorder:
    """The steps of one scheduler; `modes` has the names of the release's forward modes by their number."""

    def __init__(self, scheduler: Any, writer: StepWriter, modes: dict[int, str]) -> None:
        self.writer = writer
        self._extends = frozenset(number for number, name in modes.items() if name in _EXTENDS)
        numbers = {name: number for number, name in modes.items()}
        self._decode, self._prebuilt = numbers.get(_DECODE, -1), numbers.get(_PREBUILT, -1)
        self._is_cpu = str(getattr(scheduler, "device", None)) == "cpu"
        #: While a stage of a pipeline has nothing to do in one round, another batch may be under way.
        self._is_staged = getattr(scheduler, "pp_size", 1) > 1
        self._free = _gauge_of(scheduler)
        self._kv_size = _number_of(getattr(scheduler, "max_total_num_tokens", None))
        self._grammars = getattr(scheduler, "grammar_manager", scheduler)
        self._cache = [
            (name, attribute)
            for name, attribute in _CACHE.items()
            # The cache of newer releases has them in any case.
            if getattr(scheduler, "enable_hierarchical_cache", True)
            and hasattr(getattr(scheduler, "tree_cache", None), attribute)
        ]
        self._began = monotonic()
        #: Steps whose results may not be processed yet; the one whose results are; the last one whose results were.
        self._pending: deque[int] = deque(maxlen=_MAX_PENDING)
        self._processing = self._processed = 0
        #: Whether there was a step of requests that came from a prefill server; the last such step that holds an idle
        #: batch, and the step of that.
        self._has_prebuilt = False
        self._inner_of = self._inner = 0
        #: Whether a decode of the same requests has nothing to add to the step before, and what that was like.
        self._is_steady = False
        self._steady_reqs: list[Any] = []
        self._steady_waiting = 0
        #: The requests whose results are being processed, and whether the tokens of requests are numbers so far.
        self._reqs: Sequence[Any] = ()
        self._has_tokens = True
        #: Of all that was ever received, as bytes and as a number.
        self._received_hash, self._received_sum = bytes(8), 0
        self._no_controls: set[type] = set()
        self._forget_received()

    def _forget_received(self) -> None:
        self._received = self._retracted = 0
        self._rids: list[str] = []
        self._lengths: list[int] = []
        self._decisions: dict[str, int] = {}

    def receive(self, scheduler: Any, requests: Sequence[Any]) -> None:
        """Note that a round of the event loop begins with these new requests."""
        self._began = now = monotonic()
        if self._is_steady and not requests and scheduler.last_batch is not None:
            self.writer.go_round(now)
            return
        number = scheduler.forward_ct + 1
        if requests:
            self._is_steady = False
            self._received += len(requests)
            for request in requests:
                self._take(request)
            self._received_sum = int.from_bytes(self._received_hash, "little")
            self.writer.begin_round(number, now)
            self.writer.receive(number, now, list(self._rids), self._lengths, self._received)
            if not self._no_controls.issuperset(map(type, requests)):
                self._note_control(requests)
        elif self._received or scheduler.waiting_queue or scheduler.last_batch is not None:
            self._is_steady = False
            self.writer.begin_round(number, now)
        else:
            if not self._is_staged:
                self._pending.clear()
            self._is_steady, self._steady_reqs = False, []
            self.writer.begin_round(0, now)

    def _note_control(self, requests: Sequence[Any]) -> None:
        """Note the first control request among new ones; classes that are none are remembered."""
        for kind in dict.fromkeys(map(type, requests)):
            if not kind.__name__.startswith(_NO_CONTROL):
                self.writer.begin_control(name_of_control(kind.__name__))
                break
            self._no_controls.add(kind)

    def _take(self, request: Any) -> None:
        name = type(request).__name__
        rid = str(getattr(request, "rid", None) or "")
        said = f"{name} {rid}".encode(errors="surrogatepass")
        self._received_hash = blake2b(said, key=self._received_hash, digest_size=8).digest()
        if name == "AbortReq":
            # From 0.5.23 on one rank decides on timeouts, and tells all.
            self._decide("timeout" if _TIMED_OUT in str(getattr(request, "abort_message", "")) else "abort", rid)
        elif name.startswith("BatchTokenized"):
            for one in request.batch:
                self._take(one)
        elif name.startswith("Tokenized") and len(self._rids) < _MAX_RECEIVED:
            self._rids.append(rid)
            self._lengths.append(len(getattr(request, "input_ids", None) or ()))

    def _decide(self, name: str, rid: str) -> None:
        """Note what was decided about a request: a number that tells the same requests in the same order."""
        self._is_steady = False
        self._decisions[name] = zlib.crc32(f"{rid} ".encode(errors="surrogatepass"), self._decisions.get(name, 0))

    def retract(self, requests: Sequence[Any]) -> None:
        """Note that requests are put back into the queue, as there is no room for them; before they are."""
        self._retracted += len(requests)
        for request in requests:
            self._decide("retract", request.rid)

    def watch_timeouts(self, scheduler: Any) -> None:
        """Have it noted which requests this rank ends by its own clock, as releases do where all ranks are not told.

        Where no such time limit is set the scheduler is left as it is.
        """
        for variable, name, look in _TIME_LIMITS:
            ends = getattr(scheduler, name, None)
            if ends is not None and os.environ.get(variable, "-1") not in ("", "-1", "0"):
                setattr(scheduler, name, functools.partial(self._note_timeouts, ends, scheduler, look))

    def _note_timeouts(self, ends: Callable[[], Any], scheduler: Any, look: _Look) -> Any:
        if _recorder is not self:
            return ends()
        ended: Callable[[], list[Any]] = list
        try:
            ended = look(scheduler)
        except Exception:
            logger.warning(_OFF_WARNING, exc_info=True)
            _switch_off()
        result = ends()
        try:
            for one in ended():
                self._decide("timeout", one.rid)
        except Exception:
            logger.warning(_OFF_WARNING, exc_info=True)
            _switch_off()
        return result

    def schedule(self, scheduler: Any, batch: Any) -> None:
        """Note that a batch begins, once ``Scheduler.forward_ct`` counts it."""
        number = scheduler.forward_ct
        # By their number, so that all ranks take the same.
        if (
            self._is_steady
            and number % _WHOLE_EVERY
            and batch is scheduler.running_batch
            # Lists of the same objects are equal, and no object is looked at.
            and batch.reqs == self._steady_reqs
            and batch.forward_mode == self._decode
            and len(scheduler.waiting_queue) == self._steady_waiting
        ):
            self.writer.repeat(number, self._began)
            self._pending.append(number)
            return
        self._schedule_whole(scheduler, batch, number)

    def _schedule_whole(self, scheduler: Any, batch: Any, number: int) -> None:
        reqs, mode = batch.reqs, int(batch.forward_mode or 0)
        rids = [one.rid for one in reqs]
        tokens: Sequence[int] | None = None
        lengths: Sequence[int]
        is_steady = False
        # With beams there are more rows than requests.
        if mode in self._extends and len(batch.extend_lens) == len(batch.prefix_lens) == len(reqs):
            tokens = batch.extend_lens
            lengths = [done + new for done, new in zip(batch.prefix_lens, tokens, strict=True)]
        else:
            counted, algorithm = batch.seq_lens_cpu, batch.spec_algorithm
            if counted is not None and (algorithm is None or algorithm.is_none()) and len(counted) == len(reqs):
                lengths = counted.tolist()
                is_steady = mode == self._decode and not self._cache
            else:
                # With speculative decoding that arrives from the GPU at some time, so the requests are asked.
                inputs, outputs = map(len, map(_input_of, reqs)), map(len, map(_output_of, reqs))
                lengths = list(map(add, inputs, outputs))
        decisions = self._decisions
        queue = getattr(self._grammars, "grammar_queue", None)
        if queue:
            decisions["grammar"] = len(queue)
        for name, attribute in self._cache:
            decisions[name] = len(getattr(scheduler.tree_cache, attribute))
        running, waiting = len(scheduler.running_batch.reqs), len(scheduler.waiting_queue)
        free = ABSENT if self._free is None else self._free()
        self.writer.schedule(
            number,
            self._began,
            mode,
            rids,
            lengths,
            tokens,
            sum(tokens) if tokens is not None else (mode in self._extends and batch.extend_num_tokens) or len(rids),
            # Not `Facts`, whose making takes longer than all that is done with it.
            (running, waiting, self._retracted, self._received, free, self._kv_size),
            decisions,
            self._received_sum,
        )
        self._is_steady = is_steady and not queue
        self._steady_reqs, self._steady_waiting = list(reqs) if is_steady else [], waiting
        if self._inner_of and self._inner_of == number - 1:
            # It has no results of its own.
            self._inner = number
        else:
            self._pending.append(number)
        if mode == self._prebuilt:
            self._has_prebuilt = True
            self._inner_of = number if batch.inner_idle_batch is not None else 0
        if self._received or decisions or self._retracted:
            self._forget_received()

    def take_results(self, batch: Any, result: Any) -> None:
        """Note that the scheduler turns to the results of a batch, the oldest that it did not process yet."""
        number = getattr(batch, "forward_iter", None) or self._oldest()
        if number:
            # What a prefill server sent was not sampled here.
            self._reqs = () if self._has_prebuilt and batch.forward_mode == self._prebuilt else batch.reqs
            if self._is_cpu or _has_arrived(result):
                self.writer.begin_results(number)
            else:
                self.writer.wait_for_results(number)
        self._processing = self._processed = number

    def _oldest(self) -> int:
        """Return the oldest step whose results nobody turned to yet, 0 without one."""
        pending = self._pending
        while pending and pending[0] <= self._processed:
            pending.popleft()
        return pending[0] if pending else 0

    def end(self) -> None:
        """Note that the results were processed."""
        number = self._processing
        if not number:
            return
        self._processing = 0
        if self._inner and self._inner == number + 1:
            self.writer.end(self._inner, monotonic())
        reqs, self._reqs = self._reqs, ()
        try:
            try:
                # The last token of each request, which all ranks know alike, whether or not this step sampled it.
                tokens = tuple([one.output_ids[-1] for one in reqs]) if self._has_tokens else ()
            except IndexError:
                # There is none before the prompt is through.
                tokens = tuple([one.output_ids[-1] if len(one.output_ids) else 0 for one in reqs])
            self.writer.end(number, monotonic(), tokens)
        except (AttributeError, TypeError, ValueError):
            # It takes numbers and no tensors, whose value would have to be waited for.
            self._has_tokens = False
            self.writer.end(number, monotonic())


def on_received(scheduler: Any, requests: Sequence[Any]) -> None:
    """Note that the scheduler begins a round of its event loop, with new requests that are not handled yet."""
    if _is_off:
        return
    try:
        recorder = _recorder or _begin(scheduler)
        if recorder is not None:
            recorder.receive(scheduler, requests)
    except Exception:
        logger.warning(_OFF_WARNING, exc_info=True)
        _switch_off()


# One wrapper for all of these, which passes on what it gets, would take a tenth of the whole step.
def on_retraction(requests: Sequence[Any]) -> None:
    """Note that requests are put back into the queue, as there is no room for them; before they are."""
    if _recorder is not None:
        try:
            _recorder.retract(requests)
        except Exception:
            logger.warning(_OFF_WARNING, exc_info=True)
            _switch_off()


def on_scheduled(scheduler: Any, batch: Any) -> None:
    """Note that a batch begins, once ``Scheduler.forward_ct`` counts it."""
    if _recorder is not None:
        try:
            _recorder.schedule(scheduler, batch)
        except Exception:
            logger.warning(_OFF_WARNING, exc_info=True)
            _switch_off()


def on_forward(forward_batch: Any) -> None:
    """Note that a pass of the model begins, of the target or of a draft."""
    if _recorder is not None:
        try:
            _recorder.writer.begin_pass(forward_batch.forward_mode or 0)
        except Exception:
            logger.warning(_OFF_WARNING, exc_info=True)
            _switch_off()


def on_results(batch: Any, result: Any) -> None:
    """Note that the scheduler turns to the results of a batch, the oldest that it did not process yet."""
    if _recorder is not None:
        try:
            _recorder.take_results(batch, result)
        except Exception:
            logger.warning(_OFF_WARNING, exc_info=True)
            _switch_off()


def on_processed() -> None:
    """Note that the results were processed."""
    if _recorder is not None:
        try:
            _recorder.end()
        except Exception:
            logger.warning(_OFF_WARNING, exc_info=True)
            _switch_off()


def _begin(scheduler: Any) -> StepRecorder | None:
    """Tell the crash handler where the steps are; None where nobody wants to know."""
    global _recorder, _is_off
    _is_off = True
    settings = Settings.from_environ()
    if not settings.enabled or not settings.steps or not os.environ.get(SOCKET_VARIABLE):
        return None
    modes = forward_modes()
    writer = StepWriter(modes)
    try:
        recorder = StepRecorder(scheduler, writer, {int(number): name for number, name in modes.items()})
    except BaseException:
        writer.close()
        raise
    if not hand_over("steps", writer, "the steps of this scheduler are not recorded", modes=modes):
        return None
    recorder.watch_timeouts(scheduler)
    _recorder, _is_off = recorder, False
    return recorder


def _switch_off() -> None:
    global _recorder, _is_off
    recorder, _recorder, _is_off = _recorder, None, True
    if recorder is not None:
        # What it was about from now on is not known.
        recorder.writer.begin_round(0, monotonic())


def _gauge_of(scheduler: Any) -> Callable[[], int] | None:
    """Return what says how many tokens the KV pool has room for, with those that it keeps for reuse only.

    None where this release or this kind of pool cannot say.
    """
    allocator: Any = getattr(scheduler, "token_to_kv_pool_allocator", None)
    cache: Any = getattr(scheduler, "tree_cache", None)

    def with_reusable() -> int:
        return int(allocator.available_size() + cache.evictable_size())

    def without() -> int:
        return int(allocator.available_size())

    for gauge in (with_reusable, without):
        try:
            gauge()
        except Exception:  # noqa: BLE001, S112 - whatever a kind of pool says to that
            continue
        return gauge
    return None


def name_of_control(kind: str) -> str:
    """Return what a control request is called, such as ``update_weights_from_disk``, by the name of its class."""
    words = "_".join(word.lower() for word in _WORDS.findall(_END_OF_NAME.sub("", kind)))
    # What the route and the scheduler's function say.
    return words.replace("update_weight_", "update_weights_") or kind


def _number_of(value: Any) -> int:
    return value if isinstance(value, int) else ABSENT


def _has_arrived(result: Any) -> bool:
    """Say whether the copy of a batch's results is known to have arrived, without waiting for it."""
    copied = getattr(result, "copy_done", None)
    try:
        return copied is not None and bool(copied.query())
    except Exception:  # noqa: BLE001 - the error of a kernel, which the scheduler is about to be told of
        return False
