"""Read documents that anyone may have written: keep the parts that fit (`read`), or refuse the whole (`read_whole`).

Also helpers that return JSON values as one type, and convert times as documents have them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime, timezone
from functools import cache
from itertools import islice
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import msgspec

_Kind = TypeVar("_Kind")
_fields = cache(msgspec.structs.fields)
#: Where a part of a list or an object does not fit, only this many parts are read, one by one.
_MAX_PARTS = 20_000
#: The value in place of a required one that is missing or has another form.
_EMPTY: dict[object, Callable[[], Any]] = {str: str, int: int, float: float, list: list, dict: dict, bool: bool}


def writable(value: str) -> str:
    """Return text with lone surrogates escaped: JSON may have them, and they can't be written to a file."""
    return value if value.isascii() else value.encode(errors="backslashreplace").decode()


def mapping_of(value: object) -> Mapping[str, Any]:
    """Return `value` where it is a JSON object, an empty one otherwise."""
    return value if isinstance(value, dict) else {}


def mappings_of(value: object) -> list[Mapping[str, Any]]:
    """Return the JSON objects in `value` where it is a list."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def texts_of(value: object) -> list[str]:
    """Return the entries of a list as text; nothing where `value` is no list."""
    return [str(one) for one in value] if isinstance(value, list) else []


def iso_time(seconds: float) -> str:
    """Return seconds since the epoch as UTC in ISO 8601."""
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def seconds_of(time: object) -> float | None:
    """Return a time of the form of `iso_time` as seconds since the epoch; None for any other value."""
    try:
        return datetime.fromisoformat(str(time).replace("Z", "+00:00")).timestamp()
    except (ValueError, OverflowError, OSError):
        return None


def read(value: object, kind: type[_Kind]) -> _Kind:
    """Return a document as a Struct with the parts that fit; only a part of another form is left out."""
    found: _Kind = _required(_plain(value), kind)
    return found


def read_whole(value: object, kind: type[_Kind], name: str) -> _Kind:
    """Return a document as `kind`, lone surrogates escaped; raises ValueError if any part has another form."""
    try:
        try:
            # This finds lone surrogates in C, as there may be millions of values.
            json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
        except UnicodeEncodeError:
            value = _plain(value)
        return msgspec.convert(value, kind)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not a {name}: {error}") from None


def _plain(value: object) -> object:
    """Return a JSON value with lone surrogates escaped, and None for infinite, NaN and huge numbers."""
    if isinstance(value, list):
        return [_plain(one) for one in value]
    if isinstance(value, dict):
        return type(value)({writable(str(name)): _plain(one) for name, one in value.items()})
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, int) and abs(value) >= 1 << 64:
        return None
    return writable(value) if isinstance(value, str) else value


def _required(value: object, kind: Any) -> Any:
    with suppress(msgspec.ValidationError):
        return _convert(value, kind)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return _convert({}, kind)
    origin = get_origin(kind) or kind
    if origin is Literal:
        # A newer kit may write words that this version doesn't know.
        return value if isinstance(value, str) else get_args(kind)[-1]
    return str(value) if origin is str and isinstance(value, int | float) else _EMPTY.get(origin, NoneType)()


def _convert(value: object, kind: Any) -> Any:
    """Return a value as `kind`, without parts of another form; raises ValidationError if nothing fits."""
    with suppress(msgspec.ValidationError):
        return msgspec.convert(value, kind, dec_hook=_own)
    origin, arguments = get_origin(kind) or kind, get_args(kind)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and isinstance(value, dict):
        told = {}
        for field in _fields(kind):
            if field.required:
                told[field.name] = _required(value.get(field.encode_name), field.type)
            elif field.encode_name in value:
                with suppress(msgspec.ValidationError):
                    told[field.name] = _convert(value[field.encode_name], field.type)
        return kind(**told)
    if origin is list and isinstance(value, list):
        return [one for part in value[:_MAX_PARTS] for one in _kept(part, arguments[0])]
    if origin is dict and isinstance(value, dict):
        parts = islice(value.items(), _MAX_PARTS)
        return {str(name): one for name, part in parts for one in _kept(part, arguments[1])}
    for arm in arguments if origin in (Union, UnionType) else ():
        if arm is not NoneType:
            with suppress(msgspec.ValidationError):
                return _convert(value, arm)
    raise msgspec.ValidationError(f"no {kind}: {value!r:.80}")


def _kept(value: object, kind: Any) -> list[Any]:
    with suppress(msgspec.ValidationError):
        return [_convert(value, kind)]
    return []


def _own(kind: type[_Kind], value: Any) -> _Kind:
    """Return a JSON object as a class that wraps it unchanged, such as `incident.Entry`."""
    if not isinstance(value, dict):
        raise msgspec.ValidationError("not an object")
    return kind(value)  # type: ignore[call-arg]
