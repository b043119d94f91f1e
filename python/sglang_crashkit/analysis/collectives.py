"""Compare how far the ranks came in their collectives, process group by process group, from their flight recorders.

A collective is done when every rank of its group has begun it. So of a group in which one waits, those are to be looked
at that have not begun what the others wait in, or that have begun something else in its place. What is established here
is what the recorders say; that a rank is behind is no explanation of why it is.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sglang_crashkit.analysis.member import name_some
from sglang_crashkit.analysis.ranks import ranges
from sglang_crashkit.model.flight_dump import Entry, FlightDump, Sizes
from sglang_crashkit.model.incident import LEVELS, Level

#: ``mismatch``: they did different things in the same place; ``behind``: somebody has not begun what others wait in;
#: ``message``: somebody waits for a message of one who did not send it, or the other way round; ``waiting``: all that
#: are known of have begun it, and it is not done; ``in_step``: nobody waits.
FindingKind = Literal["mismatch", "behind", "message", "waiting", "in_step"]

#: Which of PyTorch's flight recorders: each has its own of the process groups, numbered by itself.
Recorder = Literal["nccl", "gloo"]

_KINDS = ("mismatch", "behind", "message", "waiting", "in_step")
#: A wait of less than this, in seconds, is what a rank of a server at work is found in.
_MOMENT_SECS = 1.0
_MAX_EVIDENCE, _MAX_FINDINGS = 8, 32
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
_MESSAGE = re.compile(r"(send|recv) (\d{1,9})(?:->|<-)(\d{1,9})")
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
class CollectiveFinding:
    """What is seen of one process group."""

    group: str  # its name, in words
    kind: FindingKind
    named: tuple[int, ...]  # the ranks to be looked at; empty where no rank is an outlier
    processes: tuple[str, ...]  # the processes of those of them that gave a dump, in words
    statement: str  # what is seen, in one or two sentences
    evidence: tuple[str, ...]  # what it rests on, a sentence each
    level: Level  # how well it is supported
    waiting: tuple[str, ...] = ()  # the processes that wait for those that are named

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items()}


def worlds_of(places: Mapping[int, Mapping[str, int]]) -> dict[int, str]:
    """Return which world each scheduler is in, by its pid.

    Args:
        places: the ranks in the schedulers' titles, of all of them, by pid. Replicas number their ranks anew; with
            data-parallel attention all are of one world.
    """
    within = [tuple(sorted((axis, n) for axis, n in place.items() if axis != "dp")) for place in places.values()]
    if len(set(within)) == len(within):
        return dict.fromkeys(places, "")
    return {pid: f"DP{place['dp']}" if "dp" in place else "" for pid, place in places.items()}


def judge_collectives(records: Sequence[RankRecord]) -> list[CollectiveFinding]:
    """Return what is seen of each process group over NCCL and over gloo in one account, what tells most first."""
    findings = []
    for world, recorder in sorted({(record.world, record.recorder) for record in records}):
        # What SGLang calls a group is in the dumps of gloo, of all groups.
        described = sorted((one for one in records if one.world == world), key=lambda one: one.recorder)
        members = {record.rank: record for record in described if record.recorder == recorder}
        entries = {rank: by_group(record.dump) for rank, record in members.items()}
        configured = {name for record in members.values() for name in record.dump.groups}
        for name in sorted(configured.union(*entries.values()), key=_natural):
            some = {rank: its[name] for rank, its in entries.items() if name in its}
            groups = [record.dump.groups[name] for record in described if name in record.dump.groups]
            description = next((group.description for group in groups if group.description), "")
            finding = _Group(world, name, description, members, some).judge() if some else None
            findings += [finding] if finding else []
    findings.sort(key=lambda finding: (_KINDS.index(finding.kind), LEVELS.index(finding.level)))
    return findings[:_MAX_FINDINGS]


class _Group:
    """One process group and what is known of its ranks."""

    def __init__(
        self,
        world: str,
        name: str,
        description: str,
        records: Mapping[int, RankRecord],
        entries: Mapping[int, Sequence[Entry]],
    ) -> None:
        configured = [record.dump.groups[name] for record in records.values() if name in record.dump.groups]
        inside = {rank for group in configured for rank in group.ranks}
        self.ranks = sorted(inside | entries.keys())
        self.records = {rank: records[rank] for rank in self.ranks if rank in records}
        self.absent = [rank for rank in self.ranks if rank not in records]
        plural = "s" if len(self.absent) > 1 else ""
        self.absent_text = f" There is no dump of rank{plural} {ranges(self.absent)}." if self.absent else ""
        self.steps = {
            rank: steps_of(entries.get(rank, ()), from_the_start=record.dump.is_from_the_start)
            for rank, record in self.records.items()
        }
        self.messages = {rank: messages_of(entries.get(rank, ())) for rank in self.records}
        more = description
        if description not in ("", _DEFAULT):
            recorder = next(record.recorder for record in records.values())
            name, more = description, f"{recorder} {name}"
        words = [word for word in (world, more, f"ranks {ranges(self.ranks)}") if word]
        self.words = f"process group {name} ({', '.join(words)})"

    def judge(self) -> CollectiveFinding | None:
        """Return what is seen of it, None where it is of no interest: of one rank, or never used."""
        if len(self.ranks) < 2 or not (any(self.steps.values()) or any(self.messages.values())):
            return None
        return self._mismatch() or self._unfinished() or self._message() or self._in_step()

    def _mismatch(self) -> CollectiveFinding | None:
        found = find_mismatch(self.steps)
        if found is None:
            return None
        sequence, sides = found
        told = [f"{self._name(ranks)} began {words}" for words, ranks in sides]
        text = f"The ranks of {self.words} did not do the same: as number {sequence}, {name_some(told)}."
        odd = sides[-1][1] if len(sides[0][1]) > len(sides[-1][1]) else []
        return self._finding("mismatch", odd, text, "established")

    def _unfinished(self) -> CollectiveFinding | None:
        """Return who keeps the first collective that is begun and not done from its end; None where all are done."""
        open_ = {rank: [n for n, step in steps.items() if not step.is_done] for rank, steps in self.steps.items()}
        sequence = min((number for its in open_.values() for number in its), default=None)
        if sequence is None:
            return None
        waiting = [rank for rank, its in open_.items() if sequence in its]
        begun = {rank: self.steps[rank][sequence] for rank in waiting}
        secs = min(self.records[rank].seconds - step.created for rank, step in begun.items())
        step, names = begun[waiting[0]], self._name(waiting)
        what = f"{step.words} of {self.words}, number {sequence},"
        since = f"{max(0.0, secs):.1f} s before and not finished"
        reached = {rank: self._reached(rank) for rank in self.records}
        unknown = [rank for rank, number in reached.items() if number is None]
        # Of a dump from before the others began it, nothing follows.
        began = min(step.created for step in begun.values())
        unknown += [rank for rank in reached if rank not in unknown and self.records[rank].seconds < began]
        behind = [rank for rank, number in reached.items() if rank not in unknown and (number or 0) < sequence]
        if behind:
            text = f"{self._name(behind)} had not begun {what} which {names} had begun {since}{step.where}."
            level: Level = "supported" if self.absent or unknown else "established"
            return self._finding("behind", behind, text + self.absent_text, level, secs, waiting)
        if message := self._message():
            return message
        text = f"{names} had begun {what} {since} it{step.where}."
        if self.absent:
            return self._finding("waiting", self.absent, text + self.absent_text, "unknown", secs)
        queued = [rank for rank, step in begun.items() if not step.is_started]
        if queued and len(queued) < len(waiting):
            text += f" On {self._name(queued)} it had not started on the GPU, as it had elsewhere."
            return self._finding("waiting", queued, text, "supported", secs, waiting)
        if done := [rank for rank in self.records if rank not in waiting]:
            text += f" {self._name(done)} had finished it."
        # That all wait is the whole of it.
        return self._finding("waiting", [], text, "unknown" if done else "supported", secs, waiting)

    def _message(self) -> CollectiveFinding | None:
        begun = {(rank, m.sender, m.receiver, m.is_sent) for rank, its in self.messages.items() for m in its}
        for rank, messages in self.messages.items():
            for message in messages:
                sender, receiver = (self._global(local) for local in (message.sender, message.receiver))
                other = receiver if rank == sender else sender
                if other is None or other == rank or sender is None or receiver is None:
                    continue
                if (other, message.sender, message.receiver, not message.is_sent) in begun:
                    continue
                act, not_done = ("send to", "receive") if message.is_sent else ("receive from", "send")
                secs = self.records[rank].seconds - message.created
                who = self._name([other])
                text = f"{self._name([rank])} waits since {secs:.1f} s to {act} rank {other} in {self.words}"
                if other in self.records:
                    text += f", and {who} is not about to {not_done}{message.where}."
                    return self._finding("message", [other], text, "supported", secs, [rank])
                return self._finding("message", [other], f"{text}, of which there is no dump.", "unknown", secs)
        return None

    def _in_step(self) -> CollectiveFinding:
        last = sorted({reached for rank in self.records if (reached := self._reached(rank)) is not None})
        at = f"the last one begun is number {last[0]}" if last else "nothing is known of the last one"
        if len(last) > 1:
            at = f"the last ones begun are numbers {last[0]} to {last[-1]}"
        text = f"Nobody in {self.words} waits for a collective; {at}."
        return self._finding("in_step", [], text + self.absent_text, "supported")

    # -- what they are made of

    def _reached(self, rank: int) -> int | None:
        """Return the number of the last collective that a rank began, None where that is not known."""
        if self.steps[rank]:
            return max(self.steps[rank])
        return 0 if self.records[rank].dump.is_from_the_start else None

    def _finding(
        self,
        kind: FindingKind,
        named: Sequence[int],
        text: str,
        level: Level,
        secs: float = _MOMENT_SECS,
        waiting: Sequence[int] = (),
    ) -> CollectiveFinding:
        processes, waits = (
            tuple(self.records[rank].name for rank in ranks if rank in self.records) for ranks in (named, waiting)
        )
        level = level if secs >= _MOMENT_SECS else "unknown"
        return CollectiveFinding(self.words, kind, tuple(named), processes, text, self._evidence(), level, waits)

    def _evidence(self) -> tuple[str, ...]:
        """Return how far the ranks came, those alike together."""
        alike: dict[str, list[int]] = {}
        for rank, steps in self.steps.items():
            open_ = [number for number, step in steps.items() if not step.is_done]
            reached = self._reached(rank)
            begun = "an unknown number of collectives" if reached is None else f"{reached} collectives"
            first = (
                f", of which number {min(open_)}, {steps[min(open_)].words}, is the first unfinished" if open_ else ""
            )
            alike.setdefault(f"had begun {begun}{first or ' and finished them'}", []).append(rank)
        lines = [f"{self._name(ranks)} {words}." for words, ranks in alike.items()]
        lines = lines[:_MAX_EVIDENCE] + ([f"{len(lines) - _MAX_EVIDENCE} more."] if len(lines) > _MAX_EVIDENCE else [])
        return tuple(lines + ([self.absent_text.strip()] if self.absent else []))

    def _name(self, ranks: Sequence[int]) -> str:
        if len(ranks) > 3:
            return f"{len(ranks)} ranks ({ranges(ranks)})"
        return name_some([self.records[rank].name if rank in self.records else f"rank {rank}" for rank in ranks])

    def _global(self, local: int) -> int | None:
        return self.ranks[local] if local < len(self.ranks) else None


def _natural(name: str) -> tuple[int, str]:
    return (int(name), "") if name.isdecimal() and len(name) < 10 else (1 << 30, name)


@dataclass(frozen=True)
class Step:
    """What a rank began under one number: a collective, or several that are carried out as one."""

    words: str  # what it is, in words
    signature: tuple[tuple[str, int | None, tuple[str, ...]], ...]  # what must be the same on all ranks
    is_done: bool  # all of it is over
    is_started: bool  # the GPU was seen to have begun it
    created: float  # when the rank began it, in seconds since the epoch
    where: str  # where in the program it was begun, as the end of a sentence; empty where that is not known


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
    """Return what the rank did in a group, by number; `from_the_start` where nothing has fallen out of the recorder."""
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
    told = [f"{entry.operation} of {_sizes_text(entry.input_sizes)}" for entry in entries[:_MAX_NAMED]]
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
