"""The heartbeats of a server's processes, as the handler follows them, and the pauses that they tell of.

A pause is shorter than a hang: a long garbage collection of a scheduler, or a step far longer than others. The record
of steps is read only where a heartbeat stood still for as long as a slow step takes.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from statistics import median

from sglang_crashkit.handler.processes import ProcessTree, TrackedProcess
from sglang_crashkit.kernel import clock, procfs
from sglang_crashkit.kernel.titles import NEEDED
from sglang_crashkit.memory.heartbeat import Heartbeat, HeartbeatReader
from sglang_crashkit.memory.ring import RingError
from sglang_crashkit.model.step import Step

logger = logging.getLogger(__name__)

_MAX_MODES = 64
#: Of these an event loop beats; the others beat with each message.
_WITH_LOOPS = frozenset({"server", "tokenizer_worker"})
#: Who uses this share of a CPU does not wait: who waits for a message uses none, and who spins may get little.
_AWAKE = 0.05
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


class Followed:
    """Counts for how long a process was seen not to go on.

    What counts is time that the handler saw pass, look by look: of a suspended machine, or of a handler that got no
    CPU, it saw nothing. A scheduler goes on where its heartbeat does. Another process does not go on where it is
    stopped. One that beats also does not where its loop does not come round, where it works at one message, or where it
    says that it waits for the next one but uses its CPU or is in an uninterruptible sleep.
    """

    def __init__(self, process: TrackedProcess, reader: HeartbeatReader | None, now: float) -> None:
        self.process, self.is_rank = process, process.role == "scheduler"
        self._reader = reader  # of its heartbeat; None where it has none
        self.sign = self.last() if self.is_rank else _sign_at(now)  # what it said when it was last seen to go on
        self.silent_secs = 0.0  # for how long it was seen not to go on since
        self.signs = 0  # at how many looks it had gone on since this was last set to 0
        self.how = ""  # of one that is no scheduler, how it did not go on when it was last seen so, in words
        self._said: Heartbeat | None = None
        self._cpu_secs = 0.0

    def follow(self, reader: HeartbeatReader) -> None:
        """Read another heartbeat from now on, as it was announced anew."""
        self.close()
        self._reader = reader

    def last(self) -> Heartbeat:
        """Return what its heartbeat says now, or said last, without taking it for a sign."""
        assert self._reader is not None
        return self._reader.read()

    def look(self, seen_secs: float, now: float) -> None:
        """Take in what is seen of it now, `seen_secs` after the last look."""
        said = self._reader.read() if self._reader is not None else None
        goes_on = said != self.sign if self.is_rank else not self._stands(said, seen_secs)
        if self.is_rank and said is not None:
            # Even where it is no other sign: a garbage collection may have begun since.
            self.sign = said
        elif goes_on:
            self.sign = _sign_at(now)
        if goes_on:
            self.silent_secs, self.signs = 0.0, self.signs + 1
        else:
            self.silent_secs += seen_secs

    def catch_up(self, now: float) -> None:
        """Take in what a scheduler says now, and count all of the time since its last sign, seen or not."""
        self.look(0.0, now)
        self.silent_secs = max(0.0, now - self.sign.at)

    def hold(self, seen_secs: float) -> None:
        """Do not count the time since the last look."""
        self.silent_secs = max(0.0, self.silent_secs - seen_secs)

    def close(self) -> None:
        """Give the memory back."""
        if self._reader is not None:
            self._reader.close()

    def _stands(self, said: Heartbeat | None, seen_secs: float) -> bool:
        """Say whether one that is no scheduler did not go on since the last look, and note how."""
        # The CPU time of one that does not wait does not tell anything.
        waits = said is not None and said.is_waiting
        cpu_secs = procfs.main_thread_cpu_secs(self.process.pid) if waits else 0.0
        state, how = self.process.state, ""
        if state == "T":
            how = "was stopped"
        elif said is None or said != self._said or said.is_off or state == "t":
            # Of one that a debugger holds nothing is known.
            pass
        elif not waits:
            is_loop = self.process.role in _WITH_LOOPS
            how = "did not come back to its event loop" if is_loop else "worked at one message"
        elif state == "D" or cpu_secs - self._cpu_secs >= _AWAKE * seen_secs > 0:
            # A process that waits for a message sleeps, and can be interrupted.
            how = "did not come to the next message"
        self._said, self._cpu_secs, self.how = said, cpu_secs, how or self.how
        return how != ""


def _sign_at(now: float) -> Heartbeat:
    return Heartbeat(now, 0.0, 0, 0, paused=False, is_busy=False, is_off=False)


class Heartbeats:
    """Follows the heartbeats of one server, unless that is switched off."""

    def __init__(self, tree: ProcessTree, *, is_on: bool = True, now: Callable[[], float] = time.monotonic) -> None:
        self.followed: dict[int, Followed] = {}  # schedulers with a heartbeat, by pid
        self.others: dict[int, Followed] = {}  # processes beside them without which no request is answered
        self.began_at = 0.0  # since when any of these is followed, by the clock
        #: Pids of schedulers that have begun their loop and cannot be followed, or are not any more.
        self.unfollowed: set[int] = set()
        self._tree = tree
        self._is_on = is_on
        self._now = now
        #: What those that are not followed any more said last, by pid.
        self._last: dict[int, Heartbeat] = {}

    def follow(self, process: TrackedProcess, descriptor: int | None, modes: object = None) -> None:
        """Follow the heartbeat that a process passed on, if the server needs it; `modes` came with it.

        Its descriptor stays open.
        """
        if descriptor is None or not self._is_on:
            return
        if process.role != "scheduler" and process.role not in NEEDED:
            # The tree looks for titles every few seconds only, and this one may be newer.
            self._tree.reread_title(process)
            if process.role != "scheduler" and process.role not in NEEDED:
                return
        try:
            reader = HeartbeatReader(descriptor, modes_of(modes))
        except (OSError, RingError) as error:
            if process.role == "scheduler":
                self.unfollowed.add(process.pid)
            words = "%s (pid %d) cannot be followed, so that it hangs is seen only by others that wait for it: %s"
            logger.warning(words, process.title, process.pid, error)
            return
        if process.role == "scheduler" and not self.followed:
            self.began_at = self._now()
        those = self.followed if process.role == "scheduler" else self.others
        if (known := those.get(process.pid)) is not None:
            # A hang that is not over holds it.
            known.follow(reader)
        else:
            those[process.pid] = Followed(process, reader, self._now())

    def look(self, seen_secs: float) -> None:
        """Take in what is seen of all now, `seen_secs` after the last look, and let go of those that say no more."""
        for pid, heartbeat in list(self.followed.items()):
            is_dead = heartbeat.process.exited_at is not None
            if not is_dead:
                heartbeat.look(seen_secs, self._now())
            if is_dead or heartbeat.sign.is_off:
                # One that lives beats no more, for a reason that it has logged.
                self.unfollowed.add(pid)
                if not heartbeat.sign.is_off:
                    self._last[pid] = heartbeat.last()
                self.followed.pop(pid).close()
        needed = {process.pid: process for process in self._tree.alive() if process.role in NEEDED}
        for pid in self.others.keys() - needed.keys():
            self.others.pop(pid).close()
        for pid, process in needed.items():
            self.others.setdefault(pid, Followed(process, None, self._now())).look(seen_secs, self._now())

    def living(self) -> list[Followed]:
        """Return those of processes whose exit was not noticed."""
        return [heartbeat for heartbeat in self.followed.values() if heartbeat.process.exited_at is None]

    def silent(self, secs: float) -> list[Followed]:
        """Return those that gave no sign in the last `secs` seconds, that first which fell silent first."""
        living, now = self.living(), self._now()
        for heartbeat in living:
            heartbeat.catch_up(now)
        return by_last_sign(one for one in living if one.silent_secs >= secs and not one.sign.is_off)

    def last_signs(self) -> dict[int, Heartbeat]:
        """Return what the heartbeat of each scheduler says, or said last, by pid; it outlives the process."""
        return self._last | {pid: heartbeat.last() for pid, heartbeat in self.followed.items()}


def by_last_sign(heartbeats: Iterable[Followed]) -> list[Followed]:
    """Return heartbeats in the order in which they gave their last signs."""
    return sorted(heartbeats, key=lambda heartbeat: (heartbeat.sign.at, heartbeat.process.pid))


def modes_of(value: object) -> dict[int, str]:
    """Return the forward modes that a scheduler reported, without other words."""
    modes = value if isinstance(value, dict) else {}
    short = {key: str(name)[:40] for key, name in list(modes.items())[:_MAX_MODES]}
    return {int(key): name for key, name in short.items() if isinstance(key, str) and key.isascii() and key.isdecimal()}


# -- pauses


class Pauses:
    """Notes the pauses of one server; `now` is a monotonic clock, in seconds."""

    def __init__(
        self,
        heartbeats: Heartbeats,
        steps_of: Callable[[TrackedProcess], tuple[Step, ...]],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.say: Callable[[str], object] = logger.info  # writes a line to the server's log
        self.counts: Counter[tuple[str, str]] = Counter()  # how many there were, by title and kind
        self._heartbeats, self._steps_of, self._now = heartbeats, steps_of, now
        #: When each ended, by the monotonic clock, its kind, and what is told of it.
        self._kept: deque[tuple[float, str, dict[str, object]]] = deque(maxlen=_MAX_KEPT)
        self._seen: dict[int, Heartbeat] = {}
        #: Whose steps are to be looked at, one at a time, by pid.
        self._late: dict[int, TrackedProcess] = {}
        #: The last step of each that was noted, by pid; when a line was said, by kind.
        self._noted: dict[int, int] = {}
        self._said: dict[str, float] = {}
        self._due = 0.0

    def act_on_time(self) -> float:
        """Look, where that is due, and return when it is due next, by the monotonic clock."""
        now = self._now()
        if now < self._due:
            return self._due if self._heartbeats.followed else float("inf")
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
                self._note(LONG_COLLECTION, one.process, sign.collection_ended, secs, words)
            if sign.at > before.at and now - before.at > SLOW_SECS and not (before.paused or before.is_busy):
                self._late[pid] = one.process
        if self._late:
            self._look_at_steps(self._late.pop(next(iter(self._late))))
        return self._due if self._heartbeats.followed else float("inf")

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
                self._note(SLOW_STEP, process, step.ended or 0.0, secs, words, **details)

    def _note(
        self, kind: str, process: TrackedProcess, ended: float, secs: float, words: str, **details: object
    ) -> None:
        self._kept.append(
            (ended, kind, {"pid": process.pid, "title": process.title, "seconds": round(secs, 3)} | details)
        )
        # A process says itself what it is called.
        if len(self.counts) < _MAX_COUNTS:
            self.counts[process.title, kind] += 1
        now = self._now()
        if now - self._said.get(kind, float("-inf")) >= _SAY_SECS:
            self._said[kind] = now
            self.say(f"{process.title} (pid {process.pid}) {words}")

    def add_to(self, note: Callable[..., object]) -> None:
        """Put those of the last ten minutes into the timeline of an incident, by its `note`."""
        for ended, kind, told in self._kept:
            if self._now() - ended <= _KEPT_SECS:
                note(clock.at(ended), kind, **told)
