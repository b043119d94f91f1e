"""Which ranks are behind in their collectives, or in different ones, by PyTorch's flight recorders.

A collective is done when every rank of its group has begun it. So of a group in which one waits, those are to be looked
at that have not begun what the others wait in, or that have begun something else in its place. What is established here
is what the recorders say; that a rank is behind is no explanation of why it is. All else that a dump tells is for
PyTorch's own analyser, ``torchfrtrace``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from sglang_crashkit.analysis.ranks import name_some, ranges
from sglang_crashkit.model.flight_dump import Entry, FlightDump, Sizes
from sglang_crashkit.model.incident import LEVELS, CollectiveFinding
from sglang_crashkit.model.verdict import Level

#: Which of PyTorch's flight recorders: each has its own of the process groups, numbered by itself.
Recorder = Literal["nccl", "gloo"]

#: A wait of less than this, in seconds, is what a rank of a server at work is found in.
_MOMENT_SECS = 1.0
_MAX_FINDINGS = 32
#: What PyTorch calls the group of all ranks; it says nothing of what SGLang uses it for.
_DEFAULT = "default_pg"
#: In these every rank puts in as many numbers as the others, and of the same type.
_SAME_INPUT = frozenset(
    {
        "all_reduce",
        "allreduce_coalesced",
        "_all_gather_base",
        "all_gather_into_tensor_coalesced",
        "_reduce_scatter_base",
        "reduce_scatter_tensor_coalesced",
        "reduce",
        "broadcast",
    }
)
#: Of several that are carried out as one, the first so many are told.
_MAX_NAMED = 3
_TORCH = re.compile(r"(^|/)torch/")


@dataclass(frozen=True)
class RankRecord:
    """The dump of one rank."""

    rank: int  # its number among all of its world
    name: str  # its process, in words
    world: str  # tells ranks with the same number apart, such as those of replicas; empty where there is one world
    dump: FlightDump
    seconds: float  # when it was written, since the epoch
    recorder: Recorder = "nccl"  # whose dump it is


@dataclass(frozen=True)
class _Step:
    """What a rank began under one number: a collective, or several that are carried out as one."""

    words: str
    signature: tuple[object, ...]  # what must be the same on all ranks
    is_done: bool  # all of it is over
    created: float  # when the rank began it, in seconds since the epoch
    where: str  # where in the program it was begun, as the end of a sentence; empty where that is not known


@dataclass(frozen=True)
class _Group:
    """One process group: its name in words, its ranks, and the dumps and the steps by number of those that gave one."""

    words: str
    ranks: Sequence[int]
    records: Mapping[int, RankRecord]
    steps: Mapping[int, Mapping[int, _Step]]

    def name(self, ranks: Sequence[int]) -> str:
        """Return these ranks in words."""
        if len(ranks) > 3:
            return f"{len(ranks)} ranks ({ranges(ranks)})"
        return name_some([self.records[rank].name for rank in ranks])

    def finding(
        self, kind: str, ranks: Sequence[int], statement: str, level: Level, waiting: Sequence[int] = ()
    ) -> CollectiveFinding:
        """Return that ranks did different things in one place (``mismatch``), or that these are ``behind`` others."""
        named, waits = ([self.records[rank].name for rank in some] for some in (ranks, waiting))
        return CollectiveFinding(self.words, kind, list(ranks), named, statement, level, waits)


def worlds_of(places: Mapping[int, Mapping[str, int]]) -> dict[int, str]:
    """Return by pid which world each scheduler is in, by the ranks in the titles of all.

    Replicas number their ranks anew; with data-parallel attention all are of one world.
    """
    within = [tuple(sorted((axis, n) for axis, n in place.items() if axis != "dp")) for place in places.values()]
    if len(set(within)) == len(within):
        return dict.fromkeys(places, "")
    return {pid: f"DP{place['dp']}" if "dp" in place else "" for pid, place in places.items()}


def judge_collectives(records: Sequence[RankRecord]) -> list[CollectiveFinding]:
    """Return what goes wrong in each process group over NCCL and over gloo, what tells most first."""
    findings = []
    for world, recorder in sorted({(record.world, record.recorder) for record in records}):
        # What SGLang calls a group is in the dumps of gloo, of all groups.
        described = sorted((one for one in records if one.world == world), key=lambda one: one.recorder)
        members = {record.rank: record for record in described if record.recorder == recorder}
        entries: dict[int, dict[str, list[Entry]]] = {rank: {} for rank in members}
        for rank, record in members.items():
            for entry in record.dump.entries:
                entries[rank].setdefault(entry.group, []).append(entry)
        for name in sorted(set().union(*entries.values()), key=lambda name: (len(name), name)):
            configured = [one.dump.groups[name] for one in described if name in one.dump.groups]
            description = next((group.description for group in configured if group.description), "")
            own = [record.dump.groups[name].ranks for record in members.values() if name in record.dump.groups]
            ranks = sorted({rank for rank, its in entries.items() if name in its}.union(*own))
            label, more = name, description
            if description not in ("", _DEFAULT):
                label, more = description, f"{recorder} {name}"
            words = [word for word in (world, more, f"ranks {ranges(ranks)}") if word]
            some = {rank: members[rank] for rank in ranks if rank in members}
            steps = {rank: _steps_of(entries[rank].get(name, ()), record.dump) for rank, record in some.items()}
            group = _Group(f"process group {label} ({', '.join(words)})", ranks, some, steps)
            finding = _find_mismatch(group) or _find_behind(group)
            findings += [finding] if finding is not None else []
    findings.sort(key=lambda finding: (finding.kind != "mismatch", LEVELS.index(finding.level)))
    return findings[:_MAX_FINDINGS]


def _find_mismatch(group: _Group) -> CollectiveFinding | None:
    """Return the first number under which not all ranks did the same, and who did what, the most ranks first."""
    for number in sorted(set().union(*group.steps.values())):
        sides: dict[object, list[int]] = {}
        for rank, steps in group.steps.items():
            if number in steps:
                sides.setdefault(steps[number].signature, []).append(rank)
        if len(sides) > 1:
            ordered = sorted(sides.values(), key=lambda ranks: (-len(ranks), ranks))
            told = [f"{group.name(ranks)} began {group.steps[ranks[0]][number].words}" for ranks in ordered]
            text = f"The ranks of {group.words} did not do the same: as number {number}, {name_some(told)}."
            # Of two that differ neither is blamed.
            odd = ordered[-1] if len(ordered[0]) > len(ordered[-1]) else []
            return group.finding("mismatch", odd, text, "established")
    return None


def _find_behind(group: _Group) -> CollectiveFinding | None:
    """Return who has not begun the first collective that others have begun and not finished."""
    unfinished = [number for steps in group.steps.values() for number, step in steps.items() if not step.is_done]
    sequence = min(unfinished, default=None)
    if sequence is None:
        return None
    waiting = [rank for rank, its in group.steps.items() if sequence in its and not its[sequence].is_done]
    begun = [group.steps[rank][sequence] for rank in waiting]
    behind, unknown = [], len(group.ranks) > len(group.records)
    for rank, record in group.records.items():
        # Of a dump from before the others began it, or of one that shows nothing of the group, nothing follows.
        is_silent = not group.steps[rank] and not record.dump.is_from_the_start
        if is_silent or record.seconds < min(step.created for step in begun):
            unknown = True
        elif max(group.steps[rank], default=0) < sequence:
            behind.append(rank)
    if not behind:
        return None
    secs = max(0.0, min(group.records[rank].seconds - group.steps[rank][sequence].created for rank in waiting))
    text = f"{group.name(behind)} had not begun {begun[0].words} of {group.words}, number {sequence}, which "
    text += f"{group.name(waiting)} had begun {secs:.1f} s before and not finished{begun[0].where}."
    if absent := [rank for rank in group.ranks if rank not in group.records]:
        text += f" There is no dump of rank{'s' if len(absent) > 1 else ''} {ranges(absent)}."
    level: Level = "unknown" if secs < _MOMENT_SECS else "supported" if unknown else "established"
    return group.finding("behind", behind, text, level, waiting)


def _steps_of(entries: Iterable[Entry], dump: FlightDump) -> dict[int, _Step]:
    """Return what the rank did in a group, by number."""
    numbers: dict[int, list[Entry]] = {}
    for entry in entries:
        numbers.setdefault(entry.sequence, []).append(entry)
    if numbers and not dump.is_from_the_start:
        # Of the oldest one, the first part may have fallen out.
        oldest = min(numbers)
        if len(numbers[oldest]) > 1 or len(numbers) > 1:
            del numbers[oldest]
    steps = {}
    for number, some in numbers.items():
        told = [f"{entry.operation} of {_sizes_text(entry.input_sizes)}" for entry in some[:_MAX_NAMED]]
        more = f" and {len(some) - len(told)} more" if len(some) > len(told) else ""
        frame = next((frame for frame in some[0].frames if not _TORCH.search(frame.file)), None)
        steps[number] = _Step(
            words=" with ".join(told) + more,
            signature=tuple(map(_signature, some)),
            is_done=all(entry.is_done for entry in some),
            created=some[-1].created,
            where=f"; it was begun in {frame}" if frame is not None else "",
        )
    return steps


def _signature(entry: Entry) -> tuple[str, int | None, tuple[str, ...]]:
    if entry.operation not in _SAME_INPUT:
        return (entry.operation, None, ())
    # How many numbers, not their shape: NCCL counts them.
    return (entry.operation, sum(math.prod(size) for size in entry.input_sizes), entry.dtypes)


def _sizes_text(sizes: Sizes) -> str:
    if not sizes:
        return "nothing"
    text = "x".join(str(number) for number in sizes[0]) or "one number"
    return text if len(sizes) == 1 else f"{text} and {len(sizes) - 1} more"
