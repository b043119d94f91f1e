"""The last steps of a scheduler: memory that the scheduler writes to and its crash handler reads.

The memory is sealed (see `ring.map_sealed`), and all of it is there from the beginning, so that no store ever ends
in SIGBUS::

    header     one page: magic number; what the scheduler does, in words of 64 bits; a control request, by its name;
               names of the forward modes by their number, as JSON
    steps      `STEPS` slots of 128 bytes; the step of number n lies in slot n modulo `STEPS`
    data       the rest; the newest overwrites the oldest: ids and lengths of each step's requests

A step says where in the data its requests lie. Steps of the same requests share one list of ids. Consecutive decode
steps share the lengths too, and store how many tokens each request has gained since.

There is no lock, and a writer may be killed anywhere. So a reader believes only what has the right checksum: the body
of a step, and its pieces of the data. What changes as a step goes on is stored by single instructions: how far it came,
which is in the word that has the step's number, and when it ended.
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
#: What is decided on the way to a step, by its place in the record.
DECISIONS = ("abort", "retract", "grammar", "prefetch", "write_back", "timeout")
#: More requests of one step than these are counted, and not recorded.
MAX_REQUESTS = 2048

_VERSION = 8
_MAGIC = (0x5347_4B53_5450_0000 | _VERSION).to_bytes(8, sys.byteorder)
PAGE, SLOT = 4096, 128
#: Where the slots begin, and how long each is, in words of 64 bits.
_FIRST_WORD, _WORDS = PAGE // 8, SLOT // 8
DATA, DATA_BYTES = PAGE + STEPS * SLOT, 2_000_000
SIZE = DATA + DATA_BYTES
#: Words of the header. ROUND: when the last round of the event loop began. OPEN: the number of the step that it
#: becomes, 0 for the one after the newest, or IDLE. AT: the step whose results the scheduler waits for, 0 for none.
_ROUND, _OPEN, _AT, _UNUSED = 8, 9, 10, 11
_IDLE = 0xFFFF_FFFF_FFFF_FFFF
#: Behind them in the header: length and name of the control request of this round; names of the forward modes.
_CONTROL, _LONGEST_CONTROL, _MODES = 128, 64, 512
#: A slot: number, forward mode of the last pass and phase in one word; when it ended; what does not change, behind its
#: checksum.
NUMBER_AT, _ENDED, FIXED = 16, 1, 16
_MARKS = struct.Struct("@Qd")
#: Number, when it began, rolling hash, how many tokens each request has more than the lengths say. Then what stays as a
#: decode goes on: place, size and checksum of the ids, place and checksum of the lengths; how many requests are listed,
#: and how many there are; how many tokens, mode, whether tokens lie behind the lengths; which decisions there are, and
#: their numbers.
_HEAD, _REST = struct.Struct("<QdQB"), struct.Struct("<5I3I3B6Q")
BODY = struct.Struct(_HEAD.format + _REST.format[1:])
CHECKED = struct.Struct(f"<I{BODY.size}s")
NO_DECISIONS = (0,) * (1 + len(DECISIONS))
_ID_LENGTH = struct.Struct("<H")
#: So many ids are kept ready to be written.
MAX_KNOWN = 4096
#: After so many bytes a list of ids is written again, so that it is there as long as its steps.
_FRESH = DATA_BYTES // 2
#: So many steps share the lengths of one, at most.
_MAX_ADDED = 255
#: A reader reads so many requests at most, of the newest steps.
MAX_READ = 65_536


class StepWriter:
    """The scheduler's end; for one thread. All times are in seconds of the monotonic clock.

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
        #: Where the next data goes, counted on over the end.
        self._head = 0
        #: The ids that were written last, and their place in the data, size and checksum.
        self._rids: Sequence[str] = ()
        self._ids = 0, 0, 0
        #: Of the step that was written last: what agrees, the sum of its lengths, its size, and the rest of its body.
        self._same = self._sum = self._size = self._added = 0
        self._rest = b""
        #: The step that was scheduled last, the place of its first word, and that word without mode and phase.
        self._newest, self._place, self._word = 0, _UNUSED, 0

    def close(self) -> None:
        """Give the memory back, unless another process holds it."""
        for view in (self._words, self._times, self._whole):
            view.release()
        self._map.close()
        os.close(self.fd)

    def begin_round(self, number: int, now: float) -> None:
        """Note that a round of the event loop begins, which is to become step `number`, 0: there is nothing to do."""
        words = self._words
        self._times[_ROUND] = now
        words[_OPEN] = number or _IDLE
        words[_AT] = 0
        self._map[_CONTROL] = 0

    def begin_control(self, name: str) -> None:
        """Note that a control request is handled in this round, before the next batch."""
        told = name.encode(errors="replace")[:_LONGEST_CONTROL]
        self._map[_CONTROL + 1 : _CONTROL + 1 + len(told)] = told
        # Last, so that it is whole.
        self._map[_CONTROL] = len(told)

    def receive(self, number: int, began: float, rids: Sequence[str], lengths: Sequence[int]) -> None:
        """Note the requests that were received for a step to come, and the `lengths` of their inputs, in tokens."""
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
        """Note that a batch was scheduled in the round that `began` then; in the `phase` `RECEIVED`, that it may be.

        The forward `mode` is a number that the release gives it, 0 to 255. Each request of `rids`, a list that the
        caller does not change later, has `lengths` tokens, of which the step computes `tokens`, one each where that is
        None, and `total` in all. Of the `decisions` those of `DECISIONS` are noted; what else must be the same on all
        ranks is `agreed`.

        Raises:
            OverflowError, TypeError: a length is not one; nothing was noted.
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
        # Python salts the hash of anything but numbers by process.
        self._same = hash((mode, size, total, agreed, ids_sum, *decided))
        # fmt: off
        self._rest = _REST.pack(
            ids_at % DATA_BYTES, ids_size, ids_sum, lengths_at % DATA_BYTES, crc32(raw),
            len(rids), size, total, mode, tokens is not None, *decided,
        )
        # fmt: on
        self._put(number, began, phase)

    def schedule_again(self, number: int, began: float) -> bool:
        """Note that the last batch goes on, each request with a token more; say whether that could be noted."""
        if self._added == _MAX_ADDED:
            return False
        self._added += 1
        self._sum += self._size
        self._put(number, began, SCHEDULED)
        return True

    def _put(self, number: int, began: float, phase: int) -> None:
        words, told = self._words, 0
        if phase == SCHEDULED:
            # Once ranks differ in it they stay different.
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
        """Note that the batch that was scheduled last is another one than was noted last."""
        self._place, self._word = _UNUSED, 0

    def begin_pass(self, mode: int) -> None:
        """Note that a pass of the model, in this forward mode, begins for the batch that was scheduled last."""
        self._words[self._place] = self._word | mode << 8 | FORWARD_BEGUN

    def wait_for_results(self, number: int) -> None:
        """Note that the scheduler turns to the results of a step, which may not be there yet."""
        self._words[_AT] = number

    def begin_results(self, number: int) -> None:
        """Note that the scheduler turns to the results of a step, which are there."""
        if self._newest - number < STEPS - 1:
            self._set_phase(number, FORWARD_DONE)

    def end(self, number: int, now: float) -> None:
        """Note that a step's results were processed; a step that was overwritten is left alone."""
        if self._newest - number < STEPS - 1:
            self._times[_FIRST_WORD + number % STEPS * _WORDS + _ENDED] = now
            self._set_phase(number, PROCESSED)

    def _set_phase(self, number: int, phase: int) -> None:
        place = _FIRST_WORD + number % STEPS * _WORDS
        self._words[place] = self._words[place] & ~0xFF | phase

    def _append(self, data: bytes) -> int:
        """Write to the data; return its place, counted on over the end."""
        place, start = self._head, self._head % DATA_BYTES
        if start + len(data) > DATA_BYTES:
            place, start = place + DATA_BYTES - start, 0
        self._map[DATA + start : DATA + start + len(data)] = data
        self._head = place + len(data)
        return place


