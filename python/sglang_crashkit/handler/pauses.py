"""What is shorter than a hang: long garbage collections of the schedulers, and steps far longer than others.

Both are read from memory that the schedulers write anyway. A step is looked for in the record of steps only where a
heartbeat stood still for as long as a slow step takes.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median

from sglang_crashkit.handler.heartbeats import Heartbeats
from sglang_crashkit.handler.processes import TrackedProcess
from sglang_crashkit.kernel import clock
from sglang_crashkit.memory.heartbeat import Heartbeat
from sglang_crashkit.model.step import Step

logger = logging.getLogger(__name__)

LONG_COLLECTION, SLOW_STEP = "long_collection", "slow_step"
#: A step is slow that takes longer than this, in seconds, and so many times the median of its mode.
SLOW_SECS, SLOW_FACTOR = 5.0, 20.0
#: The median of fewer steps says nothing.
_LEAST_STEPS = 8
LOOK_SECS = 2.0
#: Of a kind, the server's log has a line at most this often, in seconds: most pauses are of all ranks.
_SAY_SECS = 60.0
#: So many are kept; an incident has those of the last ten minutes.
_MAX_KEPT, _KEPT_SECS, _MAX_COUNTS = 64, 600.0, 2048


@dataclass(frozen=True)
class Pause:
    """A time in which a scheduler stood still; `words` say why, and `details` the same as fields."""

    kind: str
    process: TrackedProcess
    ended: float  # in seconds of the monotonic clock
    secs: float
    words: str
    details: Mapping[str, object]


class Pauses:
    """Notes the pauses of one server.

    Args:
        heartbeats: of its schedulers.
        steps_of: returns the last steps of a scheduler.
        now: a monotonic clock, in seconds.

    Attributes:
        say: writes a line to the server's log.
        counts: how many there were, by title and kind.
    """

    def __init__(
        self,
        heartbeats: Heartbeats,
        steps_of: Callable[[TrackedProcess], tuple[Step, ...]],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.say: Callable[[str], object] = logger.info
        self.counts: Counter[tuple[str, str]] = Counter()
        self._heartbeats, self._steps_of, self._now = heartbeats, steps_of, now
        self._kept: deque[Pause] = deque(maxlen=_MAX_KEPT)
        self._seen: dict[int, Heartbeat] = {}
        #: Whose steps are to be looked at, one at a time, by pid.
        self._late: dict[int, TrackedProcess] = {}
        #: The last step of each that was noted, by pid; when a line was said, by kind.
        self._noted: dict[int, int] = {}
        self._said: dict[str, float] = {}
        self._due = 0.0

    def next_due(self) -> float:
        """Return when `act_on_time` has something to do, by the monotonic clock."""
        return self._due if self._heartbeats.followed else float("inf")

    def act_on_time(self) -> None:
        """Look, where that is due."""
        now = self._now()
        if now < self._due:
            return
        self._due = now + LOOK_SECS
        living = {one.process.pid: one for one in self._heartbeats.living()}
        self._seen = {pid: sign for pid, sign in self._seen.items() if pid in living}
        self._noted = {pid: number for pid, number in self._noted.items() if pid in living}
        for pid, one in living.items():
            sign, before = one.last(), self._seen.get(pid)
            self._seen[pid] = sign
            if before is None:
                continue
            if sign.long_collections > before.long_collections:
                secs = min(sign.collection_secs, now)
                words = f"stood still for {secs:.1f} s in a garbage collection of Python"
                self._note(Pause(LONG_COLLECTION, one.process, sign.collection_ended, secs, words, {}))
            if sign.at > before.at and now - before.at > SLOW_SECS and not (before.paused or before.is_busy):
                self._late[pid] = one.process
        if self._late:
            self._look_at_steps(self._late.pop(next(iter(self._late))))

    def _look_at_steps(self, process: TrackedProcess) -> None:
        by_mode: dict[str, list[float]] = {}
        ended = [step for step in self._steps_of(process) if step.ended is not None]
        took = {step.number: (step.ended or 0.0) - step.began for step in ended}
        for step in ended:
            by_mode.setdefault(step.mode, []).append(took[step.number])
        noted = self._noted.get(process.pid, 0)
        for step in ended:
            secs, others = took[step.number], by_mode[step.mode]
            if step.number <= noted or secs <= SLOW_SECS or len(others) <= _LEAST_STEPS:
                continue
            usual = median(others)
            if secs > SLOW_FACTOR * usual:
                self._noted[process.pid] = step.number
                words = f"was in step {step.number} ({step.mode}, {step.size} requests) for {secs:.1f} s"
                words += f", {secs / max(usual, 1e-6):,.0f} times the median of {len(others)} such steps"
                details = {"step": step.number, "mode": step.mode, "median": round(usual, 6)}
                self._note(Pause(SLOW_STEP, process, step.ended or 0.0, secs, words, details))

    def _note(self, pause: Pause) -> None:
        self._kept.append(pause)
        # A process says itself what it is called.
        if len(self.counts) < _MAX_COUNTS:
            self.counts[pause.process.title, pause.kind] += 1
        now = self._now()
        if now - self._said.get(pause.kind, float("-inf")) >= _SAY_SECS:
            self._said[pause.kind] = now
            self.say(f"{pause.process.title} (pid {pause.process.pid}) {pause.words}")

    def add_to(self, note: Callable[..., object]) -> None:
        """Put those of the last ten minutes into the timeline of an incident, by its `note`."""
        for one in (pause for pause in self._kept if self._now() - pause.ended <= _KEPT_SECS):
            its = {"pid": one.process.pid, "title": one.process.title, "seconds": round(one.secs, 3)}
            note(clock.at(one.ended), one.kind, **its, **one.details)
