"""Times as every document of the kit has them."""

from __future__ import annotations

from datetime import datetime, timezone


def iso_time(seconds: float) -> str:
    """Return seconds since the epoch as UTC in ISO 8601."""
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
