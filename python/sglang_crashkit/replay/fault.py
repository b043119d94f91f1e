"""Say whether a server failed as the one of an incident did."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_crashkit.incident.fingerprint import fault_of
from sglang_crashkit.incident.summary import mapping_of, mappings_of


def is_same_fault(some: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Say whether two incidents, given as their documents, are of one fault.

    The fingerprint, but for what depends on the moment: which of several ranks that do the same was first, and, where
    the one that failed left no frames, where the others stood.
    """
    one, two = fault_of(some), fault_of(other)
    if one is None or two is None:
        return False
    if (one.kind, one.what, one.who.split(" ")[0]) != (two.kind, two.what, two.who.split(" ")[0]):
        return False
    return one.frames == two.frames or not _own_frames(some) or not _own_frames(other)


def _own_frames(document: Mapping[str, Any]) -> list[object]:
    pid = mapping_of(mapping_of(document.get("verdict")).get("first_failure")).get("pid")
    first = next((one for one in mappings_of(document.get("processes")) if one.get("pid") == pid), {})
    return list(first.get("doing") or ())


def words_of(document: Mapping[str, Any]) -> str:
    """Return in one line how the server of an incident failed."""
    return str(mapping_of(document.get("verdict")).get("text") or document.get("kind"))
