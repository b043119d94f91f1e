"""Find the smallest that brings a fault back: pure, told by a function what each trial came to.

The function takes groups, which are tried one after the other on one server for as long as that survives, and returns
the first that brought the fault back. So what is innocent costs no start of a server, and each guilty one costs one:
groups are ordered from the smallest to the largest.
"""

from __future__ import annotations

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
    run = items[: lowest(len(items), lambda counts: first_failing([items[:count] for count in counts]))]
    size = lowest(len(run), lambda counts: first_failing([run[len(run) - count :] for count in counts]))
    return run[len(run) - size :]


def lowest(value: int, first_failing: Callable[[Sequence[int]], int | None], at_least: int = 0) -> int:
    """Return the lowest number, but `at_least`, that fails in place of `value`, which fails, as far as was seen.

    From low to high, as each that fails costs a start: first powers of two, then closer and closer to the first one.
    """
    high = value
    tried = [number for number in (0, *(2**exponent for exponent in range(_MAX_EXPONENT))) if at_least <= number < high]
    while tried:
        at = first_failing(tried)
        if at is not None:
            high = tried[at]
        if at == 0:
            break
        low = tried[at - 1 if at is not None else -1]
        tried = list(range(low + 1, high, max(1, (high - low) // _STEPS)))
    return high
