"""Say whether a server failed as the one of an incident did."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from sglang_crashkit.incident.fingerprint import fault_of
from sglang_crashkit.incident.names import stopped_state
from sglang_crashkit.incident.summary import mapping_of, mappings_of

_LINE = re.compile(r":\d+\)$")


def is_same_fault(some: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Say whether two incidents, given as their documents, are of one fault.

    The fingerprint, but for what depends on the moment: which of several ranks that do the same was first, and, where
    the one that failed left no frames, where the others stood. Of a hang also the line, and what was called just then.
    """
    if _kind_of(some) == _kind_of(other) == "hang":
        return _is_same_hang(some, other)
    one, two = fault_of(some), fault_of(other)
    if one is None or two is None:
        return False
    if (one.kind, one.what, one.who.split(" ")[0]) != (two.kind, two.what, two.who.split(" ")[0]):
        return False
    return one.frames == two.frames or not _own_frames(some) or not _own_frames(other)


def _kind_of(document: Mapping[str, Any]) -> object:
    return mapping_of(document.get("verdict")).get("kind")


def _own_frames(document: Mapping[str, Any]) -> list[object]:
    return list(_first_of(document).get("doing") or ())


def _first_of(document: Mapping[str, Any]) -> Mapping[str, Any]:
    pid = mapping_of(mapping_of(document.get("verdict")).get("first_failure")).get("pid")
    return next((one for one in mappings_of(document.get("processes")) if one.get("pid") == pid), {})


def _is_same_hang(some: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    ones, twos = _hung(some), _hung(other)
    if not {(one.get("role"), stopped_state(one)) for one in ones} & {
        (two.get("role"), stopped_state(two)) for two in twos
    }:
        return False
    stacks, others = _functions_of(ones), _functions_of(twos)
    # Where nobody was seen, that it hangs is all there is.
    return not stacks or not others or any(_meet(one, two) for one, two in product(stacks, others))


def _hung(document: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the process that hangs; where no single one is named, all ranks."""
    first = _first_of(document)
    return (
        [first] if first else [one for one in mappings_of(document.get("processes")) if one.get("role") == "scheduler"]
    )


def _functions_of(processes: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return the functions and files that each was in, innermost first, of those that left any."""
    return [[_LINE.sub(")", str(frame)) for frame in one["doing"]] for one in processes if one.get("doing")]


def _meet(one: Sequence[str], two: Sequence[str]) -> bool:
    """Say whether two stacks, of which only the innermost frames are known, have a function in common and its callers.

    It is the innermost of one of them, or what each called from it is one frame.
    """
    places = [(at, its) for at in range(len(one)) for its in range(len(two)) if min(at, its) == 0 or at == its == 1]
    # What both called says little where nothing but one of its callers is known.
    return any(
        (size := min(len(one) - at, len(two) - its)) > min(at, its) and one[at : at + size] == two[its : its + size]
        for at, its in places
    )


def words_of(document: Mapping[str, Any]) -> str:
    """Return in one line how the server of an incident failed."""
    return str(mapping_of(document.get("verdict")).get("text") or document.get("kind"))
