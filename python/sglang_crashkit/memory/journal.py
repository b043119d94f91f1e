"""The request journal: what a process of the server was asked to do, in memory that outlives it.

A request is noted when it arrives, with its inputs and sampling parameters, and again, in a few bytes, when it ends.
The memory is a `ring`, in which an unfinished request outlives finished ones.

Text is kept as UTF-8, token ids as integers of four bytes (eight where one does not fit), and all else as one JSON
object: reading it runs no foreign code. As it is noted in SGLang's event loop, of a long prompt both ends are kept, and
nothing is looked at that a user made larger than that.
"""

from __future__ import annotations

import contextlib
import json
import math
import struct
import time
from array import array
from collections.abc import Mapping
from typing import Any, NamedTuple

from sglang_crashkit.memory.ring import RingReader, RingWriter
from sglang_crashkit.model.step import short_rid

#: Of the requests that ended those count that did within this time before the last event, in seconds. SGLang keeps as
#: much in memory (``TokenizerManager.record_request_for_crash_dump``).
KEPT_SECS = 300.0
#: Of more token ids, or characters (wide: in a text with any beyond ASCII), than this the first and the last half of it
#: are kept: as many tokens as a context of 128 k holds, and what is noted within a millisecond.
MAX_IDS, MAX_CHARACTERS, MAX_WIDE = 131_072, 262_144, 65_536

_BEGUN, _ENDED, _ABORTED = 1, 2, 3
#: kind, whether there is text, bytes of one token id, bytes of the fields, the text and all ids; number, when.
BEGIN = struct.Struct("<B?BxIIIQd")
#: kind, whether it was finished, number, when.
END = struct.Struct("<B?6xQd")
_ID_CODES = {4: "I", 8: "q"}
_MAX_COUNTED = 256
#: A reader keeps so many requests of one journal; more are in none that the kit wrote.
_MAX_REQUESTS = 100_000
_LONG = 256
_SCALARS = frozenset({bool, int, float, type(None)})
#: What `weigh` counts for one value, and for the container that holds it, whatever it is.
_VALUE_WEIGHT = 64
#: How heavy the fields of a request may be together; they take a quarter of a millisecond then.
MAX_WEIGHT = 64 * 1024


class JournalWriter(RingWriter):
    """Notes the requests of this process in a ring of so many bytes; for one thread; `lost` found no room any more.

    Raises:
        RingError: there is no memory for it; by each method, too.
        ValueError: by each method, the journal is closed.
    """

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._number = 0

    def begin(self, fields: Mapping[str, Any], text: object = None, input_ids: object = None) -> int:
        """Note a request that arrived, see `encode_begin`; return a number for `end`."""
        self._number += 1
        now = time.time()
        try:
            record = encode_begin(self._number, now, fields, text, input_ids, self.max_payload)
        except Exception as error:  # noqa: BLE001 - another request may be an ordinary one
            why = {"request": f"it cannot be encoded: {type(error).__name__}"}
            kept = {"rid": short_rid(fields.get("rid")), "omitted": why}
            record = encode_begin(self._number, now, kept, None, None, self.max_payload)
        self.append(record, hold=self._number)
        return self._number

    def abort(self, number: int) -> None:
        """Note that the request that `begin` gave this number is aborted; it may not have ended yet."""
        self.append(END.pack(_ABORTED, False, number, time.time()))

    def end(self, number: int, *, finished: bool) -> None:
        """Note that the request that `begin` gave this number ended: it was answered, or dropped."""
        self.release(number)
        self.append(END.pack(_ENDED, finished, number, time.time()))


class JournaledRequest(NamedTuple):
    """A request that a journal tells of; times are in seconds since the epoch."""

    arrived: float
    ended: float | None  # None where it is under way
    finished: bool  # it ended because it was answered, and was not dropped
    offset: int  # where its record lies, as is the next
    sequence: int
    aborted: float | None = None  # when it was, by its client or by a request to abort; None if it was not