class _Encoded(dict[str, bytes]):
    """Ids as they are written, by id; one that is not there is put there, unless it is long."""

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
    """What a scheduler's record of steps says."""

    steps: tuple[Step, ...]  # those that are whole, by number; the newest `STEPS` at most
    #: The step that the scheduler is in: the one it is at, else the newest that is not done; None where it has nothing
    #: to do.
    current: Step | None
    #: Name of the control request that came in that round, before which no batch began; empty without one.
    control: str = ""


class StepReader:
    """The crash handler's end of a `descriptor`, which stays open; by default `modes` are those that the record has.

    Raises:
        RingError: there is something else, a record of another layout, or it may be cut off while it is read.
        OSError: it cannot be read, now or later.
    """

    def __init__(self, descriptor: int, modes: Mapping[int, str] | None = None) -> None:
        if not is_sealed(descriptor, SIZE, _MAGIC):
            raise RingError("it is not a record of steps, or of another layout")
        self._fd = descriptor
        self._modes = modes or _modes_in(os.pread(descriptor, PAGE - _MODES, _MODES))

    def read(self) -> LastSteps:
        """Return what the record says now, whatever it holds, in bounded time; a step that is not whole is left out."""
        data = os.pread(self._fd, SIZE, 0)
        round_at = time_or_zero(struct.unpack_from("@d", data, 8 * _ROUND)[0])
        opened, at = struct.unpack_from("@2Q", data, 8 * _OPEN)
        # It counts until a batch is scheduled.
        size = min(data[_CONTROL], _LONGEST_CONTROL) if opened else 0
        control = data[_CONTROL + 1 : _CONTROL + 1 + size].decode(errors="replace")
        found = _Requests(data)
        # Where there is not room for all requests, the newest steps have theirs.
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
        """Return the step in a slot; None where it is not whole."""
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
    """Return the step that a scheduler is in, which waits for the results of the one `at`; None where it has none.

    An idle one has no batch to launch; of a pipeline's stage the results of another one may be processed all the same.
    """
    processed = max((step.number for step in steps if step.phase == PHASES[PROCESSED]), default=0)
    left = [step for step in steps if step.phase != PHASES[PROCESSED]]
    waited_for = [step for step in left if step.number == at]
    in_results = [step for step in left if step.phase == PHASES[FORWARD_DONE] and step.number > processed]
    # One that was scheduled and is under way says more than the one that nothing is known of yet.
    scheduled = [step for step in left if step.phase != PHASES[RECEIVED]]
    ways = (waited_for, in_results) if is_idle else (waited_for, in_results, scheduled, left)
    return next((found[-1] for found in ways if found), None)


def _modes_in(data: bytes) -> dict[int, str]:
    try:
        return {int(number): str(name) for number, name in dict(json.loads(data.rstrip(b"\0"))).items()}
    except (ValueError, TypeError, RecursionError):
        return {}


class _Requests:
    """The requests of the steps, as far as they are there, and a reader has room and time for them."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._requests_left, self._bytes_left = MAX_READ, 2 * DATA_BYTES
        #: A list that many steps share is one in memory, too.
        self._rids: dict[tuple[int, int, int], list[str]] = {}

    def of(
        self, count: int, ids: tuple[int, int, int], lengths: tuple[int, int], has_tokens: bool, added: int
    ) -> tuple[StepRequest, ...]:
        """Return the requests of a step, `count` of them, none where they were overwritten.

        Place, size and checksum of their `ids` are given, and place and checksum of their `lengths`, behind which may
        be `tokens`.
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
