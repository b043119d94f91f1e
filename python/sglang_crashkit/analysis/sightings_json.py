"""Sightings as data, so that a host can send what it saw without the snapshots.

What processes did, and each stack and frame of it, stands once, in a table. A process is as in a snapshot, without
threads, and has a list of its looks: time, state, CPU time, the number of what it did, and why there was no stack.
`SCHEMA_VERSION` grows when a reader of the older form would misread it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from functools import lru_cache
from typing import Any, get_args

from sglang_crashkit.analysis.member import Sight
from sglang_crashkit.analysis.sightings import Seen, Sightings
from sglang_crashkit.analysis.stack_tree import PrefixTree
from sglang_crashkit.analysis.states import Activity, Kind
from sglang_crashkit.model import checked_json as checked
from sglang_crashkit.model.sample import Frame
from sglang_crashkit.model.snapshot import (
    problems_from_json,
    process_from_json,
    process_to_json,
    stacks_from_json,
    stacks_to_json,
)

SCHEMA_VERSION = 1

_KINDS = frozenset(get_args(Kind))
_Doing = tuple[Activity, tuple[Frame, ...]]


#: Equal ones of many hosts are one object, as those of one host are.
@lru_cache(maxsize=1 << 16)
def _doing(activity: Activity, frames: tuple[Frame, ...]) -> _Doing:
    return activity, frames


def to_json(sightings: Sightings) -> dict[str, Any]:
    """Return sightings as JSON values, ``schema_version`` first."""
    doings: dict[_Doing, int] = {}
    stacks: dict[tuple[Frame, ...], int] = {}
    processes = [_seen_to_json(seen, doings) for seen in sightings.processes()]
    return {
        "schema_version": SCHEMA_VERSION,
        "rounds": dict(sorted(sightings.rounds.items())),
        "processes": processes,
        "problems": [asdict(problem) for problem in sightings.problems()],
        "doings": [
            {**_activity_to_json(activity), "stack": stacks.setdefault(frames, len(stacks))}
            for activity, frames in doings
        ],
        **stacks_to_json(stacks),
        "tree": sightings.tree.to_json(),
    }


def from_json(document: Any) -> Sightings:
    """Return the sightings of which `document` holds the JSON values.

    Raises:
        ValueError: it holds none, or those of a newer kit.
    """
    checked.check_version(document, "set of sightings", SCHEMA_VERSION)
    try:
        return _read(document)
    except KeyError as error:
        raise ValueError(f"not a set of sightings: it lacks {error}") from None
    except (AttributeError, OverflowError, TypeError, ValueError) as error:
        raise ValueError(f"not a set of sightings: {error}") from None


def _read(document: Mapping[str, Any]) -> Sightings:
    sightings = Sightings()
    sightings.tree = PrefixTree.from_json(document["tree"])
    sightings.note_problems(problems_from_json(document["problems"]))
    for host, time in document["rounds"].items():
        sightings.note_round(checked.text(host), checked.number(time))
    stacks = stacks_from_json(document)
    doings = [
        _doing(_activity(entry), *checked.pick(stacks, [entry["stack"]]))
        for entry in checked.entries(document["doings"])
    ]
    for entry in checked.entries(document["processes"]):
        seen = sightings.seen(process_from_json(entry, []), checked.number(entry["last"]))
        rows = [checked.entries(row) for row in checked.entries(entry["looks"])]
        numbers = [number for _time, _state, _cpu_secs, number, _problem in rows]
        for row, (activity, frames) in zip(rows, checked.pick(doings, numbers), strict=True):
            time, state, cpu_secs, _number, problem = row
            seen.sights.append(
                Sight(
                    checked.text(state),
                    checked.number(cpu_secs),
                    activity,
                    frames,
                    checked.number(time),
                    checked.text(problem),
                )
            )
        seen.gone += checked.whole(entry["gone"])
    return sightings


def _seen_to_json(seen: Seen, doings: dict[_Doing, int]) -> dict[str, Any]:
    looks = []
    for sight in seen.in_order():
        number = doings.setdefault((sight.activity, sight.frames), len(doings))
        looks.append([sight.time, sight.state, sight.cpu_secs, number, sight.problem])
    return {
        **process_to_json(seen.process, {}),
        "last": seen.last,
        "gone": seen.gone,
        "looks": looks,
    }


def _activity_to_json(activity: Activity) -> dict[str, Any]:
    return {
        "kind": activity.kind,
        "words": activity.words,
        "function": activity.function,
        "backend": activity.backend,
        "requests": activity.requests,
        "batch": activity.batch,
    }


def _activity(entry: Mapping[str, Any]) -> Activity:
    if entry["kind"] not in _KINDS:
        raise ValueError(f"{entry['kind']!r:.80} is not a state that is known")
    return Activity(
        entry["kind"],
        checked.text(entry["words"]),
        checked.text(entry["function"]),
        checked.text(entry["backend"]),
        entry["requests"] is True,
        entry["batch"] is True,
    )
