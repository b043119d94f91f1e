"""What snapshots show, merged: small for 100,000 ranks, and the same in whatever order they came.

Snapshots are taken in one by one and not kept: of each process stays what each sample shows of its main thread, and of
the Python stacks of all threads the merged tree. Each snapshot is to be taken in once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise

from sglang_crashkit.analysis.member import Moment
from sglang_crashkit.analysis.ranks import Rank, rank_of
from sglang_crashkit.analysis.stack_tree import PrefixTree
from sglang_crashkit.analysis.waits import Activity, activity_of
from sglang_crashkit.model.sample import Frame, Sample, main_thread
from sglang_crashkit.model.snapshot import NodeSnapshot, Problem

_MAX_CACHED = 1 << 16
#: What says of a sample whose it is, and when it was.
_WHO = ("host", "pid", "start_ticks", "title", "role", "ranks", "time", "server", "rendezvous", "side")


@dataclass(slots=True)
class Seen:
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


class Sightings:
    """Takes in snapshots, in any order.

    Attributes:
        tree: the Python stacks of all threads of all processes, of all snapshots.
        rounds: the time of the last round on each host, in seconds since the epoch.
    """

    def __init__(self) -> None:
        self.tree = PrefixTree()
        self.rounds: dict[str, float] = {}
        self._seen: dict[tuple[str, int, int], Seen] = {}
        self._problems: dict[Problem, None] = {}
        self._activities: dict[tuple[object, ...], tuple[Activity, tuple[Frame, ...]]] = {}

    @classmethod
    def of(cls, snapshots: Iterable[NodeSnapshot]) -> Sightings:
        """Return what all of `snapshots` show."""
        sightings = cls()
        for one in snapshots:
            sightings.add(one)
        return sightings

    def __len__(self) -> int:
        """Return how many processes were seen."""
        return len(self._seen)

    def processes(self) -> Iterator[Seen]:
        """Yield what was seen of each process, in an order that depends on nothing but them."""
        return (seen for _key, seen in sorted(self._seen.items(), key=lambda item: item[0]))

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

    def _identify(self, process: Sample, last: float) -> Seen:
        """Return what was seen of a process, named as it was last, in a round at `last`, in seconds since the epoch."""
        key = (process.host, process.pid, process.start_ticks)
        seen = self._seen.get(key)
        if seen is None:
            seen = self._seen[key] = Seen(_without_doings(process), rank_of(process), last)
        seen.last = max(seen.last, last)
        # A process gets its title, and is told from others by it, after it was started.
        if process.time >= seen.process.time and (name := _name(process)) != (before := _name(seen.process)):
            if process.time > seen.process.time or name > before:
                seen.process, seen.rank = _without_doings(process), rank_of(process)
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


def _without_doings(process: Sample) -> Sample:
    return Sample(**{name: getattr(process, name) for name in _WHO})
