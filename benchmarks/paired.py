"""What benchmarks share that measure in pairs: a load, pairs in alternating order, and what to say of many of them."""

from __future__ import annotations

import http.client
import json
import math
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from lanelib.commands import LaneError
from lanelib.servers import Server

_Value = TypeVar("_Value")
TIMEOUT_S = 120.0
#: Of the bootstrap.
_DRAWS = 4000


@dataclass(frozen=True)
class Load:
    """What the server is asked for in a run."""

    clients: int  # how many send one request after the other
    requests: int  # how many each of them sends
    prompt_tokens: int  # of a request
    answer_tokens: int  # of its answer


def in_pairs(first: Callable[[], _Value], second: Callable[[], _Value], pairs: int) -> Iterator[tuple[_Value, _Value]]:
    """Yield what both give, so many times; who is first alternates, so that what slows the machine meets both alike."""
    for number in range(pairs):
        if number % 2:
            yield first(), second()
        else:
            sooner = second()
            yield first(), sooner


def ask(server: Server, load: Load) -> None:
    """Ask for all of it once."""
    with ThreadPoolExecutor(load.clients) as pool:
        list(pool.map(lambda seed: _ask(server, load, seed), range(load.clients)))


def _ask(server: Server, load: Load, seed: int) -> None:
    """Send one request after the other."""
    choose = random.Random(seed)  # noqa: S311 - prompts, no secrets
    sampling = {"max_new_tokens": load.answer_tokens, "temperature": 0.0, "ignore_eos": True}
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=TIMEOUT_S)
    for _ in range(load.requests):
        body = {
            "input_ids": [choose.randrange(4, 500) for _ in range(load.prompt_tokens)],
            "sampling_params": sampling,
        }
        connection.request("POST", "/generate", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        answer.read()
        if answer.status != 200:
            raise LaneError(f"{server.url} answers {answer.status}; next: see {server.log_path}")
    connection.close()


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
