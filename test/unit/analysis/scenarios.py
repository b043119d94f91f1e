"""Situations made of recorded stacks, by name: each is what a few samples saw of the ranks of a server."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from unit.analysis import real_stacks
from unit.analysis.real_stacks import process

#: A second of CPU time from sample to sample, as of a rank that is busy.
BUSY = frozenset({"SPIN", "MATMUL", "CHECK"})
STACKS = [
    "ALL_REDUCE",
    "BROADCAST",
    "CHECK",
    "COMPILE",
    "DETOKENIZE",
    "HOLD_GIL",
    "LOAD",
    "MATMUL",
    "ON_IDLE",
    "RECEIVE",
    "SPIN",
    "STORE",
    "SYNCHRONIZE",
]
Row = list[Any]


def rank(number: int, position: int, stack: str, state: str = "", **fields: Any) -> Any:
    """Return what sample number `position` saw of a rank; ``A/B`` is a rank that is in either in turn."""
    names = stack.split("/")
    name = names[position % len(names)]
    frames = getattr(real_stacks, name) if name != "-" else ()
    is_busy = bool(BUSY & set(names))
    fields = {"tp": number, "state": state or ("R" if is_busy else "S"), **fields}
    if name == "-":
        fields["problem"] = "not allowed"
    return process(
        10 + number, frames, owns_gil=name == "HOLD_GIL", cpu_secs=(5.0 if is_busy else 0.0) * position, **fields
    )


def ranks(stacks: Sequence[str], count: int, states: Sequence[str] = (), **fields: Any) -> list[Row]:
    """Return `count` samples of ranks, each in its stack and state."""
    states = [*states, *[""] * (len(stacks) - len(states))]
    return [
        [rank(number, at, stack, states[number], **fields) for number, stack in enumerate(stacks)]
        for at in range(count)
    ]


def scenarios() -> Iterator[tuple[str, list[Row]]]:
    """Yield each situation with its name."""
    for one, other in itertools.product(STACKS, STACKS):
        yield f"{one} {other}", ranks([one, other], 3)
        yield f"{one} {other} once", ranks([one, other], 1)
    for one in STACKS:
        yield f"{one} alone", ranks([one], 3)
        for many in ("ALL_REDUCE", "BROADCAST", "SYNCHRONIZE", "MATMUL", "LOAD"):
            yield f"7 x {many} {one}", ranks([*[many] * 7, one], 3)
        for state in ("T", "t", "D", "Z"):
            yield f"ALL_REDUCE {one}:{state}", ranks(["ALL_REDUCE", one], 3, ["", state])
        yield f"ALL_REDUCE {one} -", ranks(["ALL_REDUCE", one, "-"], 3)
        yield f"ALL_REDUCE {one}/MATMUL", ranks(["ALL_REDUCE", f"{one}/MATMUL"], 3)
        yield f"5 x ALL_REDUCE {one} {one} -", ranks([*["ALL_REDUCE"] * 5, one, one, "-"], 3)
    for state in ("T", "t", "D", "Z"):
        yield f"all {state}", ranks(["ALL_REDUCE", "SPIN"], 3, [state, state])
    yield "nothing seen", ranks(["-", "-"], 3)
    yield "one is gone", [ranks(["ALL_REDUCE", "ALL_REDUCE"], 1)[0], ranks(["ALL_REDUCE"], 1)[0]]
    for axis in ("dp", "pp"):
        rows = [[], [], []]
        for at, group, number in itertools.product(range(3), range(2), range(4)):
            name = "SPIN" if (group, number) == (1, 2) else "ALL_REDUCE"
            rows[at].append(process(10 + 10 * group + number, getattr(real_stacks, name), tp=number, **{axis: group}))
        yield f"two groups by {axis}", rows
    for first in ("SYNCHRONIZE", "BROADCAST", "RECEIVE", "MATMUL"):
        rows = [[rank(0, at, first, pp=0), rank(1, at, "MATMUL", tp=0, pp=1)] for at in range(3)]
        yield f"stages {first} MATMUL", rows
        for side in ("prefill", "decode"):
            yield f"{side} {first} alone", ranks([first, "BROADCAST"], 3, side=side)
    for one, other in itertools.product(("ALL_REDUCE", "RECEIVE", "STORE", "IMPORT"), STACKS):
        fields = {"title": "python3 -c multiprocessing.spawn", "role": "starting"}
        yield f"untitled {one} {other}", ranks([one, other], 3, **fields)
        yield f"untitled {one} {one} {other}", ranks([one, one, other], 3, **fields)
