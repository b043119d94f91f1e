"""What the judge says of what was collected, of one host or of many."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import msgspec

from sglang_crashkit.judge.verdict import judge
from sglang_crashkit.kernel.titles import NEEDED
from sglang_crashkit.model.case import Case, case_of
from sglang_crashkit.model.event import AnyEvent, Stack
from sglang_crashkit.model.sample import Sample
from sglang_crashkit.model.snapshot import NodeSnapshot
from sglang_crashkit.model.verdict import Verdict
from sglang_crashkit.sources.text.snapshots import stacks_in


def judged(rounds: Sequence[NodeSnapshot], known: Iterable[AnyEvent] = ()) -> tuple[Verdict, Case]:
    """Return the verdict, and the case that it is of.

    Args:
        rounds: all snapshots, of all hosts.
        known: what else is known.
    """
    events = [*known, *_stacks(rounds)]
    case = case_of(msgspec.structs.replace(one, order=order) for order, one in enumerate(events))
    return judge(case), case


def _stacks(rounds: Sequence[NodeSnapshot]) -> Iterator[Stack]:
    """Yield all stacks, and that a process is gone which a later round on its host does not have."""
    last: dict[str, float] = {}
    seen: dict[tuple[str, int, int], tuple[float, Sample]] = {}
    for number, one in enumerate(rounds, start=1):
        yield from (msgspec.structs.replace(stack, source=f"snapshot {number}") for stack in stacks_in(one))
        last[one.host] = max(one.time, last.get(one.host, one.time))
        for process in one.processes:
            key = (process.host, process.pid, process.start_ticks)
            seen[key] = max((one.time, process), seen.get(key, (one.time, process)), key=lambda entry: entry[0])
    gone = [
        replace(sample, time=last[sample.host], state="", threads=(), native=())
        for time, sample in seen.values()
        if time < last.get(sample.host, time) and sample.role in {"scheduler", *NEEDED}
    ]
    yield from stacks_in(NodeSnapshot("", 0.0, tuple(gone)))
