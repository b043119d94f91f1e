"""The last steps of a scheduler: memory that the scheduler writes to and its crash handler reads.

The memory is sealed (see `ring.create_sealed`), and all of it is there from the
beginning, so that no store ever ends in SIGBUS::

    header     one page: magic number; what the scheduler is about, in words of 64 bits; a control request, by its name
    steps      `_SLOTS` slots of 256 bytes; the step of number n lies in slot n modulo `_SLOTS`, and behind it number
               and checksum of the tokens that were sampled in one word, and the lowest byte of each
    ids        4096 slots of 64 bytes: 8 bytes of a hash of a request's id, its length, the id; a long one takes several
    data       the rest; the newest overwrites the oldest: for each step's requests hashes of ids, and lengths

A step says where in the data its requests lie. What is the same as in the step before is not written again: the
requests, and lengths that all grew by one, as they do in a decode. A step that repeats the one before in all but that
has its times, how far it came, what it sampled, and nothing else: a reader takes the rest from the whole step before
it, which is at most `MAX_REPEATS` steps older.

There is no lock, and a writer may be killed anywhere. So nothing is believed that does not prove itself: a step and a
piece of the data have a checksum in the step's slot, an id is the one that its hash is of. What changes as a step goes
on is stored by single instructions: how far it came, a byte of the word that has the step's number, after what belongs
to that: the time at which it ended, and the checksum of the tokens that were sampled, with the number.
"""

from __future__ import annotations

import functools
import json
import mmap
import os
import struct
import sys
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from marshal import dumps
from typing import NamedTuple
from zlib import crc32

from sglang_crashkit.memory.ring import create_sealed, is_ring
from sglang_crashkit.model.step import PHASES, SAMPLED_HASH, Step, StepRequest

NAME = "sglang-crashkit-steps"
STEPS = 1000
RECEIVED, SCHEDULED, FORWARD_BEGUN, FORWARD_DONE, PROCESSED = range(len(PHASES))
#: What is decided on the way to a step, by its place in the record.
DECISIONS = ("abort", "retract", "grammar", "prefetch", "write_back", "timeout")
#: More requests of one step than these are counted, and not recorded.
MAX_REQUESTS = 2048
#: So many steps in turn may repeat the one before.
MAX_REPEATS = 15
ABSENT = -1

