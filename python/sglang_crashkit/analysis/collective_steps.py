"""The collectives of one rank in one process group, number by number, and what must be the same on all ranks."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from sglang_crashkit.model.flight_dump import Entry, FlightDump, Sizes

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
_MOST_TOLD = 3
_MESSAGE = re.compile(r"(send|recv) (\d{1,9})(?:->|<-)(\d{1,9})")
_TORCH = re.compile(r"(^|/)torch/")


@dataclass(frozen=True)
class Step:
    """What a rank began under one number: a collective, or several that are carried out as one.

    Attributes:
        words: what it is, in words.
        signature: what must be the same on all ranks.
        is_done: all of it is over.
        is_started: the GPU was seen to have begun it.
        created: when the rank began it, in seconds since the epoch.
        where: where in the program it was begun, as the end of a sentence; empty where that is not known.
    """

    words: str
    signature: tuple[tuple[str, int | None, tuple[str, ...]], ...]
    is_done: bool
    is_started: bool
    created: float
    where: str


@dataclass(frozen=True)
class Message:
    """A message that a rank waits to send or to receive; ranks are numbered within the group."""

    sender: int
    receiver: int
    is_sent: bool
    created: float
    where: str


def by_group(dump: FlightDump) -> dict[str, list[Entry]]:
    """Return what the rank did, by process group."""
    entries: dict[str, list[Entry]] = {}
    for entry in dump.entries:
        entries.setdefault(entry.group, []).append(entry)
    return entries


def steps_of(entries: Iterable[Entry], *, from_the_start: bool) -> dict[int, Step]:
    """Return what the rank did in a group, by number.

    Args:
        entries: of that group.
        from_the_start: nothing has fallen out of the recorder.
    """
    numbers: dict[int, list[Entry]] = {}
    for entry in entries:
        if not entry.is_message:
            numbers.setdefault(entry.sequence, []).append(entry)
    if numbers and not from_the_start:
        # Of the oldest one, the first part may have fallen out.
        oldest = min(numbers)
        if len(numbers[oldest]) > 1 or len(numbers) > 1:
            del numbers[oldest]
    return {number: _step(some) for number, some in sorted(numbers.items())}


def messages_of(entries: Iterable[Entry]) -> list[Message]:
    """Return the messages of a group that the rank has begun and not finished."""
    found = []
    for entry in entries:
        match = None if entry.is_done else _MESSAGE.fullmatch(entry.operation)
        if match is not None:
            first, second = int(match[2]), int(match[3])
            is_sent = match[1] == "send"
            ends = (first, second) if is_sent else (second, first)
            found.append(Message(*ends, is_sent, entry.created, place_of(entry)))
    return found


def find_mismatch(steps: Mapping[int, Mapping[int, Step]]) -> tuple[int, list[tuple[str, list[int]]]] | None:
    """Return the first number under which not all ranks did the same, and who did what, the most ranks first."""
    numbers: dict[int, list[int]] = {}
    for rank, its in steps.items():
        for number in its:
            numbers.setdefault(number, []).append(rank)
    for number in sorted(numbers):
        sides: dict[object, list[int]] = {}
        for rank in numbers[number]:
            sides.setdefault(steps[rank][number].signature, []).append(rank)
        if len(sides) > 1:
            told = [(steps[ranks[0]][number].words, ranks) for ranks in sides.values()]
            return number, sorted(told, key=lambda side: (-len(side[1]), side[1]))
    return None


def place_of(entry: Entry) -> str:
    """Return where in the program an entry was begun, beyond PyTorch itself, as the end of a sentence."""
    frame = next((frame for frame in entry.frames if not _TORCH.search(frame.file)), None)
    return f"; it was begun in {frame}" if frame is not None else ""


def _step(entries: list[Entry]) -> Step:
    told = [f"{entry.operation} of {_sizes_text(entry.input_sizes)}" for entry in entries[:_MOST_TOLD]]
    more = len(entries) - len(told)
    return Step(
        words=" with ".join(told) + (f" and {more} more" if more else ""),
        signature=tuple([_signature(entry) for entry in entries]),
        is_done=all(entry.is_done for entry in entries),
        is_started=all(entry.state != "scheduled" for entry in entries),
        created=entries[-1].created,
        where=place_of(entries[0]),
    )


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
