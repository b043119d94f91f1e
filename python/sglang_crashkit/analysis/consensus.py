"""What SGLang's rank consensus checker found, by what each rank logged before it ended.

The checker (``SGLANG_ENABLE_RANK_CONSENSUS_CHECKER``) compares what ranks must do alike, in order; where that differs,
each rank logs its own events and ends with status 1, the healthy ones too, in any order.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from sglang_crashkit.analysis.ranks import name_some
from sglang_crashkit.model.incident import Divergence

#: What a rank logs, which may be cut off; and one event in it, as Python has a string.
_LINE = re.compile(r"Found rank divergence for \d{1,9} events?\(s\)! local hash: \w{1,64}, events = \[(?P<events>.*)")
_EVENT = re.compile(r"'((?:[^'\\]|\\.)*)'|\"((?:[^\"\\]|\\.)*)\"")
_MAX_EVENT = 120


def events_in(log: str) -> list[str] | None:
    """Return the events that a rank logged last as it ended for a divergence; None where it logged none."""
    found = [*_LINE.finditer(log)]
    return [one[1] or one[2] or "" for one in _EVENT.finditer(found[-1]["events"])] if found else None


def disagreement(told: Mapping[int, tuple[str, Sequence[str]]]) -> Divergence | None:
    """Return where ranks differ, by name and events of each, by pid; None where no rank logged any.

    The outliers are those that are fewer; of as many on each side, nothing tells who they are.
    """
    if not told:
        return None
    sequences = [events for _name, events in told.values()]
    shared = min(map(len, sequences))
    place = next((at for at in range(shared) if len({events[at] for events in sequences}) > 1), None)
    words, odd, against = f"only what {next(iter(told.values()))[0]} did is known", list[int](), ""
    if place is not None:
        sides: dict[str, list[int]] = {}
        for pid, (_name, events) in told.items():
            sides.setdefault(events[place], []).append(pid)
        names = {event: name_some([told[pid][0] for pid in pids]) for event, pids in sides.items()}
        # Of a long event, from a little before where it differs.
        same = next((at for at, letters in enumerate(zip(*sides, strict=False)) if len({*letters}) > 1), None)
        begin = max(0, (min(map(len, sides)) if same is None else same) - _MAX_EVENT // 2)
        cut = "..." if begin else ""
        words = "; ".join(f"{names[event]}: {cut}{event[begin : begin + _MAX_EVENT]}" for event in sides)
        fewest, *others = sorted(sides.values(), key=len)
        if len(others) == 1 and len(fewest) < len(others[0]):
            odd, against = fewest, name_some([told[pid][0] for pid in others[0]])
    elif len(told) > 1:
        words = f"they differ behind the first {shared} events, which is all that the logs keep"
    return Divergence(
        "consensus",
        "established",
        f"SGLang's rank consensus checker found that the ranks diverged: {words}.",
        ranks=name_some([told[pid][0] for pid in odd or told]),
        pids=tuple(odd or told),
        against=against,
        compared=shared,
    )