_VERSION = 5
_MAGIC = (0x5347_4B53_5450_0000 | _VERSION).to_bytes(8, sys.byteorder)
_PAGE = 4096
#: No slot of a step lies on two pages, between which a reader may be held up, and which a writer would look for each.
_SLOT, _ID_SLOT = 256, 64
#: With those that the oldest of the last `STEPS` may repeat.
_SLOTS = STEPS + MAX_REPEATS
#: Where the slots begin, and how long each is, in words of 64 bits.
_FIRST_WORD, _WORDS = _PAGE // 8, _SLOT // 8
_ID_SLOTS, _DATA_BYTES = 4096, 970_000
_IDS = _PAGE + _SLOTS * _SLOT
_DATA = _IDS + _ID_SLOTS * _ID_SLOT
SIZE = _DATA + _DATA_BYTES
#: Words of the header: when the last round of the event loop began; the step that it is to become, or that it has
#: nothing to do, 0 for the step after the newest; the step whose results the scheduler waits for, 0 for none.
_ROUND, _OPEN, _AT = 8, 9, 10
_IDLE = _WORD = 0xFFFF_FFFF_FFFF_FFFF
#: Behind them in the header: length and name of the control request of this round; names of the forward modes by their
#: number, as JSON.
_CONTROL, _LONGEST_CONTROL, _MODES = 128, 64, 512
#: Of a slot: number, whether it repeats the step before, forward mode, and phase in the lowest byte, in one word; in
#: the next when it ended; in the next when it began where it repeats the step before, else what does not change, behind
#: its checksum.
_NUMBER_AT, _REPEATS = 24, 1 << 16
_ENDED, _BEGAN, _FIXED = 1, 2, 16
#: Where in a slot the checksum of the tokens is, and their lowest bytes.
_SAMPLED, _LOWEST_BYTES = 192, 200
_BODY = struct.Struct("<QdQ8I4iqqHB")
_DECIDED = struct.Struct("<B6Q")
_NOTHING_DECIDED = bytes(_DECIDED.size)
_BODY_BYTES = _BODY.size + _DECIDED.size
#: What does not change, behind its checksum.
_CHECKED = struct.Struct(f"<I{_BODY_BYTES}s")
#: What of a slot changes, and when a step began that repeats the one before.
_MARKS, _NUMBER = struct.Struct("@Qdd"), struct.Struct("@Q")
#: Of the tokens of a step: their checksum and its number in one word, which one instruction stores; the lowest byte of
#: each token.
_TOKENS = struct.Struct("@Q56s")
_CHECKSUM = 0xFFFF_FFFF
#: Tokens as `marshal` writes them: so many bytes before the first, and for each; where its lowest one is; behind the
#: last for which there is room.
_LISTED, _LOWEST = 5, 6
_END_LOWEST = _LOWEST + (_TOKENS.size - 8) * _LISTED
_ID_HASH, _LONGEST_ID = blake2b(digest_size=8), 1024
#: So many requests are read at most, of the newest steps.
_MAX_READ = 32_768
#: After so many slots all ids are written again with the next list, so that each is there as long as its request.
_FRESH_IDS, _FRESH_DATA = _ID_SLOTS // 2, _DATA_BYTES // 2


class NotStepsError(Exception):
    """What was opened is no record of steps of this layout, or may be cut off while it is read."""


class Facts(NamedTuple):
    """What a scheduler says of itself as it begins a batch; `ABSENT` for what its release does not have.

    Attributes:
        running: how many requests run.
        waiting: how many requests wait.
        retracted: how many were retracted since the batch before.
        received: how many requests and controls were received since the batch before.
        kv_free: how many tokens the KV pool has room for.
        kv_size: how many tokens the KV pool holds at most.
    """

    running: int = ABSENT
    waiting: int = ABSENT
    retracted: int = ABSENT
    received: int = ABSENT
    kv_free: int = ABSENT
    kv_size: int = ABSENT


