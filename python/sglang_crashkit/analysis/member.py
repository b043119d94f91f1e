"""The processes that were seen, as they are compared: what each did in each sample, and whether it moved between them.

Snapshots are taken in one by one and not kept, so that it stays small for 10,000 ranks: of each process stays what
each sample shows of its main thread, and of the Python stacks of all threads the merged tree. It is the same in
whatever order they come; each snapshot is to be taken in once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal

from sglang_crashkit.analysis.ranks import Rank, RankSet, rank_of
from sglang_crashkit.analysis.stack_tree import PrefixTree
from sglang_crashkit.analysis.waits import WAITS_FOR_OTHERS, Activity, activity_of
from sglang_crashkit.model.sample import Frame, Sample, main_thread
from sglang_crashkit.model.snapshot import NodeSnapshot, Problem

#: What the samples of a process say together. ``still``: the same functions and hardly any CPU time; ``spinning``: the
#: same functions and much of it; ``moving``: other functions; ``unknown``: there are not two samples with a stack.
Motion = Literal["still", "spinning", "moving", "unknown"]

#: Shares of one CPU above which a process is busy, and below which it rests.
_BUSY, _RESTING = 0.5, 0.05
_MAX_NAMES = 8
#: Of several that did different things, so many are told.
_MAX_DESCRIBED = 4


@dataclass(frozen=True, slots=True)
class Moment:
    """What one sample shows, as far as it is compared."""

    state: str  # the letter that ``/proc`` has for the state of its main thread; empty where it is not known
    cpu_secs: float  # CPU time that it had used since its start, in seconds
    activity: Activity  # what it was doing
    frames: tuple[Frame, ...]  # its main thread, innermost first, as far as it is kept; empty without a stack
    time: float = 0.0  # when, in seconds since the epoch; 0 where it is not known
    problem: str = ""  # why there is no stack; empty where there is one, or nobody said


@dataclass(frozen=True, slots=True)
class Member:
    """One process of a group."""

    name: str  # what it is called in sentences
    #: What each sample shows, in order of time; none of one that is only known to have been there.
    moments: tuple[Moment, ...]
    rank: Rank | None = None  # its place among many, None where it is called by its name alone
    is_gone: bool = False  # it was there before and no more in the last sample
    source: Any = None  # what it stands for

    @property
    def seen(self) -> tuple[Moment, ...]:
        """Those with a stack, or with native frames that tell as much."""
        return tuple(moment for moment in self.moments if moment.activity.function)

    @property
    def last(self) -> Activity | None:
        """What it did last, None where no sample tells."""
        return self.moments[-1].activity if self.moments else None

    def has_ended(self) -> bool:
        """Say whether it was there before and no more, or only as a zombie, in the last sample."""
        return self.is_gone or (self.last is not None and self.last.kind == "gone")

    def always(self, *kinds: str) -> bool:
        """Say whether it was in one of these states in each sample."""
        return bool(self.moments) and all(moment.activity.kind in kinds for moment in self.moments)

    def waits(self) -> bool:
        """Say whether it waited for others whenever its stack was seen."""
        return bool(self.seen) and all(moment.activity.kind in WAITS_FOR_OTHERS for moment in self.seen)

    def cpu_used(self) -> float:
        """Return the CPU time that it used from the first sample to the last, in seconds."""
        return self.moments[-1].cpu_secs - self.moments[0].cpu_secs if self.moments else 0.0

    def seconds(self) -> float:
        """Return the time from the first sample to the last, in seconds; 0 where it is not known."""
        return max(0.0, self.moments[-1].time - self.moments[0].time) if self.moments else 0.0

    def motion(self) -> Motion:
        """Compare its moments."""
        if len(self.seen) < 2:
            return "unknown"
        if len({tuple((frame.function, frame.file) for frame in moment.frames) for moment in self.seen}) > 1:
            return "moving"
        return "spinning" if self.cpu_used() >= _BUSY * self.seconds() > 0 else "still"

    def rests(self) -> bool:
        """Say whether it stayed in the same functions all the time and used hardly any CPU time."""
        return self.motion() == "still" and self.cpu_used() <= _RESTING * self.seconds()

    def innermost(self) -> frozenset[tuple[str, str]]:
        """Return the innermost function, with its file, of each sample that has one."""
        return frozenset((moment.frames[0].function, moment.frames[0].file) for moment in self.seen if moment.frames)

    def common_function(self) -> str:
        """Return the innermost call that all moments have in common, empty where there is none."""
        stacks = [tuple(reversed(moment.frames)) for moment in self.seen]
        common = ""
        for frames in zip(*stacks, strict=False):
            if any((frame.function, frame.file) != (frames[0].function, frames[0].file) for frame in frames):
                break
            common = frames[0].function
        return common


def is_for_requests(moment: Moment) -> bool:
    """Say whether a process waited for, or passed on, new requests at this moment."""
    activity = moment.activity
    return activity.kind == "idle" or (activity.kind in ("collective", "socket", "gil_wait") and activity.requests)


def name_some(names: Sequence[str], most: int = _MAX_NAMES) -> str:
    """Return the names as part of a sentence, at most `most` of them."""
    shown = list(names[:most])
    if len(names) > most:
        shown.append(f"{len(names) - most} more")
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"


def name_members(members: Sequence[Member]) -> str:
    """Return who they are as part of a sentence; of many, as a set of ranks."""
    ranks = [member.rank for member in members if member.rank is not None]
    if len(members) <= 3 or len(ranks) < len(members):
        return name_some([member.name for member in members])
    together = RankSet(ranks)
    return f"{len(members)} ranks ({together.format(hide=list(together.places()))})"


def be(members: Sequence[Member]) -> str:
    """Return the form of "to be" that goes with them."""
    return "is" if len(members) == 1 else "are"


def describe(member: Member) -> str:
    """Return what it was seen doing, without its name and a full stop."""
    words = list(dict.fromkeys(moment.activity.words for moment in member.seen or member.moments))
    functions = list(dict.fromkeys(moment.activity.function for moment in member.seen))
    if len(functions) > 1:
        more = [f"{len(functions) - 3} more places"] if len(functions) > 3 else []
        words = [f"was in {' and '.join([*functions[:3], *more])}"]
    elif len(words) > 1:
        # The last one, with which native stacks are taken, tells most.
        words = words[-1:]
    samples = f" in {len(member.moments)} samples" if len(member.moments) > 1 else ""
    cpu = f" and used {member.cpu_used():.1f} s of CPU time meanwhile" if len(member.moments) > 1 else ""
    return f"{words[0] if words else 'was not seen'}{samples}{cpu}"


def describe_several(members: Sequence[Member]) -> str:
    """Return who they are and what they were seen doing, which is the same for all, without a full stop."""
    words = members[0].moments[-1].activity.words if members[0].moments else "are known from before only"
    words = f"were {words[4:]}" if words.startswith("was ") else words
    used = [member.cpu_used() for member in members]
    samples = len(members[0].moments)
    cpu = f" in the last of {samples} samples and used {min(used):.1f} to {max(used):.1f} s of CPU time meanwhile"
    return f"{name_members(members)} {words}{cpu if samples > 1 else ''}"


def describe_some(members: Sequence[Member]) -> str:
    """Return who they are, at least one, and what they were seen doing, those alike together, without a full stop."""
    alike: dict[str, list[Member]] = {}
    for member in members:
        alike.setdefault(member.moments[-1].activity.words, []).append(member)
    groups = list(alike.values())
    told = [f"{some[0].name} {describe(some[0])}" if len(some) == 1 else describe_several(some) for some in groups]
    if len(told) > _MAX_DESCRIBED:
        told[_MAX_DESCRIBED:] = [f"{sum(len(some) for some in groups[_MAX_DESCRIBED:])} more did other things"]
    return "; ".join(told)


def motion_words(member: Member) -> str:
    """Return what its samples say together, as the end of a sentence about it; empty where they say nothing."""
    motion = member.motion()
    if motion == "moving":
        common = member.common_function()
        return f"; it moved below {common}" if common else "; it moved"
    # One that waits may be busy with waiting.
    if motion == "unknown" or member.waits():
        return ""
    return "; it was stuck there" if motion == "still" else "; it spun there, busy all the time"


_MAX_CACHED = 1 << 16
#: What says of a sample whose it is, and when it was.
_IDENTITY = ("host", "pid", "start_ticks", "title", "role", "ranks", "time", "server", "rendezvous", "side")


@dataclass(slots=True)
class SampledProcess:
    """What was seen of one process."""

    process: Sample  # who it is by the latest word, without what it did
    rank: Rank  # its place among all
    last: float  # the time of the last round that has it, in seconds since the epoch
    moments: list[Moment] = field(default_factory=list)  # what each sample shows, in no order; see `in_order`
    gone: int = 0  # in how many rounds it was not found any more

    def in_order(self) -> tuple[Moment, ...]:
        """Return what each sample shows in order of time."""
        ordered = sorted(self.moments, key=lambda moment: moment.time)
        if any(one.time == other.time for one, other in pairwise(ordered)):
            ordered.sort(key=lambda moment: (moment.time, repr(moment)))
        return tuple(ordered)


class SampledProcesses:
    """Takes in snapshots, in any order; see the module.

    Attributes:
        tree: the Python stacks of all threads of all processes, of all snapshots.
        rounds: the time of the last round on each host, in seconds since the epoch.
    """

    def __init__(self) -> None:
        self.tree = PrefixTree()
        self.rounds: dict[str, float] = {}
        self._seen: dict[tuple[str, int, int], SampledProcess] = {}
        self._problems: dict[Problem, None] = {}
        self._activities: dict[tuple[object, ...], tuple[Activity, tuple[Frame, ...]]] = {}

    @classmethod
    def of(cls, snapshots: Iterable[NodeSnapshot]) -> SampledProcesses:
        """Return what all of `snapshots` show."""
        sampled = cls()
        for one in snapshots:
            sampled.add(one)
        return sampled

    def __len__(self) -> int:
        """Return how many processes were seen."""
        return len(self._seen)

    def processes(self) -> Iterator[SampledProcess]:
        """Yield what was seen of each process, in an order that depends on nothing but them."""
        return (seen for _key, seen in sorted(self._seen.items(), key=lambda item: item[0]))

    def members(self) -> list[Member]:
        """Return the processes as they are compared, in an order that depends on nothing but them."""
        return [self._member(seen) for seen in self.processes()]

    def _member(self, seen: SampledProcess) -> Member:
        process = seen.process
        where = f" on {process.host}" if len(self.rounds) > 1 else ""
        # Side by side those of a pair have the same titles.
        side = f" of the {process.side} side" if process.side else ""
        name = f"{process.title} (pid {process.pid}{where}){side}"
        # One that a later round on its host does not have has ended.
        is_gone = seen.gone > 0 or seen.last < self.rounds.get(process.host, seen.last)
        return Member(name, seen.in_order(), seen.rank, is_gone, process)

    def problems(self) -> tuple[Problem, ...]:
        """Return what could not be had, each once."""
        return tuple(sorted(self._problems, key=lambda problem: (problem.what, problem.why, problem.next)))

    def add(self, node: NodeSnapshot) -> None:
        """Take in what one round saw on one host."""
        self.rounds[node.host] = max(node.time, self.rounds.get(node.host, node.time))
        self._problems.update(dict.fromkeys(node.problems))
        for process in node.processes:
            seen = self._identify(process, node.time)
            rank = seen.rank if _name(process) == _name(seen.process) else rank_of(process)
            # Threads of a pool mostly have the same stack, as the same object.
            for frames in {id(thread.frames): thread.frames for thread in process.threads}.values():
                self.tree.add(rank, frames)
            if process.state or process.threads or process.native:
                seen.moments.append(self._moment(process))
            else:
                seen.gone += 1

    def _identify(self, process: Sample, last: float) -> SampledProcess:
        """Return what was seen of a process, named as it was last, in a round at `last`, in seconds since the epoch."""
        key = (process.host, process.pid, process.start_ticks)
        seen = self._seen.get(key)
        if seen is None:
            seen = self._seen[key] = SampledProcess(_identity(process), rank_of(process), last)
        seen.last = max(seen.last, last)
        # A process gets its title, and is told from others by it, after it was started.
        if process.time >= seen.process.time and (name := _name(process)) != (before := _name(seen.process)):
            if process.time > seen.process.time or name > before:
                seen.process, seen.rank = _identity(process), rank_of(process)
        elif process.time > seen.process.time:
            seen.process = replace(seen.process, time=process.time)
        return seen

    def _moment(self, process: Sample) -> Moment:
        main, native = process.main_thread, main_thread(process.native, process.pid)
        frames = main.frames if main else ()
        stacks = (frames, native.frames if native else (), process.kernels, bool(main and main.owns_gil))
        key = (*stacks, process.state, process.wchan, process.tracer)
        known = self._activities.get(key)
        if known is None:
            if len(self._activities) >= _MAX_CACHED:
                self._activities.clear()
            known = self._activities[key] = (activity_of(process), frames)
        # With the frames of the first that had them, so that equal ones are kept once.
        return Moment(process.state, process.cpu_secs, known[0], known[1], process.time, process.problem)


def _name(process: Sample) -> tuple[object, ...]:
    """Return what may change of a process while it lives, with an order."""
    named = (process.title, process.role, sorted(process.ranks.items()))
    return (*named, process.server or -1, process.rendezvous or "", process.side or "")


def _identity(process: Sample) -> Sample:
    return Sample(**{name: getattr(process, name) for name in _IDENTITY})
