"""Find the smallest that brings a fault back: pure, told by a function what each trial came to.

The function takes groups, which are tried one after the other on one server for as long as that survives, and returns
the first that brought the fault back. So what is innocent costs no start of a server, and each guilty one costs one:
groups are ordered from the smallest to the largest.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from itertools import chain, pairwise
from typing import Any, TypeVar

T = TypeVar("T")
#: What has parts in an order.
Run = TypeVar("Run", str, "list[Any]")

_MAX_EXPONENT, _STEPS = 63, 16

#: Returns the index of the first group that fails, None where all survive.
FirstFailing = Callable[[Sequence[Sequence[T]]], "int | None"]
FirstFailingRun = Callable[[Sequence[Run]], "int | None"]


def isolate(items: Sequence[T], suspects: Sequence[T], first_failing: FirstFailing[T]) -> list[T] | None:
    """Return a group as small as can be of which all together bring the fault back; None where not even all do.

    The suspects among the items are looked at first, one by one, the most suspicious first.
    """
    others = [item for item in items if item not in suspects]
    size = max(1, math.isqrt(len(others)))
    chunks = [others[begin : begin + size] for begin in range(0, len(others), size)]
    groups: list[list[T]] = [[item] for item in suspects] + chunks
    if len(groups) > 1:
        # What needs several of them at once.
        groups.append(list(items))
    at = first_failing(groups)
    if at is None:
        return None
    group = groups[at]
    if len(group) == 1:
        return group
    singles = [[item] for item in group] if at < len(groups) - 1 or len(groups) == 1 else []
    alone = first_failing(singles) if singles else None
    return singles[alone] if alone is not None else minimize(group, first_failing)


def minimize(items: Sequence[T], first_failing: FirstFailing[T]) -> list[T]:
    """Return a part of `items`, which fail together, that fails and of which no smaller part was seen to.

    This is delta debugging (Zeller and Hildebrandt, "Simplifying and Isolating Failure-Inducing Input", 2002).
    """
    kept, parts = list(items), 2
    while len(kept) > 1:
        bounds = [len(kept) * number // parts for number in range(parts + 1)]
        subsets = [kept[begin:end] for begin, end in pairwise(bounds)]
        rests = [list(chain(*subsets[:number], *subsets[number + 1 :])) for number in range(parts)] if parts > 2 else []
        tried = subsets + rests
        at = first_failing(tried)
        if at is not None:
            kept, parts = tried[at], 2 if at < len(subsets) else max(2, parts - 1)
        elif parts == len(kept):
            break
        else:
            parts = min(len(kept), parts * 2)
    return kept


def needed(items: Sequence[T], first_failing: FirstFailing[T]) -> list[T] | None:
    """Return which of `items` it takes, in few failures: one more than are returned.

    Whether more of them fail where fewer do is taken for granted; the result was seen to fail.

    Returns:
        None where not even all fail.
    """
    known: list[T] = []
    rest = list(items)
    while True:
        at = first_failing([known + rest[:count] for count in range(len(rest) + 1)])
        if at is None:
            return None
        if at == 0:
            return known
        # The last one that was added is needed; what comes after it is not.
        known, rest = [*known, rest[at - 1]], rest[: at - 1]


def shortest(items: Run, first_failing: FirstFailingRun[Run]) -> Run:
    """Return the shortest run of `items`, which fail as a whole, that fails, as far as was seen, in few failures."""
    end = lowest(len(items), lambda counts: first_failing([items[: int(count)] for count in counts]))
    run = items[: int(end)]
    size = lowest(len(run), lambda counts: first_failing([run[len(run) - int(count) :] for count in counts]))
    return run[len(run) - int(size) :]


def lowest(value: float, first_failing: Callable[[Sequence[float]], int | None], at_least: int = 0) -> float:
    """Return the number of the lowest magnitude that fails in place of `value`, which fails, as far as was seen.

    From low to high, as each that fails costs a start: first powers of two, then closer and closer to the first one.
    Of a number with a fraction only powers of two are tried, and none lower than `at_least`.
    """
    sign = -1 if value < 0 else 1
    low, high = at_least - 1, abs(value)
    tried: list[float] = [0, *(2**exponent for exponent in range(_MAX_EXPONENT))]
    tried = [number for number in tried if at_least <= number < high]
    while tried:
        at = first_failing([type(value)(sign * number) for number in tried])
        if at is not None:
            high = tried[at]
        if at != 0:
            low = int(tried[at - 1 if at is not None else -1])
        if at == 0 or high != int(high):
            break
        step = max(1, int(high - low) // _STEPS)
        tried = list(range(low + 1, int(high), step))
    return type(value)(sign * high)


#: Returns the index of the first value that fails, None where all survive.
FirstFailingValue = Callable[[Sequence[Any]], "int | None"]

#: A smaller value fails so often at most before what is left is taken as it is.
MAX_FAILURES = 8
#: So many entries at most are tried one by one, or looked into; and so deep.
_MAX_SINGLE, _MAX_INTO, _MAX_DEPTH = 64, 4, 8


def reduce_value(value: Any, first_failing: FirstFailingValue, most: int = MAX_FAILURES) -> Any:
    """Return a JSON value as small as was found that fails, as `value` does; `most` such are tried."""
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
