"""The last steps of a scheduler: memory that the scheduler writes to and its crash handler reads.

The memory is sealed (see `ring.map_sealed`) and allocated in full at creation, so that no store raises SIGBUS::

    header     one page: magic number; state of the scheduler, in words of 64 bits; name of a control request;
               names of the forward modes by their number, as JSON
    steps      `STEPS` slots of 128 bytes; step n is in slot n modulo `STEPS`
    data       the rest: ids and lengths of each step's requests; the newest overwrite the oldest

A step holds the offsets of its requests in the data. Steps with the same requests share one list of ids. Consecutive
decode steps share the lengths too, and store how many tokens each request has gained since.

There is no lock, and a writer may be killed at any instruction. So a reader accepts the body of a step, and its pieces
of the data, only if their checksums are right. Two fields change while a step runs, each by a single store: its phase,
which is in the same word as the step's number, and its end time.
"""

from __future__ import annotations

import json
import math
import os
import struct
import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from zlib import crc32

from sglang_crashkit.memory.heartbeat import time_or_zero
from sglang_crashkit.memory.ring import RingError, is_sealed, map_sealed
from sglang_crashkit.model.step import MAX_RID, PHASES, Step, StepRequest, short_rid

NAME = "sglang-crashkit-steps"
STEPS = 1000
RECEIVED, SCHEDULED, FORWARD_BEGUN, FORWARD_DONE, PROCESSED = range(len(PHASES))
#: The decisions that lead to a step, in the order in which the record has them.
DECISIONS = ("abort", "retract", "grammar", "prefetch", "write_back", "timeout")
#: The requests of one step beyond this number are counted, and not recorded.
MAX_REQUESTS = 2048

_VERSION = 8
_MAGIC = (0x5347_4B53_5450_0000 | _VERSION).to_bytes(8, sys.byteorder)
PAGE, SLOT = 4096, 128
#: Offset of the first slot, and length of a slot, in words of 64 bits.
_FIRST_WORD, _WORDS = PAGE // 8, SLOT // 8
DATA, DATA_BYTES = PAGE + STEPS * SLOT, 2_000_000
SIZE = DATA + DATA_BYTES
#: Words of the header. ROUND: when the last round of the event loop began. OPEN: the number of the step that the round
#: becomes, 0 for the one after the newest, or IDLE. AT: the step whose results the scheduler waits for, 0 for none.
_ROUND, _OPEN, _AT, _UNUSED = 8, 9, 10, 11
_IDLE = 0xFFFF_FFFF_FFFF_FFFF
#: Further byte offsets in the header: length and name of the control request of this round; names of the forward modes.
_CONTROL, _LONGEST_CONTROL, _MODES = 128, 64, 512
#: A slot: one word with step number, forward mode of the last pass, and phase; end time; checksum and body, which does
#: not change.
NUMBER_AT, _ENDED, FIXED = 16, 1, 16
_MARKS = struct.Struct("@Qd")
#: The body. HEAD: step number, begin time, rolling hash, tokens that each request has gained beyond its length. REST,
#: which consecutive decode steps share: offset, size and checksum of the ids; offset and checksum of the lengths;
#: number of listed requests, and of all; number of tokens; mode; whether token counts follow the lengths; bit mask of
#: the decisions, and their values.
_HEAD, _REST = struct.Struct("<QdQB"), struct.Struct("<5I3I3B6Q")
BODY = struct.Struct(_HEAD.format + _REST.format[1:])
CHECKED = struct.Struct(f"<I{BODY.size}s")
NO_DECISIONS = (0,) * (1 + len(DECISIONS))
_ID_LENGTH = struct.Struct("<H")
#: Size of the cache of encoded ids.
MAX_KNOWN = 4096
#: A shared list of ids is written again after this many bytes, so that it is not overwritten before its steps are.
_FRESH = DATA_BYTES // 2
#: The lengths of one step are shared by at most this many later steps.
_MAX_ADDED = 255
#: A reader returns at most this many requests, those of the newest steps.
MAX_READ = 65_536


