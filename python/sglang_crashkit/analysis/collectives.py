"""Finds ranks that are behind in their collectives, or in different ones, by PyTorch's flight recorders.

A collective completes after every rank of its group has begun it. If ranks of a group wait in a collective, the ranks
to examine are those that have not begun it, or that have begun another one in its place. The level ``established``
means that the recorders show this; they do not show why a rank is behind. PyTorch's own analyser, ``torchfrtrace``,
reads everything else in a dump.
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

#: PyTorch's flight recorders: each records its own process groups, with its own numbers.
Recorder = Literal["nccl", "gloo"]

#: Ranks of a server at work are found in shorter waits than this, in seconds.
_MOMENT_SECS = 1.0
_MAX_FINDINGS = 32
#: PyTorch's name for the group of all ranks; it does not show what SGLang uses the group for.
_DEFAULT = "default_pg"
#: Collectives in which the inputs of all ranks have the same number of elements and the same type.
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
#: Most collectives to name of several that run as one.
_MAX_NAMED = 3
_TORCH = re.compile(r"(^|/)torch/")


@dataclass(frozen=True)
class RankRecord:
    """The dump of one rank."""

    rank: int  # its number in its world
    name: str  # its process, in words
    world: str  # distinguishes ranks with the same number, such as those of replicas; empty for a single world
    dump: FlightDump
    seconds: float  # when it was written, since the epoch
    recorder: Recorder = "nccl"  # the recorder that wrote the dump


@dataclass(frozen=True)
class _Step:
    """The collective that a rank began under one number, or several collectives that run as one."""

    words: str
    signature: tuple[object, ...]  # must be the same on all ranks
    is_done: bool  # all of its collectives are finished
    created: float  # when the rank began it, in seconds since the epoch
    where: str  # the place in the program that began it, as the end of a sentence; empty if not known


@dataclass(frozen=True)
class _Group:
    """One process group: its name in words and its ranks; by rank, the dumps and their steps by number."""

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
        """Return a finding: ranks ran different collectives under a number (``mismatch``), or are ``behind`` others."""
        named, waits = ([self.records[rank].name for rank in some] for some in (ranks, waiting))
        return CollectiveFinding(self.words, kind, list(ranks), named, statement, level, waits)


def worlds_of(places: Mapping[int, Mapping[str, int]]) -> dict[int, str]:
    """Return the world of each scheduler by pid, from the ranks in the titles of all schedulers.

    Each replica numbers its ranks from 0; with data-parallel attention all ranks are in one world.
    """
    within = [tuple(sorted((axis, n) for axis, n in place.items() if axis != "dp")) for place in places.values()]
    if len(set(within)) == len(within):
        return dict.fromkeys(places, "")
    return {pid: f"DP{place['dp']}" if "dp" in place else "" for pid, place in places.items()}


def judge_collectives(records: Sequence[RankRecord]) -> list[CollectiveFinding]:
    """Return the findings for each process group of NCCL and of gloo, the most conclusive first."""
    findings = []
    for world, recorder in sorted({(record.world, record.recorder) for record in records}):
        # The dumps of gloo contain SGLang's names of all groups, so they describe NCCL's groups too.
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
    """Return the first number under which ranks ran different collectives, the majority's collective first."""
    for number in sorted(set().union(*group.steps.values())):
        sides: dict[object, list[int]] = {}
        for rank, steps in group.steps.items():
            if number in steps:
                sides.setdefault(steps[number].signature, []).append(rank)
        if len(sides) > 1:
            ordered = sorted(sides.values(), key=lambda ranks: (-len(ranks), ranks))
            told = [f"{group.name(ranks)} began {group.steps[ranks[0]][number].words}" for ranks in ordered]
            text = f"The ranks of {group.words} did not do the same: as number {number}, {name_some(told)}."
            # If both sides have the same number of ranks, neither is blamed.
            odd = ordered[-1] if len(ordered[0]) > len(ordered[-1]) else []
            return group.finding("mismatch", odd, text, "established")
    return None


def _find_behind(group: _Group) -> CollectiveFinding | None:
    """Return the ranks that have not begun the first collective that others have begun and not finished."""
    unfinished = [number for steps in group.steps.values() for number, step in steps.items() if not step.is_done]
    sequence = min(unfinished, default=None)
    if sequence is None:
        return None
    waiting = [rank for rank, its in group.steps.items() if sequence in its and not its[sequence].is_done]
    begun = [group.steps[rank][sequence] for rank in waiting]
    behind, unknown = [], len(group.ranks) > len(group.records)
    for rank, record in group.records.items():
        # A dump from before the others began it, or one that may have lost all entries of the group, proves nothing.
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
    """Return the steps of a rank in a group, by number."""
    numbers: dict[int, list[Entry]] = {}
    for entry in entries:
        numbers.setdefault(entry.sequence, []).append(entry)
    if numbers and not dump.is_from_the_start:
        # The recorder may have dropped the first part of the oldest step.
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
    # NCCL compares the number of elements, not their shape.
    return (entry.operation, sum(math.prod(size) for size in entry.input_sizes), entry.dtypes)


def _sizes_text(sizes: Sizes) -> str:
    if not sizes:
        return "nothing"
    text = "x".join(str(number) for number in sizes[0]) or "one number"
    return text if len(sizes) == 1 else f"{text} and {len(sizes) - 1} more"