class JournalReader(RingReader):
    """Reads the journal of one process, dead or alive, and little of it at a time; see `RingReader`.

    Attributes:
        requests: the unfinished ones, oldest first; then those that ended within `KEPT_SECS`, latest first.
        lost: how many unfinished ones found no room.

    Raises:
        RingError: it cannot be read or is no journal.
    """

    def __init__(self, descriptor: int, deadline: float = math.inf) -> None:
        super().__init__(descriptor, deadline=deadline)
        self.lost = 0
        #: By kind and by the number of the request: sequence number and place of the record, when, and how it ended.
        found: dict[int, dict[int, tuple[int, int, float, bool]]] = {_BEGUN: {}, _ENDED: {}, _ABORTED: {}}
        # When something was noted last, since the epoch.
        newest, latest = -1, 0.0
        for record in self.records():
            is_newest = record.sequence > newest
            if is_newest:
                newest, self.lost = record.sequence, record.lost
            payload, finished = record.payload, False
            kind = payload[0] if payload else 0
            if kind == _BEGUN and len(payload) >= BEGIN.size:
                *_sizes, request, seconds = BEGIN.unpack_from(payload)
            elif kind in (_ENDED, _ABORTED) and len(payload) == END.size:
                _kind, finished, request, seconds = END.unpack(payload)
            else:
                continue
            if not 0 <= seconds < 2**33:
                continue
            if is_newest:
                # By its number: the machine's clock may have been set back since an earlier one.
                latest = seconds
            known = found[kind]
            if len(known) > _MAX_REQUESTS:
                break
            # One that was held may be there twice.
            if request not in known or known[request][0] < record.sequence:
                known[request] = record.sequence, record.offset, seconds, finished
        since = latest - KEPT_SECS
        unfinished, ended = [], []
        for number, (sequence, offset, arrived, _) in sorted(found[_BEGUN].items()):
            end, abort = found[_ENDED].get(number), found[_ABORTED].get(number)
            aborted = abort[2] if abort is not None else None
            if end is None:
                unfinished.append(JournaledRequest(arrived, None, False, offset, sequence, aborted))
            elif end[2] > since:
                # What SGLang calls finished there is the abort.
                finished = end[3] and aborted is None
                ended.append((end[0], JournaledRequest(arrived, end[2], finished, offset, sequence, aborted)))
        self.requests = unfinished + [request for _sequence, request in sorted(ended, reverse=True)]

    def load(self, request: JournaledRequest) -> dict[str, Any] | None:
        """Return all that is known of a request, see `decode_request`; None where it was overwritten meanwhile."""
        record = self.payload(request.offset, request.sequence)
        return None if record is None else decode_request(record)


