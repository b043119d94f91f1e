"""Code for benchmarks that measure in pairs: the alternating order, and statistics of many pairs."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

_Value = TypeVar("_Value")
#: Number of draws of the bootstrap.
_DRAWS = 4000


def in_pairs(first: Callable[[], _Value], second: Callable[[], _Value], pairs: int) -> Iterator[tuple[_Value, _Value]]:
    """Yield the results of both, `pairs` times, in alternating order, so that other load affects both alike."""
    for number in range(pairs):
        if number % 2:
            yield first(), second()
        else:
            sooner = second()
            yield first(), sooner


def trimmed(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean of the middle three fifths of the values, and the ends of its 95 % confidence interval.

    For many short runs this mean has a smaller error than the median. The error is Tukey and McLaughlin's, from the
    winsorized values: each value outside the middle is replaced by the nearest value inside it.
    """
    ordered, out = sorted(values), len(values) // 5
    middle = ordered[out : len(ordered) - out]
    mean = statistics.fmean(middle)
    error = statistics.stdev([middle[0]] * out + middle + [middle[-1]] * out) / (0.6 * math.sqrt(len(values)))
    return mean, mean - 1.96 * error, mean + 1.96 * error


def interval(groups: Sequence[Sequence[float]]) -> tuple[float, float, float]:
    """Return the geometric mean of ratios, and the ends of its 95 % confidence interval, by the bootstrap.

    Args:
        groups: the ratios of the pairs, a group for each start of the two servers. A difference between two
            servers lasts as long as they run, so the bootstrap draws starts, and then pairs of each start.
    """
    logarithms, choose = [[math.log(ratio) for ratio in group] for group in groups], random.Random(1)  # noqa: S311

    def draw() -> float:
        drawn = choose.choices(logarithms, k=len(logarithms))
        return statistics.fmean(statistics.fmean(choose.choices(group, k=len(group))) for group in drawn)

    means = sorted(draw() for _ in range(_DRAWS))
    middle = statistics.fmean(statistics.fmean(group) for group in logarithms)
    return math.exp(middle), math.exp(means[_DRAWS // 40]), math.exp(means[-_DRAWS // 40])
