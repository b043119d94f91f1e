"""Values of JSON that others wrote, each of the type that it must have, and times as documents have them.

All functions but `writable` and those from `mapping_of` on raise ``ValueError`` with the value that is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Any, TypeVar, cast

_Entry = TypeVar("_Entry")


def whole(value: object) -> int:
    """Return a whole number."""
    if type(value) is not int:
        raise ValueError(f"{value!r:.80} is not a whole number")
    return value


def number(value: object) -> float:
    """Return a finite number."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < float("inf"):
        raise ValueError(f"{value!r:.80} is not a number")
    return float(value)


def text(value: object) -> str:
    """Return text that every file takes."""
    if not isinstance(value, str):
        raise ValueError(f"{value!r:.80} is not text")
    return writable(value)


def writable(value: str) -> str:
    """Return text that every file takes: a lone surrogate, which none would, may stand in JSON; it does not raise."""
    return value if value.isascii() else value.encode(errors="backslashreplace").decode()


def texts(values: Sequence[object]) -> Sequence[str]:
    """Return text for each value; quick, for there are many."""
    if {*map(type, values)} <= {str} and "".join(map(str, values)).isascii():
        return cast(Sequence[str], values)
    return [text(value) for value in values]


def entries(value: object) -> list[Any]:
    """Return a list."""
    if not isinstance(value, list):
        raise ValueError(f"{value!r:.80} is not a list")
    return value


def pick(table: Sequence[_Entry], numbers: Sequence[Any]) -> list[_Entry]:
    """Return the entries of a table that have these numbers."""
    if numbers and {*map(type, numbers)} != {int}:
        raise ValueError("a number in a table is not a whole number")
    if numbers and not 0 <= min(numbers) <= max(numbers) < len(table):
        raise ValueError(f"there are numbers from {min(numbers)} to {max(numbers)} in a table of {len(table)}")
    return [table[place] for place in numbers]


def check_version(document: Any, name: str, supported: int) -> None:
    """Check that `document` is an object of a version that is read here: up to `supported` of a `name`."""
    version = document.get("schema_version") if isinstance(document, dict) else None
    if type(version) is not int:
        raise ValueError(f"not a {name}: there is no schema_version")
    if version > supported:
        raise ValueError(f"the {name} has schema_version {version}, this kit reads up to {supported}")


def mapping_of(value: object) -> Mapping[str, Any]:
    """Return `value` where it is a JSON object, an empty one otherwise; it does not raise."""
    return value if isinstance(value, dict) else {}


def mappings_of(value: object) -> list[Mapping[str, Any]]:
    """Return the JSON objects in `value` where it is a list; it does not raise."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def texts_of(value: object) -> list[str]:
    """Return the entries of a list as text; nothing where `value` is no list."""
    return [str(one) for one in value] if isinstance(value, list) else []


def iso_time(seconds: float) -> str:
    """Return seconds since the epoch as UTC in ISO 8601."""
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def seconds_of(time: object) -> float | None:
    """Return a time as `iso_time` writes it in seconds since the epoch; None otherwise."""
    try:
        return datetime.fromisoformat(str(time).replace("Z", "+00:00")).timestamp()
    except (ValueError, OverflowError, OSError):
        return None