def encode_begin(
    number: int, seconds: float, fields: Mapping[str, Any], text: object, input_ids: object, most: int
) -> bytes:
    """Return the record of a request that arrived, of `most` bytes at most, 4096 or more.

    Of a prompt that is too long its beginning and its end are kept; ``truncated`` says of ``text``, in characters, and
    of ``input_ids`` how many of them are the ``first`` and the ``last``, and how many there were (``of``). What else is
    too large, or no JSON value, is described below ``omitted``. The fields are not heavier than `MAX_WEIGHT`.
    """
    omitted: dict[str, str] = dict(fields.get("omitted", ()))
    truncated: dict[str, dict[str, int]] = {}
    room = most - BEGIN.size - most // 4
    encoded_text, ids, id_size = b"", b"", 0
    has_text = isinstance(text, str)
    if isinstance(text, str):
        room_of_text = room if input_ids is None else room // 2
        longest = min(MAX_CHARACTERS, room_of_text) if text.isascii() else min(MAX_WIDE, room_of_text // 4)
        encoded_text = _both_ends(text, longest, "text", truncated).encode("utf-8", "surrogatepass")
    elif text is not None and weigh(text, MAX_WEIGHT) <= MAX_WEIGHT:
        # A pair of texts that are compared.
        fields = {**fields, "text": text}
    elif text is not None:
        omitted["text"] = describe(text)
    if input_ids is not None:
        ids, id_size = _encode_ids(input_ids, room - len(encoded_text), truncated)
        if not id_size:
            omitted["input_ids"] = describe(input_ids)
    encoded = _encode_fields(fields, omitted, truncated, most // 4)
    sizes = len(encoded), len(encoded_text), len(ids)
    if BEGIN.size + sum(sizes) > most:
        raise ValueError(f"what a request asks for takes {len(encoded)} bytes")
    head = BEGIN.pack(_BEGUN, has_text, id_size, *sizes, number, seconds)
    return b"".join((head, encoded, encoded_text, ids))


def decode_request(record: bytes) -> dict[str, Any]:
    """Return all that the record of a beginning holds: the fields, ``text`` and ``input_ids``.

    Raises:
        ValueError: it is not such a record; RecursionError where it is nested too deep.
    """
    _kind, has_text, id_size, fields_size, text_size, ids_size, _number, _seconds = BEGIN.unpack_from(record)
    text_begin = BEGIN.size + fields_size
    ids_begin = text_begin + text_size
    # Python reads and writes NaN and Infinity, which JSON does not know.
    request = json.loads(record[BEGIN.size : text_begin], parse_constant=str)
    if not isinstance(request, dict) or (id_size and id_size not in _ID_CODES) or ids_begin + ids_size > len(record):
        raise ValueError("it is not the record of a request")
    if has_text:
        request["text"] = record[text_begin:ids_begin].decode("utf-8", "surrogatepass")
    if id_size:
        code = f"={ids_size // id_size}{_ID_CODES[id_size]}"
        request["input_ids"] = list(struct.unpack_from(code, record, ids_begin))
    return request


def describe(value: object) -> str:
    """Say what a value is and how large, in place of the value."""
    kind = type(value).__name__
    if isinstance(value, (bytes, bytearray)):
        return f"{kind}, {len(value)} bytes"
    if isinstance(value, str):
        return f"{kind}, {len(value)} characters"
    if isinstance(value, (set, array)):
        return f"{kind} of {len(value)}"
    if isinstance(value, (list, tuple)):
        sized = [len(item) for item in value[:_MAX_COUNTED] if isinstance(item, (bytes, str))]
        return f"{kind} of {len(value)}" + (f", {sum(sized)} characters" if sized else "")
    shape = getattr(value, "shape", None)
    return f"{kind} of shape {tuple(shape)}" if isinstance(shape, tuple) else kind


def weigh(value: object, most: int) -> int:
    """Return about how long a value is as JSON, in bytes; no more of it is looked at once it is over `most`."""
    weight, rest = 0, [value]
    while rest and weight <= most:
        item = rest.pop()
        kind = type(item)
        if kind in _SCALARS:
            if isinstance(item, int):
                weight += item.bit_length() // 3
            continue
        if isinstance(item, str):
            weight += len(item)
        elif isinstance(item, dict):
            weight += _VALUE_WEIGHT * (1 + len(item))
            if weight <= most:
                rest += item.values()
                with contextlib.suppress(TypeError):  # keys that are no words are short
                    weight += len("".join(item))
        elif isinstance(item, (list, tuple)):
            weight += _VALUE_WEIGHT * (1 + len(item))
            if weight <= most:
                rest += item
    return weight


def _both_ends(value: Any, most: int, name: str, truncated: dict[str, dict[str, int]]) -> Any:
    """Return a text or a list, or of one that is longer than `most` its beginning and its end, which is noted."""
    if len(value) <= most:
        return value
    half = max(0, most) // 2
    truncated[name] = {"first": half, "last": half, "of": len(value)}
    return value[:half] + value[len(value) - half :]


def _encode_ids(input_ids: object, room: int, truncated: dict[str, dict[str, int]]) -> tuple[bytes, int]:
    """Return token ids as so many bytes at most, and how many each takes, 0 where they are no flat list of integers."""
    if isinstance(input_ids, (list, tuple, array)):
        for size, code in _ID_CODES.items():
            with contextlib.suppress(TypeError, OverflowError):
                kept = _both_ends(input_ids, min(MAX_IDS, room // size), "input_ids", truncated)
                return array(code, kept).tobytes(), size
    truncated.pop("input_ids", None)
    return b"", 0


#: Returns a value as JSON without spaces.
to_json = json.JSONEncoder(skipkeys=True, separators=(",", ":"), default=describe).encode


def _encode_fields(
    fields: Mapping[str, Any], omitted: Mapping[str, str], truncated: Mapping[str, object], most: int
) -> bytes:
    notes = ({"omitted": omitted} if omitted else {}) | ({"truncated": truncated} if truncated else {})
    with contextlib.suppress(ValueError, TypeError, RecursionError):
        encoded = to_json({**fields, **notes}).encode()
        if len(encoded) <= most:
            return encoded
    small = {name: value for name, value in fields.items() if _is_small(value)}
    large = {name: describe(value) for name, value in fields.items() if name not in small and name != "omitted"}
    return to_json({**small, **notes, "omitted": {**large, **omitted}}).encode()


def _is_small(value: object) -> bool:
    if isinstance(value, int):
        return value.bit_length() <= _LONG
    return value is None or isinstance(value, float) or (isinstance(value, str) and len(value) < _LONG)
