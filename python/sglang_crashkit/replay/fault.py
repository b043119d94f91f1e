"""Say whether a server failed as the one of an incident did."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from sglang_crashkit.incident.fingerprint import fault_of
from sglang_crashkit.incident.names import stopped_state
from sglang_crashkit.incident.summary import mapping_of, mappings_of

_LINE = re.compile(r":\d+\)$")
#: Of a rank that hangs, so many of the innermost functions tell where it does.
_FRAMES = 2


def words_of(document: Mapping[str, Any]) -> str:
    """Return in one line how the server of an incident failed."""
    return str(mapping_of(document.get("verdict")).get("text") or document.get("kind"))


def is_same_fault(some: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Say whether two incidents, given as their documents, are of one fault.

    The fingerprint, but for what depends on the moment: which of several ranks that do the same was first, and, where
    the one that failed left no frames, where the others stood. Of a hang also the line, and what was called just then.
    """
    if all(mapping_of(one.get("verdict")).get("kind") == "hang" for one in (some, other)):
        return _is_same_hang(_hung(some), _hung(other))
    one, two = fault_of(some), fault_of(other)
    if one is None or two is None:
        return False
    if (one.kind, one.what, one.who.split(" ")[0]) != (two.kind, two.what, two.who.split(" ")[0]):
        return False
    return one.frames == two.frames or not _first_of(some).get("doing") or not _first_of(other).get("doing")


def _first_of(document: Mapping[str, Any]) -> Mapping[str, Any]:
    pid = mapping_of(mapping_of(document.get("verdict")).get("first_failure")).get("pid")
    return next((one for one in mappings_of(document.get("processes")) if one.get("pid") == pid), {})


def _hung(document: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the process that hangs; where no single one is named, all ranks."""
    first, processes = _first_of(document), mappings_of(document.get("processes"))
    return [first] if first else [one for one in processes if one.get("role") == "scheduler"]


def _is_same_hang(some: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]]) -> bool:
    one, two = ({(rank.get("role"), stopped_state(rank)) for rank in ranks} for ranks in (some, other))
    # What was called just then depends on the moment.
    ones, twos = (
        {_LINE.sub(")", str(frame)) for rank in ranks for frame in (rank.get("doing") or ())[:_FRAMES]}
        for ranks in (some, other)
    )
    # Where nobody was seen, that it hangs is all there is.
    return bool(one & two) and (not ones or not twos or bool(ones & twos))
