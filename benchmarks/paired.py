"""What benchmarks share that measure in pairs: their alternating order, and what to say of many of them."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

_Value = TypeVar("_Value")
#: Of the bootstrap.
_DRAWS = 4000


def in_pairs(first: Callable[[], _Value], second: Callable[[], _Value], pairs: int) -> Iterator[tuple[_Value, _Value]]:
    """Yield what both give, so many times; who is first alternates, so that what slows the machine meets both alike."""
    for number in range(pairs):
        if number % 2:
            yield first(), second()
        else:
            sooner = second()
            yield first(), sooner


def trimmed(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean of the middle three fifths, and between what it lies with a probability of 95 %.

    Of many short runs that is known better than the median. The error is Tukey and McLaughlin's: that of values of
    which those left out have become the outermost that are left.
    """
    ordered, out = sorted(values), len(values) // 5
    middle = ordered[out : len(ordered) - out]
    mean = statistics.fmean(middle)
    error = statistics.stdev([middle[0]] * out + middle + [middle[-1]] * out) / (0.6 * math.sqrt(len(values)))
    return mean, mean - 1.96 * error, mean + 1.96 * error


def interval(groups: Sequence[Sequence[float]]) -> tuple[float, float, float]:
    """Return the geometric mean of ratios, and between what it lies with a probability of 95 %, by the bootstrap.

    Args:
        groups: the ratios of each start of the servers: two that stand side by side differ for as long as they live, so
            that starts are drawn, and then pairs of each.
    """
    logarithms, choose = [[math.log(ratio) for ratio in group] for group in groups], random.Random(1)  # noqa: S311

    def draw() -> float:
        drawn = choose.choices(logarithms, k=len(logarithms))
        return statistics.fmean(statistics.fmean(choose.choices(group, k=len(group))) for group in drawn)

    means = sorted(draw() for _ in range(_DRAWS))
    middle = statistics.fmean(statistics.fmean(group) for group in logarithms)
    return math.exp(middle), math.exp(means[_DRAWS // 40]), math.exp(means[-_DRAWS // 40])
