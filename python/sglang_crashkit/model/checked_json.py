"""Values of JSON that others wrote, each of the type that it must have, and times as documents have them."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any


def writable(value: str) -> str:
    """Return text that every file takes: a lone surrogate, which none would, may stand in JSON."""
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
    """Return a time as `iso_time` writes it in seconds since the epoch; None otherwise."""
    try:
        return datetime.fromisoformat(str(time).replace("Z", "+00:00")).timestamp()
    except (ValueError, OverflowError, OSError):
        return None
