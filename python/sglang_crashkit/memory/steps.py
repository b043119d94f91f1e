"""The last steps of a scheduler: memory that the scheduler writes to and its crash handler reads.

The memory is sealed (see `ring.create_sealed`), and all of it is there from the
beginning, so that no store ever ends in SIGBUS::

    header     one page: magic number; what the scheduler is about, in words of 64 bits; a control request, by its name
    steps      `STEPS` slots of 160 bytes; the step of number n lies in slot n modulo `STEPS`
    sampled    as many slots of 64 bytes: number and checksum in one word; the lowest byte of each sampled token
    ids        4096 slots of 64 bytes: 8 bytes of a hash of a request's id, its length, the id; a long one takes several
    data       1 MB, the newest overwrites the oldest: for each step's requests hashes of ids, and lengths

A step says where in the data its requests lie. What is the same as in the step before is not written again: the
requests, and lengths that all grew by one, as they do in a decode.

There is no lock, and a writer may be killed anywhere. So nothing is believed that does not prove itself: a step and a
piece of the data have a checksum in the step's slot, an id is the one that its hash is of. What changes as a step goes
on, how far it came and when it ended, is stored by single instructions, with the step's number. So is the checksum of
the tokens that were sampled, before the step is said to be processed.
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
ABSENT = -1

_VERSION = 4
_MAGIC = (0x5347_4B53_5450_0000 | _VERSION).to_bytes(8, sys.byteorder)
_PAGE = 4096
_SLOT, _SAMPLED_SLOT, _ID_SLOT = 160, 64, 64
#: Where the slots begin, and how long each is, in words of 64 bits.
_FIRST_WORD, _WORDS = _PAGE // 8, _SLOT // 8
_ID_SLOTS, _DATA_BYTES = 4096, 1_000_000
#: No slot of it lies on two pages, between which a reader may be held up.
_SAMPLED = _PAGE + STEPS * _SLOT
_IDS = _SAMPLED + STEPS * _SAMPLED_SLOT
_DATA = _IDS + _ID_SLOTS * _ID_SLOT
SIZE = _DATA + _DATA_BYTES
#: Words of the header: when the last round of the event loop began; the step that it is to become, 0 for none; the step
#: that the scheduler is at, 0 for none; whether it has nothing to do.
_ROUND, _OPEN, _AT, _IDLE = 8, 9, 10, 11
#: Behind them in the header: length and name of the control request of this round; names of the forward modes by their
#: number, as JSON.
_CONTROL, _LONGEST_CONTROL, _MODES = 128, 64, 512
#: Of a slot: number, forward mode and phase in one word; when it ended; what does not change behind its checksum.
_NO_PHASE = 0xFFFF_FFFF_FFFF_FF00
_ENDED, _FIXED = 8, 16
_BODY = struct.Struct("<QdQ8I4iqqHB")
_DECIDED = struct.Struct("<B6Q")
_NOTHING_DECIDED = bytes(_DECIDED.size)
_BODY_BYTES = _BODY.size + _DECIDED.size
_HASHED = struct.Struct("<QHIii")
#: What does not change, behind its checksum.
_CHECKED = struct.Struct(f"<I{_BODY_BYTES}s")
#: What spreads the checksum of a step over the rolling hash, a word.
_SPREAD, _WORD = 0x9E37_79B9_7F4A_7C15, 0xFFFF_FFFF_FFFF_FFFF
#: Of the tokens of a step: their checksum and its number in one word, which one instruction stores; the lowest byte of
#: each token.
_TOKENS = struct.Struct("@Q56s")
#: A list of tokens as `marshal` writes it: so many bytes before the first, and for each; where its lowest one is.
_LISTED, _LOWEST = 5, 6
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
            self._map = mmap.mmap(self.fd, SIZE)
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
        words[_OPEN] = number
        words[_AT] = 0
        words[_IDLE] = not number
        if self._has_control:
            self._end_control()

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
        self.schedule(number, began, 0, rids, lengths, nothing, 0, Facts(received=received), {}, b"", RECEIVED)

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
        agreed: bytes,
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
        if rids != self._rids:
            self._list(rids, raw)
        else:
            if self._data_head - self._ids_at > _FRESH_DATA:
                self._ids_at = self._append(self._ids)
            self._set_lengths(raw, len(rids))
        decided = _packed(decisions) if decisions else _NOTHING_DECIDED
        if phase == SCHEDULED:
            hashed = _HASHED.pack(number, mode, size, facts[0], facts[1]) + decided + agreed + raw
            # Once it differs it stays different. A hash that nobody can forge takes a tenth of the whole step.
            told = self._agreed = (self._agreed * _SPREAD + crc32(hashed, self._ids_sum) + 1) & _WORD
        else:
            told = 0
        ids, lengths_at = self._ids_at % _DATA_BYTES, self._lengths_at % _DATA_BYTES
        where = ids, self._ids_sum, lengths_at, self._lengths_sum, self._grown, len(rids), size, total
        body = _BODY.pack(number, began, told, *where, *facts, mode, tokens is not None) + decided
        slot = number % STEPS
        start, word = _PAGE + slot * _SLOT + _FIXED, _FIRST_WORD + slot * _WORDS
        words = self._words
        words[word] = 0
        _CHECKED.pack_into(self._map, start, crc32(body), body)
        words[word] = number << 16 | phase
        if phase == SCHEDULED:
            words[_AT] = number
            words[_IDLE] = words[_OPEN] = 0
            if self._has_control:
                self._end_control()

    def mark(self, number: int, phase: int, mode: int = 0) -> None:
        """Note how far a step has come.

        Args:
            number: the step's; one that was overwritten is left alone.
            phase: index in `PHASES`.
            mode: forward mode of the model's pass that begins, 0 where it is none.
        """
        place, words = _FIRST_WORD + number % STEPS * _WORDS, self._words
        word = words[place]
        if word >> 16 == number:
            words[place] = number << 16 | mode << 8 | phase if mode else word & _NO_PHASE | phase

    def turn_to(self, number: int, phase: int = 0) -> None:
        """Note which step the scheduler is at now, 0 for none, and how far that has come where `phase` is not 0."""
        words = self._words
        words[_AT] = number
        if phase:
            place = _FIRST_WORD + number % STEPS * _WORDS
            word = words[place]
            if word >> 16 == number:
                words[place] = word & _NO_PHASE | phase

    def end(self, number: int, now: float, at: int = 0, sampled: bytes = b"") -> None:
        """Note that a step's results were processed.

        Args:
            number: the step's.
            now: when, in seconds of the monotonic clock.
            at: the step that the scheduler is at from now on, 0 for none.
            sampled: the token that each request had sampled last: a list of numbers, as `marshal` writes it; empty
                where that is not known.
        """
        slot, words = number % STEPS, self._words
        if sampled:
            told = crc32(sampled) << 32 | number
            _TOKENS.pack_into(self._map, _SAMPLED + slot * _SAMPLED_SLOT, told, sampled[_LOWEST::_LISTED])
        place = _FIRST_WORD + slot * _WORDS
        self._times[place + _ENDED // 8] = now
        word = words[place]
        if word >> 16 == number:
            words[place] = word & _NO_PHASE | PROCESSED
        words[_AT] = at

    def _set_lengths(self, raw: bytes, count: int) -> None:
        """Write the lengths, unless each of them is one more than the last time."""
        # Where all of them grow by one, no length carries into the next.
        lengths = int.from_bytes(raw, "little")
        if self._ones[0] != count:
            self._ones = count, int.from_bytes(b"\1\0\0\0" * count, "little")
        before = self._lengths
        is_fresh = self._data_head - self._lengths_at <= _FRESH_DATA
        if before is not None and is_fresh and lengths - before == self._ones[1]:
            self._grown += 1
        else:
            self._lengths_at, self._lengths_sum, self._grown = self._append(raw), crc32(raw), 0
        self._lengths = lengths if len(raw) == 4 * count else None

    def _list(self, rids: Sequence[str], raw: bytes) -> None:
        """Write other requests than the last time, and their lengths behind them."""
        ids = b"".join(map(self._known.__getitem__, rids))
        self._rids, self._ids, self._grown = rids, ids, 0
        self._ids_at = self._append(ids + raw)
        self._lengths_at = self._ids_at + len(ids)
        self._ids_sum, self._lengths_sum = crc32(ids), crc32(raw)
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
        opened, at, idle = struct.unpack_from("3Q", data, 8 * _OPEN)
        requests = _Requests(data)
        steps: dict[int, Step] = {}
        for place in sorted(range(STEPS), key=functools.partial(_number_at, data), reverse=True):
            step = self._step_at(data, place, requests)
            if step is not None:
                steps[step.number] = step
        newest = max(steps, default=0)
        if opened and (not steps or newest < opened < newest + STEPS):
            newest = opened
            steps[opened] = Step(opened, round_at, None, PHASES[RECEIVED], "", (), 0, 0)
        kept = tuple(steps[number] for number in sorted(steps) if number > newest - STEPS)
        current = steps.get(at)
        if current is None or current.phase == PHASES[PROCESSED]:
            # A step that was scheduled and is under way says more than the one that nothing is known of yet.
            unfinished = [step for step in kept if step.phase != PHASES[PROCESSED]]
            scheduled = [step for step in unfinished if step.phase != PHASES[RECEIVED]]
            current = (scheduled or unfinished)[-1] if unfinished and not idle else None
        size = min(data[_CONTROL], _LONGEST_CONTROL)
        control = data[_CONTROL + 1 : _CONTROL + 1 + size].decode(errors="replace")
        return LastSteps(kept, current, round_at, control)

    def _step_at(self, data: bytes, place: int, found: _Requests) -> Step | None:
        start = _PAGE + place * _SLOT
        checksum, body = _CHECKED.unpack_from(data, start + _FIXED)
        if crc32(body) != checksum:
            return None
        number, began, agreed, *rest = _BODY.unpack_from(body)
        ids_at, ids_sum, lengths_at, lengths_sum, grown, count, size, total, *rest = rest
        *facts, mode, has_tokens = rest
        mask, *values = _DECIDED.unpack_from(body, _BODY.size)
        if number % STEPS != place or number == 0:
            return None
        word, ended = struct.unpack_from("Qd", data, start)
        # A writer that was killed between the two had scheduled it.
        phase = word & 0xFF if word >> 16 == number else SCHEDULED if mode else RECEIVED
        known = Facts(*facts)
        told, lowest = _TOKENS.unpack_from(data, _SAMPLED + place * _SAMPLED_SLOT)
        has_sampled = phase == PROCESSED and told & 0xFFFF_FFFF == number & 0xFFFF_FFFF
        return Step(
            number=number,
            began=began,
            ended=ended if phase == PROCESSED else None,
            phase=PHASES[min(phase, PROCESSED)],
            mode=self._modes.get(mode, str(mode)) if mode else "",
            forward=self._modes.get(word >> 8 & 0xFF, "") if word >> 16 == number else "",
            requests=tuple(
                found.of(count, (ids_at, ids_sum), (lengths_at, lengths_sum), grown, has_tokens=bool(has_tokens))
            ),
            size=size,
            tokens=total,
            decisions={name: values[at] for at, name in enumerate(DECISIONS) if mask & 1 << at},
            agreed_hash=agreed,
            sampled=(told >> 32).to_bytes(SAMPLED_HASH, "little") + lowest if has_sampled else b"",
            **{name: None if value == ABSENT else value for name, value in known._asdict().items()},
        )


def _modes_in(data: bytes) -> dict[int, str]:
    """Return the names of the forward modes in a header, nothing where it holds none."""
    try:
        return {int(number): str(name) for number, name in dict(json.loads(data.rstrip(b"\0"))).items()}
    except (ValueError, TypeError):
        return {}


def _number_at(data: bytes, place: int) -> int:
    """Return which step lies in a slot, as far as can be told."""
    (number,) = struct.unpack_from("<Q", data, _PAGE + place * _SLOT + _FIXED + _CHECKED.size - _BODY_BYTES)
    return int(number)


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
