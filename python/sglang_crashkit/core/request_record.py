"""How the request journal writes down the beginning and the end of a request.

Prompts are the bulk of a request: text is kept as UTF-8, token ids as integers of four bytes (eight where one does not
fit), and everything else as one JSON object. Nothing is pickled, so that reading it runs nobody's code.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_BEGUN, _ENDED = 1, 2
#: kind, whether there is text, bytes of one token id, bytes of the fields, the text and all ids; number, when.
_BEGIN = struct.Struct("<B?BxIIIQd")
#: kind, whether it was finished, number, when.
_END = struct.Struct("<B?6xQd")
_ID_CODES = {4: "i", 8: "q"}
_MOST_COUNTED = 256
_LONG = 256

#: How many bytes `read_head` needs of a record.
HEAD_BYTES = _BEGIN.size


@dataclass(frozen=True)
class Head:
    """What a record says first.

    Attributes:
        number: which request, counted by the process that wrote it.
        seconds: when, since the epoch.
        begun: it tells of a beginning; of an end otherwise.
        finished: the request was answered, and not dropped; False for a beginning.
    """

    number: int
    seconds: float
    begun: bool
    finished: bool = False


def encode_begin(
    number: int, seconds: float, fields: Mapping[str, Any], text: object, input_ids: object, most: int
) -> bytes:
    """Return the record of a request that arrived.

    What is too large, or no JSON value, is replaced by a description below ``omitted``.

    Args:
        number: which request.
        seconds: when, since the epoch.
        fields: what is known of it beside the prompt; ``omitted`` may hold descriptions.
        text: the prompt, None where there is none.
        input_ids: the prompt's token ids, None where there are none.
        most: how many bytes the record may have, 4096 or more.
    """
    described: dict[str, str] = {}
    encoded_text, ids, id_size = b"", b"", 0
    has_text = isinstance(text, str)
    if isinstance(text, str):
        encoded_text = text.encode("utf-8", "surrogatepass")
    elif text is not None:
        # A pair of texts that are compared.
        fields = {**fields, "text": text}
    if input_ids is not None:
        ids, id_size = _encode_ids(input_ids)
        if not id_size:
            described["input_ids"] = describe(input_ids)
    encoded = _encode_fields(fields, described, most // 2)
    if _BEGIN.size + len(encoded) + len(encoded_text) + len(ids) > most:
        described |= {"text": describe(text)} if has_text else {}
        described |= {"input_ids": describe(input_ids)} if id_size else {}
        encoded_text, ids, id_size, has_text = b"", b"", 0, False
        encoded = _encode_fields(fields, described, most // 2)
    head = _BEGIN.pack(_BEGUN, has_text, id_size, len(encoded), len(encoded_text), len(ids), number, seconds)
    return b"".join((head, encoded, encoded_text, ids))


def encode_end(number: int, seconds: float, *, finished: bool) -> bytes:
    """Return the record of a request that ended; see `Head`."""
    return _END.pack(_ENDED, finished, number, seconds)


def read_head(record: bytes) -> Head | None:
    """Return what a record, or its first `HEAD_BYTES`, says first; None where it is of another kind."""
    if record[:1] == bytes([_BEGUN]) and len(record) >= _BEGIN.size:
        *_sizes, number, seconds = _BEGIN.unpack_from(record)
        return Head(number, seconds, begun=True)
    if record[:1] == bytes([_ENDED]) and len(record) == _END.size:
        _kind, finished, number, seconds = _END.unpack(record)
        return Head(number, seconds, begun=False, finished=finished)
    return None


def decode_request(record: bytes) -> dict[str, Any]:
    """Return all that the record of a beginning holds: the fields, ``text`` and ``input_ids``."""
    _kind, has_text, id_size, fields_size, text_size, ids_size, _number, _seconds = _BEGIN.unpack_from(record)
    text_begin = _BEGIN.size + fields_size
    ids_begin = text_begin + text_size
    # Python reads and writes NaN and Infinity, which JSON does not know.
    request: dict[str, Any] = json.loads(record[_BEGIN.size : text_begin], parse_constant=str)
    if has_text:
        request["text"] = record[text_begin:ids_begin].decode("utf-8", "surrogatepass")
    if id_size:
        code = f"<{ids_size // id_size}{_ID_CODES[id_size]}"
        request["input_ids"] = list(struct.unpack_from(code, record, ids_begin))
    return request


def describe(value: object) -> str:
    """Say what a value is and how large, in place of the value."""
    kind = type(value).__name__
    if isinstance(value, (bytes, bytearray)):
        return f"{kind}, {len(value)} bytes"
    if isinstance(value, str):
        return f"{kind}, {len(value)} characters"
    if isinstance(value, (list, tuple)):
        sized = [len(item) for item in value[:_MOST_COUNTED] if isinstance(item, (bytes, str))]
        return f"{kind} of {len(value)}" + (f", {sum(sized)} characters" if sized else "")
    shape = getattr(value, "shape", None)
    return f"{kind} of shape {tuple(shape)}" if isinstance(shape, tuple) else kind


def _encode_ids(input_ids: object) -> tuple[bytes, int]:
    """Return token ids as bytes, and how many each takes; 0 where they are no flat list of integers."""
    if isinstance(input_ids, (list, tuple)):
        for size, code in _ID_CODES.items():
            try:
                return struct.pack(f"<{len(input_ids)}{code}", *input_ids), size
            except struct.error:
                continue
    return b"", 0


_to_json = json.JSONEncoder(skipkeys=True, separators=(",", ":"), default=describe).encode


def _encode_fields(fields: Mapping[str, Any], described: dict[str, str], most: int) -> bytes:
    omitted = {**fields.get("omitted", {}), **described}
    try:
        encoded = _to_json({**fields, "omitted": omitted} if omitted else fields).encode()
    except (ValueError, TypeError, RecursionError):
        encoded = b""
    if encoded and len(encoded) <= most:
        return encoded
    small = {name: value for name, value in fields.items() if _is_small(value)}
    large = {name: describe(value) for name, value in fields.items() if name not in small and name != "omitted"}
    return _to_json({**small, "omitted": large | omitted}).encode()


def _is_small(value: object) -> bool:
    return isinstance(value, (bool, int, float, type(None))) or (isinstance(value, str) and len(value) < _LONG)
