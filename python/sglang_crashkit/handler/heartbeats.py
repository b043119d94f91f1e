"""Follow the heartbeats of a server's processes, and note the pauses that they show.

A pause is shorter than a hang: a long garbage collection of a scheduler, or a step far longer than others. The record
of steps is read only if a heartbeat stood still for as long as a slow step takes.
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
#: The roles whose processes beat in their event loop; the other roles beat with each message.
_WITH_LOOPS = frozenset({"server", "tokenizer_worker"})
#: A process that uses this share of a CPU does not wait: waiting uses none, and a spinning process may get little.
_AWAKE = 0.05
LONG_COLLECTION, SLOW_STEP = "long_collection", "slow_step"
#: A slow step takes longer than this, in seconds, and longer than this many times the median of its mode.
SLOW_SECS, SLOW_FACTOR = 5.0, 20.0
#: The least number of other steps for a meaningful median.
_LEAST_STEPS = 8
LOOK_SECS = 2.0
#: The least seconds between two lines in the server's log for one kind of pause: most pauses affect all ranks.
_SAY_SECS = 60.0
#: How many pauses are kept, for how many seconds an incident still lists them, and how many counts are kept.
_MAX_KEPT, _KEPT_SECS, _MAX_COUNTS = 64, 600.0, 2048


class Followed:
    """Measures for how long a process made no progress.

    Only time between looks of the handler counts, so time in which the machine was suspended, or the handler got no
    CPU, does not. A scheduler makes progress if its heartbeat changes. Any other process makes no progress while it is
    stopped; with a heartbeat, also while its event loop completes no round, while it works at one message, or while it
    reports that it waits for a message but uses its CPU or is in an uninterruptible sleep.
    """

    def __init__(self, process: TrackedProcess, reader: HeartbeatReader | None, now: float) -> None:
        self.process, self.is_rank = process, process.role == "scheduler"
        self._reader = reader  # of its heartbeat; None without one
        self.sign = self.last() if self.is_rank else _sign_at(now)  # its heartbeat when it last made progress
        self.silent_secs = 0.0  # the time without progress since then
        self.signs = 0  # how many looks saw progress since this was last set to 0
        self.how = ""  # how it last stood still, in words; empty for a scheduler
        self._said: Heartbeat | None = None
        self._cpu_secs = 0.0

    def follow(self, reader: HeartbeatReader) -> None:
        """Read another heartbeat from now on, because the process announced a new one."""
        self.close()
        self._reader = reader

    def last(self) -> Heartbeat:
        """Return its present heartbeat, or the last one of a dead process; it does not count as a sign."""
        assert self._reader is not None
        return self._reader.read()

    def look(self, seen_secs: float, now: float) -> None:
        """Check for progress, `seen_secs` after the last look."""
        said = self._reader.read() if self._reader is not None else None
        goes_on = said != self.sign if self.is_rank else not self._stands(said, seen_secs)
        if self.is_rank and said is not None:
            # Even if the sign is the same: a garbage collection may have begun since.
            self.sign = said
        elif goes_on:
            self.sign = _sign_at(now)
        if goes_on:
            self.silent_secs, self.signs = 0.0, self.signs + 1
        else:
            self.silent_secs += seen_secs

    def catch_up(self, now: float) -> None:
        """Read a scheduler's heartbeat, and count all the time since its last sign, even between looks."""
        self.look(0.0, now)
        self.silent_secs = max(0.0, now - self.sign.at)

    def hold(self, seen_secs: float) -> None:
        """Do not count the time since the last look, `seen_secs`, as silence."""
        self.silent_secs = max(0.0, self.silent_secs - seen_secs)

    def close(self) -> None:
        """Release the heartbeat's memory."""
        if self._reader is not None:
            self._reader.close()

    def _stands(self, said: Heartbeat | None, seen_secs: float) -> bool:
        """Return whether a process that is no scheduler stood still since the last look, and note how."""
        # CPU time matters only for a process that reports that it waits.
        waits = said is not None and said.is_waiting
        cpu_secs = procfs.main_thread_cpu_secs(self.process.pid) if waits else 0.0
        state, how = self.process.state, ""
        if state == "T":
            how = "was stopped"
        elif said is None or said != self._said or said.is_off or state == "t":
            # Progress, or no heartbeat to judge by; a process that a debugger holds can't be judged either.
            pass
        elif not waits:
            is_loop = self.process.role in _WITH_LOOPS
            how = "did not come back to its event loop" if is_loop else "worked at one message"
        elif state == "D" or cpu_secs - self._cpu_secs >= _AWAKE * seen_secs > 0:
            # A process that really waits for a message is in an interruptible sleep.
            how = "did not take the next message"
        self._said, self._cpu_secs, self.how = said, cpu_secs, how or self.how
        return how != ""


def _sign_at(now: float) -> Heartbeat:
    return Heartbeat(now, 0.0, 0, 0, paused=False, is_busy=False, is_off=False)


