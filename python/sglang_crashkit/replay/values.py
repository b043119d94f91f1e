"""Have a parameter's value ask for less: fewer entries of a list, fewer names of a mapping, a shorter text.

A text that is JSON, such as a schema, is reduced as what it says. How often a smaller value may fail has a limit, as
each time costs the start of a server.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

from sglang_crashkit.replay.search import lowest, needed, shortest

#: Returns the index of the first value that fails, None where all survive.
FirstFailingValue = Callable[[Sequence[Any]], "int | None"]

#: A smaller value fails so often at most before what is left is taken as it is.
MAX_FAILURES = 8
#: So many entries at most are tried one by one, or looked into; and so deep.
_MAX_SINGLE, _MAX_INTO, _MAX_DEPTH = 64, 4, 8


def reduce_value(value: Any, first_failing: FirstFailingValue, most: int = MAX_FAILURES) -> Any:
    """Return a value as small as was found that fails, as `value` does.

    Args:
        value: as JSON has it.
        first_failing: see above.
        most: how often it may find one that fails.
    """
    left = most

    def limited(values: Sequence[Any]) -> int | None:
        nonlocal left
        at = first_failing(values) if left > 0 else None
        left -= at is not None
        return at

    return _reduced(value, limited, _MAX_DEPTH)


def _reduced(value: Any, first_failing: FirstFailingValue, depth: int) -> Any:
    if isinstance(value, (int, float)):
        return value if isinstance(value, bool) or not math.isfinite(value) else lowest(value, first_failing)
    if depth == 0:
        return value
    if isinstance(value, str):
        return _reduced_text(value, first_failing, depth)
    if isinstance(value, list):
        kept = _fewest(value, first_failing)
        if len(kept) <= _MAX_INTO:
            for place, one in enumerate(kept):
                kept[place] = _reduced(one, _inside(kept, place, first_failing), depth - 1)
        return kept
    if isinstance(value, dict):
        few = dict(_fewest(list(value.items()), lambda groups: first_failing([dict(group) for group in groups])))
        if len(few) <= _MAX_INTO:
            for name, one in few.items():
                few[name] = _reduced(one, _inside(few, name, first_failing), depth - 1)
        return few
    return value


def _reduced_text(text: str, first_failing: FirstFailingValue, depth: int) -> str:
    try:
        told = json.loads(text)
    except (ValueError, RecursionError):
        told = None
    if not isinstance(told, (dict, list)):
        return shortest(text, first_failing)
    few = _reduced(told, lambda values: first_failing([json.dumps(one) for one in values]), depth - 1)
    return text if few == told else json.dumps(few)


def _fewest(entries: list[Any], first_failing: FirstFailingValue) -> list[Any]:
    run = shortest(entries, first_failing)
    if not 2 < len(run) <= _MAX_SINGLE:
        return run

    def chosen(places: Sequence[int]) -> list[Any]:
        return [run[place] for place in sorted(places)]

    few = needed(range(len(run)), lambda groups: first_failing([chosen(places) for places in groups]))
    return run if few is None else chosen(few)


def _inside(holder: Any, place: Any, first_failing: FirstFailingValue) -> FirstFailingValue:
    """Return what tries values of one place of a list or a mapping."""

    def tried(values: Sequence[Any]) -> int | None:
        made = []
        for value in values:
            changed = holder.copy()
            changed[place] = value
            made.append(changed)
        return first_failing(made)

    return tried