class StepWriter:
    """The scheduler's end; for one thread.

    Args:
        modes: names of the forward modes by their number in digits, for whoever finds the record and knows nothing of
            the release.

    Attributes:
        fd: the descriptor to be passed on to a reader.

    Raises:
        RingError: the kernel gives no memory or no descriptor; OSError where that shows only later.
    """

    def __init__(self, modes: Mapping[str, str] | None = None) -> None:
        self.fd = create_sealed(SIZE, NAME)
        try:
            # Memory that is not there is missed now, and not in the middle of a step.
            os.posix_fallocate(self.fd, 0, SIZE)
            os.pwrite(self.fd, _MAGIC, 0)
            os.pwrite(self.fd, json.dumps(modes or {}).encode()[: _PAGE - _MODES], _MODES)
            # With all pages, or each would be looked for in the middle of a step.
            self._map = mmap.mmap(self.fd, SIZE, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except BaseException:
            os.close(self.fd)
            raise
        self._whole = memoryview(self._map)
        self._words = self._whole[: SIZE // 8 * 8].cast("Q")
        self._times = self._whole[: SIZE // 8 * 8].cast("d")
        self._agreed = 0
        #: Hash of each id that was written since its slots were half as many, by the id.
        self._known = _Known(self._put_id)
        self._id_head = self._known_since = 0
        #: Where the next data goes, counted on over the end; so are the places of what is there.
        self._data_head = self._ids_at = self._lengths_at = 0
        self._ids_sum = self._lengths_sum = 0
        self._rids: Sequence[str] = ()
        self._ids = b""
        #: The lengths as one number; None where the next ones are to be written.
        self._lengths: int | None = None
        self._grown = 0
        self._ones = (0, 0)
        self._has_control = False
        #: The step that was scheduled last, the place of its first word, and that word without mode and phase.
        self._newest, self._place, self._word = 0, _FIRST_WORD, 0

    def close(self) -> None:
        """Give the memory back, unless somebody else holds it."""
        for view in (self._words, self._times, self._whole):
            view.release()
        self._map.close()
        os.close(self.fd)

    def begin_round(self, number: int, now: float) -> None:
        """Note that a round of the event loop begins.

        Args:
            number: the step that it is to become; 0 where there is nothing to do.
            now: in seconds of the monotonic clock.
        """
        words = self._words
        self._times[_ROUND] = now
        words[_OPEN] = number or _IDLE
        words[_AT] = 0
        if self._has_control:
            self._end_control()

    def go_round(self, now: float) -> None:
        """Note that a round of the event loop begins that is to become the step after the one scheduled last."""
        self._times[_ROUND] = now

    def begin_control(self, name: str) -> None:
        """Note that a control request is handled in this round, before the next batch."""
        told = name.encode(errors="replace")[:_LONGEST_CONTROL]
        self._map[_CONTROL + 1 : _CONTROL + 1 + len(told)] = told
        # Last, so that it is whole.
        self._map[_CONTROL] = len(told)
        self._has_control = True

    def _end_control(self) -> None:
        self._map[_CONTROL] = 0
        self._has_control = False

    def receive(self, number: int, began: float, rids: Sequence[str], lengths: Sequence[int], received: int) -> None:
        """Note the requests that were received for a step to come; those that were noted for it before are forgotten.

        Args:
            number: the step's.
            began: when, in seconds of the monotonic clock.
            rids: the requests' ids; a list that nobody changes later.
            lengths: of their inputs, in tokens.
            received: how many requests and controls there were in all.
        """
        nothing = [0] * len(rids)
        self.schedule(number, began, 0, rids, lengths, nothing, 0, Facts(received=received), {}, 0, RECEIVED)

    def schedule(
        self,
        number: int,
        began: float,
        mode: int,
        rids: Sequence[str],
        lengths: Sequence[int],
        tokens: Sequence[int] | None,
        total: int,
        facts: tuple[int, int, int, int, int, int],
        decisions: Mapping[str, int],
        agreed: int,
        phase: int = SCHEDULED,
    ) -> None:
        """Note that a batch was scheduled.

        Args:
            number: the step's.
            began: when the round began, in seconds of the monotonic clock.
            mode: forward mode, a number that the release gives it, 0 to 255.
            rids: the requests' ids; a list that nobody changes later.
            lengths: how many tokens each has.
            tokens: how many of them the step computes; None for one each.
            total: how many tokens the step computes in all.
            facts: what else is known; as `Facts` has it.
            decisions: see `DECISIONS`; others are left out.
            agreed: what else must be the same on all ranks, and is part of the step's hash, as is all of the above but
                `began`, and `facts` beyond the first two.
            phase: `RECEIVED` for what is no batch yet, and has no hash.
        """
        size = len(rids)
        if size > MAX_REQUESTS:
            rids, lengths = rids[:MAX_REQUESTS], lengths[:MAX_REQUESTS]
            tokens = None if tokens is None else tokens[:MAX_REQUESTS]
        if self._id_head - self._known_since > _FRESH_IDS:
            self._known, self._known_since, self._rids = _Known(self._put_id), self._id_head, ()
        raw = array("I", lengths).tobytes()
        if tokens is not None:
            raw += array("I", tokens).tobytes()
        raw_sum = crc32(raw)
        if rids != self._rids:
            self._list(rids, raw, raw_sum)
        else:
            if self._data_head - self._ids_at > _FRESH_DATA:
                self._ids_at = self._append(self._ids)
            self._set_lengths(raw, raw_sum)
        running, waiting, retracted, received, free, kv_size = facts
        decided, decided_sum = _NOTHING_DECIDED, 0
        if decisions:
            decided = _packed(decisions)
            decided_sum = crc32(decided)
        told = 0
        if phase == SCHEDULED:
            # Once it differs it stays different. Of numbers only, as the hash of anything else is another one in each
            # process, and of small ones: that of a large one is no more than a remainder. A hash that nobody can forge
            # takes a tenth of the whole step.
            of = self._agreed, number, mode, size, running, waiting, agreed, decided_sum, self._ids_sum, raw_sum
            told = self._agreed = hash(of) & _WORD
        # fmt: off
        # Not unpacked from parts, which takes a tenth of the whole step.
        body = _BODY.pack(
            number, began, told, self._ids_at % _DATA_BYTES, self._ids_sum, self._lengths_at % _DATA_BYTES,
            self._lengths_sum, self._grown, len(rids), size, total,
            running, waiting, retracted, received, free, kv_size, mode, tokens is not None,
        ) + decided
        # fmt: on
        slot, words = number % _SLOTS, self._words
        place = _FIRST_WORD + slot * _WORDS
        words[place] = 0
        _CHECKED.pack_into(self._map, _PAGE + slot * _SLOT + _FIXED, crc32(body), body)
        words[place] = number << _NUMBER_AT | phase
        if phase == SCHEDULED:
            self._newest, self._place, self._word = number, place, number << _NUMBER_AT
            words[_OPEN] = 0
            if self._has_control:
                self._end_control()

    def repeat(self, number: int, began: float) -> None:
        """Note that a batch was scheduled that is as the one before, with requests that are all one token longer.

        Args:
            number: the step's, one more than that of the step before.
            began: when the round began, in seconds of the monotonic clock.
        """
        self._newest = number
        self._place = place = _FIRST_WORD + number % _SLOTS * _WORDS
        self._word = word = number << _NUMBER_AT | _REPEATS
        # What was there is too old to be read, whatever becomes of it.
        self._times[place + _BEGAN] = began
        self._words[place] = word | SCHEDULED

    def begin_pass(self, mode: int) -> None:
        """Note that a pass of the model, in this forward mode, begins for the batch that was scheduled last."""
        self._words[self._place] = self._word | mode << 8 | FORWARD_BEGUN

    def wait_for_results(self, number: int) -> None:
        """Note that the scheduler turns to the results of a step, which may not be there yet."""
        self._words[_AT] = number

    def begin_results(self, number: int) -> None:
        """Note that the scheduler turns to the results of a step, which are there."""
        if self._newest - number < _SLOTS:
            self._map[_PAGE + number % _SLOTS * _SLOT] = FORWARD_DONE

    def end(self, number: int, now: float, tokens: tuple[int, ...] = ()) -> None:
        """Note that a step's results were processed.

        Args:
            number: the step's; one that was overwritten is left alone.
            now: when, in seconds of the monotonic clock.
            tokens: the token that each request had sampled last; none where that is not known.

        Raises:
            ValueError: a token is no number; nothing was noted.
        """
        if self._newest - number >= _SLOTS:
            return
        start = _PAGE + number % _SLOTS * _SLOT
        if tokens:
            # Not `crc32`, whose tables take ten times as long where the scheduler's work has left no cache to it.
            told = hash(tokens) & _CHECKSUM
            lowest = dumps(tokens, 2)[_LOWEST:_END_LOWEST:_LISTED]
            self._words[(start + _SAMPLED) // 8] = told << 32 | number
            self._map[start + _LOWEST_BYTES : start + _LOWEST_BYTES + len(lowest)] = lowest
        self._times[start // 8 + _ENDED] = now
        self._map[start] = PROCESSED

    def _set_lengths(self, raw: bytes, raw_sum: int) -> None:
        """Write the lengths, unless each of them is one more than the last time.

        Args:
            raw: the lengths, and the tokens where the step computes more than one each.
            raw_sum: its checksum.
        """
        count = len(self._rids)
        if self._ones[0] != count:
            self._ones = count, int.from_bytes(b"\1\0\0\0" * count, "little")
        # Where all of them grow by one, no length carries into the next.
        lengths = int.from_bytes(raw, "little")
        before = self._lengths
        is_fresh = self._data_head - self._lengths_at <= _FRESH_DATA
        if before is not None and is_fresh and lengths - before == self._ones[1]:
            self._grown += 1
        else:
            self._lengths_at, self._lengths_sum, self._grown = self._append(raw), raw_sum, 0
        self._lengths = lengths if len(raw) == 4 * count else None

    def _list(self, rids: Sequence[str], raw: bytes, raw_sum: int) -> None:
        """Write other requests than the last time, and their lengths behind them; see `_set_lengths`."""
        ids = b"".join(map(self._known.__getitem__, rids))
        self._rids, self._ids, self._grown = rids, ids, 0
        self._ids_at = self._append(ids + raw)
        self._lengths_at = self._ids_at + len(ids)
        self._ids_sum, self._lengths_sum = crc32(ids), raw_sum
        self._lengths = int.from_bytes(raw, "little") if len(raw) == 4 * len(rids) else None

    def _put_id(self, rid: str) -> bytes:
        """Write a request's id; return its hash."""
        text = rid.encode(errors="surrogatepass")
        # To copy one takes less than to make one.
        hashed = _ID_HASH.copy()
        hashed.update(text)
        digest = hashed.digest()
        record = digest + min(len(text), 0xFFFF).to_bytes(2, "little") + text[:_LONGEST_ID]
        slots = (len(record) + _ID_SLOT - 1) // _ID_SLOT
        place = self._id_head % _ID_SLOTS
        if place + slots > _ID_SLOTS:
            self._id_head, place = self._id_head + _ID_SLOTS - place, 0
        start, self._id_head = _IDS + place * _ID_SLOT, self._id_head + slots
        self._map[start : start + len(record)] = record
        return digest

    def _append(self, data: bytes) -> int:
        """Write to the data; return its place, counted on over the end."""
        place, start = self._data_head, self._data_head % _DATA_BYTES
        if start + len(data) > _DATA_BYTES:
            place, start = place + _DATA_BYTES - start, 0
        self._map[_DATA + start : _DATA + start + len(data)] = data
        self._data_head = place + len(data)
        return place


class _Known(dict[str, bytes]):
    """Hashes by id; one that is not there is put there."""

    def __init__(self, put: Callable[[str], bytes]) -> None:
        self._put = put

    def __missing__(self, rid: str) -> bytes:
        self[rid] = digest = self._put(rid)
        return digest


def _packed(decisions: Mapping[str, int]) -> bytes:
    mask, values = 0, [0] * len(DECISIONS)
    for place, name in enumerate(DECISIONS):
        value = decisions.get(name)
        if value is not None:
            mask |= 1 << place
            values[place] = value & 0xFFFF_FFFF_FFFF_FFFF
    return _DECIDED.pack(mask, *values)


@dataclass(frozen=True)
class LastSteps:
    """What a scheduler's record of steps says.

    Attributes:
        steps: those that are whole, by number; the newest `STEPS` at most.
        current: the step that the scheduler is in: the one it is at, else the newest that is not done; None where it
            has nothing to do.
        round_at: when it last began a round of its event loop, in seconds of the monotonic clock.
        control: name of the control request that came in that round, before which no batch began; empty without one.
    """

    steps: tuple[Step, ...]
    current: Step | None
    round_at: float
    control: str = ""


class StepReader:
    """The crash handler's end.

    Args:
        descriptor: of the record; it stays open, and must as long as this is used.
        modes: names of the forward modes by their number; by default those in the record.

    Raises:
        NotStepsError: there is something else, or a record of another layout.
        OSError: it cannot be read.
    """

    def __init__(self, descriptor: int, modes: Mapping[int, str] | None = None) -> None:
        if not is_ring(descriptor) or os.fstat(descriptor).st_size != SIZE or os.pread(descriptor, 8, 0) != _MAGIC:
            raise NotStepsError("it is no record of steps, or of another layout")
        self._fd = descriptor
        self._modes = modes or _modes_in(os.pread(descriptor, _PAGE - _MODES, _MODES))

    def read(self) -> LastSteps:
        """Return what the record says now; whatever it holds, it says something.

        Raises:
            OSError: it cannot be read.
        """
        data = os.pread(self._fd, SIZE, 0)
        round_at = float(struct.unpack_from("d", data, 8 * _ROUND)[0])
        opened, at = struct.unpack_from("2Q", data, 8 * _OPEN)
        requests = _Requests(data)
        steps: dict[int, Step] = {}
        for place in sorted(range(_SLOTS), key=functools.partial(_number_at, data), reverse=True):
            step = self._step_at(data, place, requests)
            if step is not None:
                steps[step.number] = step
        newest = max(steps, default=0)
        if not opened and steps and round_at > steps[newest].began:
            opened = newest + 1
        if opened not in (0, _IDLE) and (not steps or newest < opened < newest + STEPS):
            newest = opened
            steps[opened] = Step(opened, round_at, None, PHASES[RECEIVED], "", (), 0, 0)
        kept = tuple(steps[number] for number in sorted(steps) if number > newest - STEPS)
        current = _current_of(kept, at, is_idle=opened == _IDLE)
        size = min(data[_CONTROL], _LONGEST_CONTROL)
        control = data[_CONTROL + 1 : _CONTROL + 1 + size].decode(errors="replace")
        return LastSteps(kept, current, round_at, control)

    def _step_at(self, data: bytes, place: int, found: _Requests) -> Step | None:
        start = _PAGE + place * _SLOT
        word, ended, began = _MARKS.unpack_from(data, start)
        number, repeats = _number_at(data, place), 0
        # What repeats a step is as the newest whole one before it.
        while repeats < MAX_REPEATS and _is_repeat(data, number - repeats):
            repeats += 1
        whole = number - repeats
        checksum, body = _CHECKED.unpack_from(data, _PAGE + whole % _SLOTS * _SLOT + _FIXED)
        if crc32(body) != checksum or number % _SLOTS != place or number <= repeats:
            return None
        found_number, whole_began, agreed, *rest = _BODY.unpack_from(body)
        ids_at, ids_sum, lengths_at, lengths_sum, grown, count, size, total, *rest = rest
        *facts, mode, has_tokens = rest
        mask, *values = _DECIDED.unpack_from(body, _BODY.size)
        if found_number != whole:
            return None
        known = Facts(*facts)
        if repeats:
            mask, known = 0, known._replace(retracted=0, received=0)
        # A writer that was killed between the two had scheduled it.
        phase = word & 0xFF if word >> _NUMBER_AT == number else SCHEDULED if mode else RECEIVED
        told, lowest = _TOKENS.unpack_from(data, start + _SAMPLED)
        has_sampled = phase == PROCESSED and told & 0xFFFF_FFFF == number & 0xFFFF_FFFF
        requests = found.of(
            count, (ids_at, ids_sum), (lengths_at, lengths_sum), grown + repeats, has_tokens=bool(has_tokens)
        )
        return Step(
            number=number,
            began=began if repeats else whole_began,
            ended=ended if phase == PROCESSED else None,
            phase=PHASES[min(phase, PROCESSED)],
            mode=self._modes.get(mode, str(mode)) if mode else "",
            forward=self._modes.get(word >> 8 & 0xFF, "") if word >> _NUMBER_AT == number else "",
            requests=tuple(requests),
            size=size,
            tokens=total,
            decisions={name: values[at] for at, name in enumerate(DECISIONS) if mask & 1 << at},
            agreed_hash=agreed,
            sampled=(told >> 32).to_bytes(SAMPLED_HASH, "little") + lowest[:count] if has_sampled else b"",
            **{name: None if value == ABSENT else value for name, value in known._asdict().items()},
        )


def _current_of(steps: Sequence[Step], at: int, *, is_idle: bool) -> Step | None:
    """Return the step that a scheduler is in, None where it has nothing to do.

    Args:
        steps: the last ones, by number.
        at: the one whose results it waits for, 0 for none.
        is_idle: it has no batch to launch; of a pipeline's stage the results of another one may be processed all the
            same.
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
    """Return the names of the forward modes in a header, nothing where it holds none."""
    try:
        return {int(number): str(name) for number, name in dict(json.loads(data.rstrip(b"\0"))).items()}
    except (ValueError, TypeError):
        return {}


def _number_at(data: bytes, place: int) -> int:
    """Return which step lies in a slot, as far as can be told."""
    start = _PAGE + place * _SLOT
    (word,) = _NUMBER.unpack_from(data, start)
    if not word & _REPEATS:
        (number,) = _NUMBER.unpack_from(data, start + _FIXED + _CHECKED.size - _BODY_BYTES)
        return int(number)
    return int(word >> _NUMBER_AT)


def _is_repeat(data: bytes, number: int) -> bool:
    """Say whether a step is noted to repeat the one before."""
    (word,) = _NUMBER.unpack_from(data, _PAGE + number % _SLOTS * _SLOT)
    return bool(word & _REPEATS) and word >> _NUMBER_AT == number


class _Requests:
    """The requests of the steps, as far as they are there, and there is room for them in a reader's memory."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._room = _MAX_READ
        self._rids = dict(self._all_rids())
        #: A list that many steps share is one in memory, too.
        self._texts: dict[tuple[int, int], list[tuple[int, str]]] = {}

    def of(
        self, count: int, ids: tuple[int, int], lengths: tuple[int, int], grown: int, *, has_tokens: bool
    ) -> Iterator[StepRequest]:
        """Yield the requests of a step, none where they were overwritten.

        Args:
            count: how many there are.
            ids: where the hashes of the ids lie in the data, with their checksum.
            lengths: where the lengths lie, with their checksum.
            grown: what is to be added to each length.
            has_tokens: behind the lengths it says how many tokens the step computes for each request.
        """
        texts = self._texts.get(ids)
        if texts is None:
            raw = self._take(8 * count, *ids)
            digests = [raw[at : at + 8] for at in range(0, len(raw), 8)]
            texts = [
                (id_hash := int.from_bytes(digest, "little"), self._rids.get(digest, f"#{id_hash:016x}"))
                for digest in digests
            ]
            self._texts[ids] = texts
        numbers = array("I", self._take(4 * count * (1 + has_tokens), *lengths))
        if numbers and texts and self._room >= count:
            self._room -= count
            for place, (id_hash, rid) in enumerate(texts):
                tokens = numbers[count + place] if has_tokens else 1
                yield StepRequest(rid, id_hash, tokens, numbers[place] + grown)

    def _take(self, size: int, start: int, checksum: int) -> bytes:
        found = self._data[_DATA + start : _DATA + start + size]
        return found if len(found) == size and crc32(found) == checksum else b""

    def _all_rids(self) -> Iterator[tuple[bytes, str]]:
        data = self._data
        for start in range(_IDS, _DATA, _ID_SLOT):
            length = int.from_bytes(data[start + 8 : start + 10], "little")
            text = data[start + 10 : start + 10 + length]
            digest = data[start : start + 8]
            if length <= _LONGEST_ID and any(digest) and blake2b(text, digest_size=8).digest() == digest:
                yield digest, text.decode(errors="backslashreplace")
