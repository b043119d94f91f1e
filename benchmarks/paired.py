"""Measure what a part of the kit costs a real server: runs in pairs, with the part switched off and on.

Both runs of a pair are of one server, and their order alternates: two servers that stand side by side differ by more
than a part of the kit costs.
"""

from __future__ import annotations

import http.client
import json
import math
import os
import random
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from lanelib.commands import LaneError
from lanelib.servers import Server

_Value = TypeVar("_Value")
TIMEOUT_S = 120.0
#: Of the bootstrap.
_DRAWS = 4000
ON, OFF = signal.SIGRTMIN + 5, signal.SIGRTMIN + 6
_SITE = """
import os, signal

{code}

def act(signum, frame):
    is_on = signum == {on}
    if switch(is_on):
        with open({state!r}, "w") as file:
            file.write(str(is_on))

for signum in ({on}, {off}):
    signal.signal(signum, act)
"""


@dataclass(frozen=True)
class Load:
    """What the server is asked for in a run."""

    clients: int  # how many send one request after the other
    requests: int  # how many each of them sends
    prompt_tokens: int  # of a request
    answer_tokens: int  # of its answer


@dataclass(frozen=True)
class Run:
    """What one run took."""

    wall_s: float  # seconds for each request: how often one was answered
    own_s: float  # CPU time of the process that has the part for each request, in seconds
    all_s: float  # CPU time of all of the server's processes for each request, in seconds


class Switch:
    """Switches a part of the kit in one process of a server, off and on.

    Args:
        folder: an empty one.
        code: defines ``switch``, which takes whether the part is to be on, and returns whether this process has it.

    Attributes:
        env: what brings it into a server.
    """

    def __init__(self, folder: Path, code: str) -> None:
        self._state = folder / "state"
        site = _SITE.format(code=code, on=int(ON), off=int(OFF), state=str(self._state))
        (folder / "sitecustomize.py").write_text(site)
        self.env = {"PYTHONPATH": str(folder)}

    def set(self, pid: int, *, on: bool) -> None:
        """Switch it in process `pid`, and wait until that says that it has."""
        self._state.unlink(missing_ok=True)
        os.kill(pid, ON if on else OFF)
        deadline = time.monotonic() + TIMEOUT_S
        while not (self._state.is_file() and self._state.read_text() == str(on)):
            if time.monotonic() > deadline:
                raise LaneError(f"process {pid} did not switch what is measured")
            time.sleep(0.01)


def run_pairs(server: Server, switch: Switch, pid: int, load: Load, pairs: int) -> Iterator[tuple[Run, Run]]:
    """Yield what runs with and without the part took, after one that does not count.

    Args:
        server: ready, with the environment of `switch`.
        switch: of the part.
        pid: the process that has it.
        load: what each run asks for.
        pairs: how many.
    """

    def run(*, on: bool) -> Run:
        switch.set(pid, on=on)
        return run_once(server, pid, load)

    run_once(server, pid, load)
    yield from in_pairs(lambda: run(on=True), lambda: run(on=False), pairs)


def in_pairs(first: Callable[[], _Value], second: Callable[[], _Value], pairs: int) -> Iterator[tuple[_Value, _Value]]:
    """Yield what both give, so many times; who is first alternates, so that what slows the machine meets both alike."""
    for number in range(pairs):
        if number % 2:
            yield first(), second()
        else:
            sooner = second()
            yield first(), sooner


def run_once(server: Server, pid: int, load: Load) -> Run:
    """Ask for all of it once."""
    begun, before = time.perf_counter(), cpu_times(server)
    with ThreadPoolExecutor(load.clients) as pool:
        list(pool.map(lambda seed: _ask(server, load, seed), range(load.clients)))
    count, wall_s, after = load.clients * load.requests, time.perf_counter() - begun, cpu_times(server)
    spent = {thread: after[thread] - before.get(thread, 0.0) for thread in after}
    own_s = sum(seconds for (owner, _thread), seconds in spent.items() if owner == pid)
    return Run(wall_s / count, own_s / count, sum(spent.values()) / count)


def cpu_times(server: Server) -> dict[tuple[int, int], float]:
    """Return the CPU time that each thread of the server was given so far, by pid and thread, in seconds."""
    found = {}
    for pid, _title in server.processes():
        for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            found[pid, int(path.parent.name)] = int(path.read_text().split()[0]) / 1e9
    return found


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


def spread(values: list[float], form: str) -> str:
    """Return a median and where it lies with a probability of 95 %: the order statistics of the sign test."""
    ordered, beside, middle = sorted(values), round(0.98 * math.sqrt(len(values))), len(values) // 2
    lower, upper = ordered[max(0, middle - beside)], ordered[min(len(ordered) - 1, middle + beside)]
    return f"{statistics.median(values):8{form}} ({len(values)} pairs; 95 %: {lower:{form}} to {upper:{form}})"


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