class Heartbeats:
    """Follows the heartbeats of one server, unless this is switched off."""

    def __init__(self, tree: ProcessTree, *, is_on: bool = True, now: Callable[[], float] = time.monotonic) -> None:
        self.followed: dict[int, Followed] = {}  # schedulers with a heartbeat, by pid
        self.others: dict[int, Followed] = {}  # the other processes that the server needs to answer requests
        self.began_at = 0.0  # since when any scheduler is followed, by the clock
        #: Pids of schedulers that have begun their event loop but can't be followed, or are no longer followed.
        self.unfollowed: set[int] = set()
        self._tree = tree
        self._is_on = is_on
        self._now = now
        #: The last heartbeats of processes that are no longer followed, by pid.
        self._last: dict[int, Heartbeat] = {}

    def follow(self, process: TrackedProcess, descriptor: int | None, modes: object = None) -> None:
        """Follow the heartbeat that a process passed on, if the server needs the process; `modes` came with it.

        Its descriptor stays open.
        """
        if descriptor is None or not self._is_on:
            return
        if process.role != "scheduler" and process.role not in NEEDED:
            # The tree reads titles only every few seconds, and this process may have got its title since.
            self._tree.reread_title(process)
            if process.role != "scheduler" and process.role not in NEEDED:
                return
        try:
            reader = HeartbeatReader(descriptor, modes_of(modes))
        except (OSError, RingError) as error:
            if process.role == "scheduler":
                self.unfollowed.add(process.pid)
            words = (
                "%s (pid %d) has no readable heartbeat; a hang of it shows only in the processes that wait for it: %s"
            )
            logger.warning(words, process.title, process.pid, error)
            return
        if process.role == "scheduler" and not self.followed:
            self.began_at = self._now()
        those = self.followed if process.role == "scheduler" else self.others
        if (known := those.get(process.pid)) is not None:
            # A hang that is not over refers to this object.
            known.follow(reader)
        else:
            those[process.pid] = Followed(process, reader, self._now())

    def look(self, seen_secs: float) -> None:
        """Check all for progress, `seen_secs` after the last look; stop following those that died or beat no more."""
        for pid, heartbeat in list(self.followed.items()):
            is_dead = heartbeat.process.exited_at is not None
            if not is_dead:
                heartbeat.look(seen_secs, self._now())
            if is_dead or heartbeat.sign.is_off:
                # A living process stops its heartbeat for a reason that it has logged.
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
        """Return the followed schedulers whose exit was not noticed."""
        return [heartbeat for heartbeat in self.followed.values() if heartbeat.process.exited_at is None]

    def silent(self, secs: float) -> list[Followed]:
        """Return the living schedulers that gave no sign in the last `secs` seconds, the longest silent first."""
        living, now = self.living(), self._now()
        for heartbeat in living:
            heartbeat.catch_up(now)
        return by_last_sign(one for one in living if one.silent_secs >= secs and not one.sign.is_off)

    def last_signs(self) -> dict[int, Heartbeat]:
        """Return the last heartbeat of each scheduler, living or dead, by pid; its memory outlives the process."""
        return self._last | {pid: heartbeat.last() for pid, heartbeat in self.followed.items()}


def by_last_sign(heartbeats: Iterable[Followed]) -> list[Followed]:
    """Return heartbeats in the order of their last signs, the earliest first."""
    return sorted(heartbeats, key=lambda heartbeat: (heartbeat.sign.at, heartbeat.process.pid))


def modes_of(value: object) -> dict[int, str]:
    """Return the forward modes that a scheduler reported, by number; drop invalid entries."""
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
        self.counts: Counter[tuple[str, str]] = Counter()  # the number of pauses by title and kind
        self._heartbeats, self._steps_of, self._now = heartbeats, steps_of, now
        #: When each pause ended, by the monotonic clock, its kind, and its details for the timeline.
        self._kept: deque[tuple[float, str, dict[str, object]]] = deque(maxlen=_MAX_KEPT)
        self._seen: dict[int, Heartbeat] = {}
        #: The processes whose steps are due to be checked, one at each look, by pid.
        self._late: dict[int, TrackedProcess] = {}
        #: The last noted step of each process, by pid; when the last line was logged, by kind.
        self._noted: dict[int, int] = {}
        self._said: dict[str, float] = {}
        self._due = 0.0

    def act_on_time(self) -> float:
        """Look for pauses if that is due, and return when it is due next, by the monotonic clock."""
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
        # Processes set their own titles, so their number has no bound.
        if len(self.counts) < _MAX_COUNTS:
            self.counts[process.title, kind] += 1
        now = self._now()
        if now - self._said.get(kind, float("-inf")) >= _SAY_SECS:
            self._said[kind] = now
            self.say(f"{process.title} (pid {process.pid}) {words}")

    def add_to(self, note: Callable[..., object]) -> None:
        """Add the pauses of the last ten minutes to the timeline of an incident, by its `note`."""
        for ended, kind, told in self._kept:
            if self._now() - ended <= _KEPT_SECS:
                note(clock.at(ended), kind, **told)
