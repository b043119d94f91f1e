"""The request journal: the requests that a process of the server received, in memory that outlives the process.

A request is recorded when it arrives, with its inputs and sampling parameters, and again, in a few bytes, when it ends.
The memory is a `ring`, in which an unfinished request outlives finished ones.

Text is kept as UTF-8, token ids as integers of four bytes (eight if one does not fit), and all else as one JSON object:
reading it runs no foreign code. Requests are recorded in SGLang's event loop, so of a long prompt only both ends are
kept, and other values that a user made too large are not read.
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

#: Ended requests are returned if they ended within this time before the last event, in seconds. SGLang keeps finished
#: requests in memory for the same time (``TokenizerManager.record_request_for_crash_dump``).
KEPT_SECS = 300.0
#: The maximum numbers of token ids, and of characters of a text (wide: of one with any beyond ASCII); the first and the
#: last half are kept of a longer prompt. A context of 128 k has as many tokens; recording them takes under 1 ms.
MAX_IDS, MAX_CHARACTERS, MAX_WIDE = 131_072, 262_144, 65_536

_BEGUN, _ENDED, _ABORTED = 1, 2, 3
#: kind, whether there is text, bytes of one token id, bytes of the fields, the text and all ids; number, time.
BEGIN = struct.Struct("<B?BxIIIQd")
#: kind, whether it was finished, number, time.
END = struct.Struct("<B?6xQd")
_ID_CODES = {4: "I", 8: "q"}
_MAX_COUNTED = 256
#: The maximum number of requests that a reader keeps; a journal that the kit wrote has fewer.
_MAX_REQUESTS = 100_000
_LONG = 256
_SCALARS = frozenset({bool, int, float, type(None)})
#: The weight that `weigh` gives to each item of a container, and to the container itself, of any type.
_VALUE_WEIGHT = 64
#: The maximum weight of a request's fields together; recording them takes a quarter of a millisecond then.
MAX_WEIGHT = 64 * 1024


class JournalWriter(RingWriter):
    """Records the requests of this process in a ring of `size` bytes; for one thread; `lost` requests found no room.

    Raises:
        RingError: there is no memory for it; each method raises this, too.
        ValueError: the journal is closed; only methods raise this.
    """

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._number = 0

    def begin(self, fields: Mapping[str, Any], text: object = None, input_ids: object = None) -> int:
        """Record a request that arrived, see `encode_begin`; return its number, for `end`."""
        self._number += 1
        now = time.time()
        try:
            record = encode_begin(self._number, now, fields, text, input_ids, self.max_payload)
        except Exception as error:  # noqa: BLE001 - the next request may be encodable
            why = {"request": f"it cannot be encoded: {type(error).__name__}"}
            kept = {"rid": short_rid(fields.get("rid")), "omitted": why}
            record = encode_begin(self._number, now, kept, None, None, self.max_payload)
        self.append(record, hold=self._number)
        return self._number

    def abort(self, number: int) -> None:
        """Record that the request with this number is aborted; it may not have ended yet."""
        self.append(END.pack(_ABORTED, False, number, time.time()))

    def end(self, number: int, *, finished: bool) -> None:
        """Record that the request with this number ended: it was answered, or dropped if not `finished`."""
        self.release(number)
        self.append(END.pack(_ENDED, finished, number, time.time()))


class JournaledRequest(NamedTuple):
    """A request in a journal; times are in seconds since the epoch."""

    arrived: float
    ended: float | None  # None if it is in progress
    finished: bool  # it ended because it was answered, not because it was dropped
    offset: int  # of its record in the ring
    sequence: int  # of its record
    aborted: float | None = None  # when its client or a request aborted it; None if it was not aborted


class JournalReader(RingReader):
    """Reads the journal of one process, which may be dead, a part of it at a time; see `RingReader`.

    Attributes:
        requests: the unfinished requests, oldest first; then those that ended within `KEPT_SECS`, latest first.
        lost: how many unfinished requests found no room.

    Raises:
        RingError: it cannot be read or is not a journal.
    """

    def __init__(self, descriptor: int, deadline: float = math.inf) -> None:
        super().__init__(descriptor, deadline=deadline)
        self.lost = 0
        #: By kind and by the number of the request: sequence number, offset and time of the record; whether finished.
        found: dict[int, dict[int, tuple[int, int, float, bool]]] = {_BEGUN: {}, _ENDED: {}, _ABORTED: {}}
        # The sequence number and the time, since the epoch, of the newest record.
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
                # Chosen by number: the machine's clock may have been set back after an earlier record.
                latest = seconds
            known = found[kind]
            if len(known) > _MAX_REQUESTS:
                break
            # A record that was held may be there twice.
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
                # For an aborted request SGLang's `finished` means the abort.
                finished = end[3] and aborted is None
                ended.append((end[0], JournaledRequest(arrived, end[2], finished, offset, sequence, aborted)))
        self.requests = unfinished + [request for _sequence, request in sorted(ended, reverse=True)]

    def load(self, request: JournaledRequest) -> dict[str, Any] | None:
        """Return all that the journal has of a request, see `decode_request`; None if it has been overwritten."""
        record = self.payload(request.offset, request.sequence)
        return None if record is None else decode_request(record)


def encode_begin(
    number: int, seconds: float, fields: Mapping[str, Any], text: object, input_ids: object, most: int
) -> bytes:
    """Return the record of a request that arrived, of at most `most` bytes, which are 4096 or more.

    If a prompt is too long, its beginning and end are kept; ``truncated`` has, for ``text`` in characters and for
    ``input_ids``, the numbers of ``first`` and ``last`` ones kept, and of all (``of``). ``omitted`` describes other
    values that are too large, or not JSON. The weight of `fields` must not exceed `MAX_WEIGHT`.
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
        # A pair of texts to compare.
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
        raise ValueError(f"the fields of a request take {len(encoded)} bytes")
    head = BEGIN.pack(_BEGUN, has_text, id_size, *sizes, number, seconds)
    return b"".join((head, encoded, encoded_text, ids))


def decode_request(record: bytes) -> dict[str, Any]:
    """Return the contents of a record of `encode_begin`: the fields, ``text`` and ``input_ids``.

    Raises:
        ValueError: it is not such a record; RecursionError if it is nested too deep.
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
    """Return the type and the size of a value, in words, to show in place of the value."""
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
    """Return about how long a value is as JSON, in bytes; stop reading it once that is over `most`."""
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
                with contextlib.suppress(TypeError):  # keys that are not strings are short
                    weight += len("".join(item))
        elif isinstance(item, (list, tuple)):
            weight += _VALUE_WEIGHT * (1 + len(item))
            if weight <= most:
                rest += item
    return weight


def _both_ends(value: Any, most: int, name: str, truncated: dict[str, dict[str, int]]) -> Any:
    """Return a text or a list; if it is longer than `most`, its beginning and end, and record that in `truncated`."""
    if len(value) <= most:
        return value
    half = max(0, most) // 2
    truncated[name] = {"first": half, "last": half, "of": len(value)}
    return value[:half] + value[len(value) - half :]


def _encode_ids(input_ids: object, room: int, truncated: dict[str, dict[str, int]]) -> tuple[bytes, int]:
    """Return token ids as at most `room` bytes, and the bytes of each id, 0 if they are not a flat list of integers."""
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