class StepWriter:
    """The scheduler's side; not thread-safe. All times are in seconds of the monotonic clock.

    Raises:
        RingError: the kernel gives no memory or no descriptor.
    """

    def __init__(self, modes: Mapping[str, str] | None = None) -> None:
        head = _MAGIC.ljust(_MODES, b"\0") + json.dumps(modes or {}).encode()[: PAGE - _MODES]
        self.fd, self._map = map_sealed(SIZE, NAME, head, SIZE)
        self._whole = memoryview(self._map)
        self._words = self._whole[: SIZE // 8 * 8].cast("Q")
        self._times = self._whole[: SIZE // 8 * 8].cast("d")
        self._agreed = 0
        self._known = _Encoded()
        #: Where the next data goes, as an offset that does not wrap around.
        self._head = 0
        #: The ids that were written last; their offset in the data, size and checksum.
        self._rids: Sequence[str] = ()
        self._ids = 0, 0, 0
        #: Of the step written last: hash of what ranks agree on, sum of lengths, requests, tokens each gained, `_REST`.
        self._same = self._sum = self._size = self._added = 0
        self._rest = b""
        #: The step that was scheduled last, the index of its first word, and that word without mode and phase.
        self._newest, self._place, self._word = 0, _UNUSED, 0

    def close(self) -> None:
        """Free the memory, unless another process holds it."""
        for view in (self._words, self._times, self._whole):
            view.release()
        self._map.close()
        os.close(self.fd)

    def begin_round(self, number: int, now: float) -> None:
        """Record that a round of the event loop begins, for step `number`; 0 means that the scheduler is idle."""
        words = self._words
        self._times[_ROUND] = now
        words[_OPEN] = number or _IDLE
        words[_AT] = 0
        self._map[_CONTROL] = 0

    def begin_control(self, name: str) -> None:
        """Record that a control request is handled in this round, before the next batch."""
        told = name.encode(errors="replace")[:_LONGEST_CONTROL]
        self._map[_CONTROL + 1 : _CONTROL + 1 + len(told)] = told
        # The length is stored last, so that a reader never sees half of a name.
        self._map[_CONTROL] = len(told)

    def receive(self, number: int, began: float, rids: Sequence[str], lengths: Sequence[int]) -> None:
        """Record the requests that were received for a future step, and the `lengths` of their inputs, in tokens."""
        self.schedule(number, began, 0, rids, lengths, [0] * len(rids), 0, {}, 0, RECEIVED)

    def schedule(
        self,
        number: int,
        began: float,
        mode: int,
        rids: Sequence[str],
        lengths: Sequence[int],
        tokens: Sequence[int] | None,
        total: int,
        decisions: Mapping[str, int],
        agreed: int,
        phase: int = SCHEDULED,
    ) -> None:
        """Record that a batch was scheduled in the round that `began` then; with `phase` `RECEIVED`, that it may be.

        The forward `mode` is the release's number for it, 0 to 255. The requests are `rids`, a list that the caller
        must not change later; each has `lengths` tokens, of which the step computes `tokens` (one each if None), and
        `total` in all. Of the `decisions` only those in `DECISIONS` are recorded. `agreed` is a number for whatever
        else must be the same on all ranks.

        Raises:
            OverflowError, TypeError: a length is out of range or no number; nothing was recorded.
        """
        decided = NO_DECISIONS
        if decisions:
            mask = sum(1 << place for place, name in enumerate(DECISIONS) if name in decisions)
            decided = (mask, *(decisions.get(name, 0) & _IDLE for name in DECISIONS))
        size = len(rids)
        if size > MAX_REQUESTS:
            rids, lengths = rids[:MAX_REQUESTS], lengths[:MAX_REQUESTS]
            tokens = None if tokens is None else tokens[:MAX_REQUESTS]
        raw = array("I", lengths).tobytes()
        if tokens is not None:
            raw += array("I", tokens).tobytes()
        if rids != self._rids or self._head - self._ids[0] > _FRESH:
            try:
                ids = b"".join(map(self._known.__getitem__, rids))
            except TypeError:
                # An id that is not text.
                ids = b"".join(self._known[short_rid(rid)] for rid in rids)
            self._ids = self._append(ids), len(ids), crc32(ids)
            self._rids = rids
        ids_at, ids_size, ids_sum = self._ids
        lengths_at = self._append(raw)
        self._added, self._sum, self._size = 0, sum(lengths), size
        # Only numbers: Python's hash of text and bytes differs between processes.
        self._same = hash((mode, size, total, agreed, ids_sum, *decided))
        # fmt: off
        self._rest = _REST.pack(
            ids_at % DATA_BYTES, ids_size, ids_sum, lengths_at % DATA_BYTES, crc32(raw),
            len(rids), size, total, mode, tokens is not None, *decided,
        )
        # fmt: on
        self._put(number, began, phase)

    def schedule_again(self, number: int, began: float) -> bool:
        """Record that the last batch goes on, each request with a token more; False after `_MAX_ADDED` such steps."""
        if self._added == _MAX_ADDED:
            return False
        self._added += 1
        self._sum += self._size
        self._put(number, began, SCHEDULED)
        return True

    def _put(self, number: int, began: float, phase: int) -> None:
        words, told = self._words, 0
        if phase == SCHEDULED:
            # A rolling hash: once ranks differ in a step, all their later hashes differ.
            self._agreed = told = hash((self._agreed, number, self._sum, self._same)) & _IDLE
        body = _HEAD.pack(number, began, told, self._added) + self._rest
        slot = number % STEPS
        place = _FIRST_WORD + slot * _WORDS
        words[place] = 0
        CHECKED.pack_into(self._map, PAGE + slot * SLOT + FIXED, crc32(body), body)
        words[place] = number << NUMBER_AT | phase
        if phase == SCHEDULED:
            self._newest, self._place, self._word = number, place, number << NUMBER_AT
            words[_OPEN] = 0

    def leave_out(self) -> None:
        """Note that the batch that was scheduled last was not recorded, so that its forward passes change no step."""
        self._place, self._word = _UNUSED, 0

    def begin_pass(self, mode: int) -> None:
        """Record that a forward pass, in this forward mode, begins for the batch that was scheduled last."""
        self._words[self._place] = self._word | mode << 8 | FORWARD_BEGUN

    def wait_for_results(self, number: int) -> None:
        """Record that the scheduler begins to process the results of a step, which may not have arrived yet."""
        self._words[_AT] = number

    def begin_results(self, number: int) -> None:
        """Record that the scheduler begins to process the results of a step, which have arrived."""
        if self._newest - number < STEPS - 1:
            self._set_phase(number, FORWARD_DONE)

    def end(self, number: int, now: float) -> None:
        """Record that a step's results were processed; do nothing if the step was overwritten."""
        if self._newest - number < STEPS - 1:
            self._times[_FIRST_WORD + number % STEPS * _WORDS + _ENDED] = now
            self._set_phase(number, PROCESSED)

    def _set_phase(self, number: int, phase: int) -> None:
        place = _FIRST_WORD + number % STEPS * _WORDS
        self._words[place] = self._words[place] & ~0xFF | phase

    def _append(self, data: bytes) -> int:
        """Append to the data; return its offset, which does not wrap around."""
        place, start = self._head, self._head % DATA_BYTES
        if start + len(data) > DATA_BYTES:
            place, start = place + DATA_BYTES - start, 0
        self._map[DATA + start : DATA + start + len(data)] = data
        self._head = place + len(data)
        return place


class _Encoded(dict[str, bytes]):
    """A cache of encoded ids, by id; a missing id is encoded, and cached unless it is longer than `MAX_RID`."""

    def __missing__(self, rid: str) -> bytes:
        text = short_rid(rid).encode(errors="surrogatepass")
        encoded = _ID_LENGTH.pack(len(text)) + text
        if len(rid) <= MAX_RID:
            if len(self) >= MAX_KNOWN:
                self.clear()
            self[rid] = encoded
        return encoded


@dataclass(frozen=True)
class LastSteps:
    """What a scheduler's record of steps holds."""

    steps: tuple[Step, ...]  # the intact steps, by number; at most the newest `STEPS`
    #: The step that the scheduler is in: the step whose results it waits for, else the newest unfinished step; None if
    #: the scheduler is idle.
    current: Step | None
    #: Name of the control request of the current round, as long as no batch began in it; empty without one.
    control: str = ""


class StepReader:
    """The crash handler's side; `descriptor` must stay open; by default `modes` are those in the record.

    Raises:
        RingError: it is no record of steps, has another layout, or is not sealed, so that it may shrink.
        OSError: it cannot be read; `read` raises it too.
    """

    def __init__(self, descriptor: int, modes: Mapping[int, str] | None = None) -> None:
        if not is_sealed(descriptor, SIZE, _MAGIC):
            raise RingError("it is not a record of steps, or of another layout")
        self._fd = descriptor
        self._modes = modes or _modes_in(os.pread(descriptor, PAGE - _MODES, _MODES))

    def read(self) -> LastSteps:
        """Return what the record holds now, without its damaged steps; takes bounded time even for arbitrary bytes."""
        data = os.pread(self._fd, SIZE, 0)
        round_at = time_or_zero(struct.unpack_from("@d", data, 8 * _ROUND)[0])
        opened, at = struct.unpack_from("@2Q", data, 8 * _OPEN)
        # The control request is current until a batch is scheduled.
        size = min(data[_CONTROL], _LONGEST_CONTROL) if opened else 0
        control = data[_CONTROL + 1 : _CONTROL + 1 + size].decode(errors="replace")
        found = _Requests(data)
        # Newest first: they get their requests if there is not room for the requests of all steps.
        starts = sorted(range(PAGE, DATA, SLOT), key=lambda start: _MARKS.unpack_from(data, start), reverse=True)
        found_steps = (self._step_at(data, start, found) for start in starts)
        steps = {step.number: step for step in found_steps if step is not None}
        newest = max(steps, default=0)
        if not opened and steps and round_at > steps[newest].began:
            opened = newest + 1
        if opened not in (0, _IDLE) and (not steps or newest < opened < newest + STEPS):
            newest = opened
            steps[opened] = Step(opened, round_at, None, PHASES[RECEIVED], "", (), 0, 0)
        kept = tuple(steps[number] for number in sorted(steps) if number > newest - STEPS)
        return LastSteps(kept, _current_of(kept, at, is_idle=opened == _IDLE), control)

    def _step_at(self, data: bytes, start: int, found: _Requests) -> Step | None:
        """Return the step in a slot; None if it is damaged."""
        word, ended = _MARKS.unpack_from(data, start)
        checksum, body = CHECKED.unpack_from(data, start + FIXED)
        if not word or crc32(body) != checksum:
            return None
        number, began, agreed, added, *rest = BODY.unpack(body)
        is_here = word >> NUMBER_AT == number and PAGE + number % STEPS * SLOT == start
        if not is_here or not math.isfinite(began):
            return None
        ids_at, ids_size, ids_sum, lengths_at, lengths_sum, count, size, total, mode, has_tokens, *rest = rest
        mask, *values = rest
        phase, forward = min(word & 0xFF, PROCESSED), word >> 8 & 0xFF
        return Step(
            number=number,
            began=time_or_zero(began),
            ended=time_or_zero(ended) if phase == PROCESSED else None,
            phase=PHASES[phase],
            mode=self._modes.get(mode, str(mode)) if mode else "",
            forward=self._modes.get(forward, "") if forward else "",
            requests=found.of(count, (ids_at, ids_size, ids_sum), (lengths_at, lengths_sum), bool(has_tokens), added),
            size=size,
            tokens=total,
            decisions={name: values[at] for at, name in enumerate(DECISIONS) if mask & 1 << at},
            agreed_hash=agreed,
        )


def _current_of(steps: Sequence[Step], at: int, *, is_idle: bool) -> Step | None:
    """Return the step that a scheduler is in; `at` is the step whose results it waits for. None if it is in no step.

    An idle scheduler has no batch to launch, but a pipeline stage may still process the results of an earlier batch.
    """
    processed = max((step.number for step in steps if step.phase == PHASES[PROCESSED]), default=0)
    left = [step for step in steps if step.phase != PHASES[PROCESSED]]
    waited_for = [step for step in left if step.number == at]
    in_results = [step for step in left if step.phase == PHASES[FORWARD_DONE] and step.number > processed]
    # Prefer a scheduled step that is in progress to one that was only received.
    scheduled = [step for step in left if step.phase != PHASES[RECEIVED]]
    ways = (waited_for, in_results) if is_idle else (waited_for, in_results, scheduled, left)
    return next((found[-1] for found in ways if found), None)


def _modes_in(data: bytes) -> dict[int, str]:
    try:
        return {int(number): str(name) for number, name in dict(json.loads(data.rstrip(b"\0"))).items()}
    except (ValueError, TypeError, RecursionError):
        return {}


class _Requests:
    """Decodes the requests of steps, as far as they are intact and within the reader's limits of size and time."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._requests_left, self._bytes_left = MAX_READ, 2 * DATA_BYTES
        #: A list of ids that several steps share is decoded once.
        self._rids: dict[tuple[int, int, int], list[str]] = {}

    def of(
        self, count: int, ids: tuple[int, int, int], lengths: tuple[int, int], has_tokens: bool, added: int
    ) -> tuple[StepRequest, ...]:
        """Return the `count` requests of a step; none if they were overwritten.

        `ids` is offset, size and checksum of their ids. `lengths` is offset and checksum of their lengths, which token
        counts follow if `has_tokens`; each request has gained `added` tokens since.
        """
        if not 0 < count <= min(MAX_REQUESTS, self._requests_left):
            return ()
        self._requests_left -= count
        rids = self._rids.get(ids)
        if rids is None:
            start, size, checksum = ids
            rids, data, place = [], self._take(size, start, checksum), 0
            while place + _ID_LENGTH.size <= len(data) and len(rids) <= MAX_REQUESTS:
                (size,) = _ID_LENGTH.unpack_from(data, place)
                place += _ID_LENGTH.size
                rids.append(short_rid(data[place : place + size].decode(errors="backslashreplace")))
                place += size
            self._rids[ids] = rids
        numbers = array("I", self._take(4 * count * (1 + has_tokens), *lengths))
        if len(rids) != count or not numbers:
            return ()
        tokens = numbers[count:] if has_tokens else (1,) * count
        return tuple(map(StepRequest, rids, tokens, (number + added for number in numbers[:count])))

    def _take(self, size: int, start: int, checksum: int) -> bytes:
        if size > self._bytes_left:
            return b""
        self._bytes_left -= size
        found = self._data[DATA + start : DATA + start + size]
        return found if len(found) == size and crc32(found) == checksum else b""
