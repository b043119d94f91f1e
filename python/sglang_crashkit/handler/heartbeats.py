"""The heartbeats of a server's processes, as the handler follows them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable
from typing import TypeAlias, TypeVar

from sglang_crashkit.handler.processes import ProcessTree, TrackedProcess
from sglang_crashkit.kernel.titles import NEEDED
from sglang_crashkit.memory.heartbeat import Heartbeat, HeartbeatReader, NotAHeartbeatError

logger = logging.getLogger(__name__)

_MAX_MODES = 64
#: Of these an event loop beats; the others beat with each message.
_WITH_LOOPS = frozenset({"server", "tokenizer_worker"})
#: Who uses this share of a CPU does not wait: who waits for a message uses none, and who spins may get little.
_AWAKE = 0.05


class FollowedHeartbeat:
    """Counts for how long a scheduler was seen to be silent.

    What counts is time that the handler saw pass, look by look: of a suspended machine, or of a handler that got no
    CPU, it saw nothing.

    Attributes:
        sign: what the heartbeat said at the last look.
        silent_secs: for how long it has said nothing else, in seconds.
        signs: at how many looks it had moved on since `signs` was last set to 0.
    """

    def __init__(self, process: TrackedProcess, reader: HeartbeatReader) -> None:
        self.process = process
        self._reader = reader
        self.sign: Heartbeat = reader.read()
        self.silent_secs = 0.0
        self.signs = 0

    def look(self, seen_secs: float) -> None:
        """Take in what it says now, so many seconds that the handler saw pass after the last look."""
        before, self.sign = self.sign, self._reader.read()
        if self.sign == before:
            self.silent_secs += seen_secs
        else:
            self.silent_secs = 0.0
            self.signs += 1

    def catch_up(self, now: float) -> None:
        """Take in what it says now, and count all of the time since its last sign, seen or not."""
        sign = self._reader.read()
        self.signs += sign != self.sign
        self.sign = sign
        self.silent_secs = max(0.0, now - sign.at)

    def hold(self, seen_secs: float) -> None:
        """Do not count the time since the last look."""
        self.silent_secs = max(0.0, self.silent_secs - seen_secs)

    def last(self) -> Heartbeat:
        """Return what it says now, or said last, without taking it for a sign."""
        return self._reader.read()

    def close(self) -> None:
        """Give the memory back."""
        self._reader.close()


class FollowedProcess:
    """Counts for how long a process other than a scheduler was seen not to go on, as a `FollowedHeartbeat` does.

    It does not go on where it is stopped. One that beats also does not where its loop does not come round, where it
    works at one message, or where it says that it waits for the next one but uses its CPU or is in an uninterruptible
    sleep.

    Attributes:
        sign: when it was last seen to go on.
        silent_secs: for how long it was seen not to go on since, in seconds.
        signs: at how many looks it went on since `signs` was last set to 0.
        how: how it did not go on when it was last seen so, in words.
    """

    def __init__(self, process: TrackedProcess, now: float) -> None:
        self.process = process
        self.silent_secs = 0.0
        self.signs = 0
        self.how = ""
        self._said: Heartbeat | None = None
        self._cpu_secs = 0.0
        self._go_on(now)

    def _go_on(self, now: float) -> None:
        self.sign = Heartbeat(now, 0.0, 0, 0, paused=False, is_busy=False, is_off=False)

    def look(self, state: str, said: Heartbeat | None, cpu_secs: float, seen_secs: float, now: float) -> None:
        """Take in what is seen of it now, `seen_secs` after the last look; see `FollowedHeartbeat.look`.

        `state` and `cpu_secs` are those of its main thread in ``/proc``; `said` is None where it has no heartbeat.
        """
        how = self._stands(state, said, cpu_secs - self._cpu_secs, seen_secs)
        self._said, self._cpu_secs = said, cpu_secs
        if how:
            self.how = how
            self.silent_secs += seen_secs
        else:
            self.silent_secs = 0.0
            self.signs += 1
            self._go_on(now)

    def _stands(self, state: str, said: Heartbeat | None, used_secs: float, seen_secs: float) -> str:
        """Return how it did not go on since the last look, in words; empty where it did."""
        if state == "T":
            return "was stopped"
        # Of one that a debugger holds nothing is known.
        if said is None or said != self._said or said.is_off or state == "t":
            return ""
        if not said.is_waiting:
            is_loop = self.process.role in _WITH_LOOPS
            return "did not come back to its event loop" if is_loop else "worked at one message"
        # A process that waits for a message sleeps, and can be interrupted.
        is_awake = used_secs >= _AWAKE * seen_secs > 0
        return "did not come to the next message" if is_awake or state == "D" else ""

    def hold(self, seen_secs: float) -> None:
        """Do not count the time since the last look."""
        self.silent_secs = max(0.0, self.silent_secs - seen_secs)


#: The processes that give signs of life.
Followed: TypeAlias = FollowedHeartbeat | FollowedProcess
SomeFollowed = TypeVar("SomeFollowed", bound=Followed)


class Heartbeats:
    """Follows the heartbeats of one server, unless that is switched off.

    Attributes:
        followed: those of schedulers, by pid.
        began_at: since when any of these is followed, by the clock.
        unfollowed: pids of schedulers that have begun their loop and cannot be followed, or are not any more.
    """

    def __init__(self, tree: ProcessTree, *, is_on: bool = True, clock: Callable[[], float] = time.monotonic) -> None:
        self.followed: dict[int, FollowedHeartbeat] = {}
        self.began_at = 0.0
        self.unfollowed: set[int] = set()
        self._tree = tree
        self._is_on = is_on
        self._clock = clock
        #: What those that are not followed any more said last, by pid.
        self._last: dict[int, Heartbeat] = {}
        #: Those of other processes, by pid.
        self._others: dict[int, HeartbeatReader] = {}

    def follow(self, process: TrackedProcess, descriptor: int | None, modes: object = None) -> None:
        """Follow the heartbeat that a process passed on, if the server needs it; its descriptor stays open.

        `modes` has names of the forward modes by their number, as they came, and may be anything.
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
        except (OSError, NotAHeartbeatError) as error:
            if process.role == "scheduler":
                self.unfollowed.add(process.pid)
            words = "%s (pid %d) cannot be followed, so that it hangs is seen only by others that wait for it: %s"
            logger.warning(words, process.title, process.pid, error)
            return
        if process.role != "scheduler":
            self._forget(process.pid)
            self._others[process.pid] = reader
            return
        if not self.followed:
            self.began_at = self._clock()
        elif process.pid in self.followed:
            self.followed[process.pid].close()
        self.followed[process.pid] = FollowedHeartbeat(process, reader)

    def look(self, seen_secs: float) -> None:
        """Take in what all say now, and let go of those that say no more; see `FollowedHeartbeat.look`."""
        for pid, heartbeat in list(self.followed.items()):
            is_dead = heartbeat.process.exited_at is not None
            if not is_dead:
                heartbeat.look(seen_secs)
            if is_dead or heartbeat.sign.is_off:
                # One that lives beats no more, for a reason that it has logged.
                self.unfollowed.add(pid)
                if not heartbeat.sign.is_off:
                    self._last[pid] = heartbeat.last()
                self.followed.pop(pid).close()

    def said_by(self, process: TrackedProcess) -> Heartbeat | None:
        """Return what the heartbeat of a process other than a scheduler says now; None where it has none."""
        reader = self._others.get(process.pid)
        return reader.read() if reader is not None else None

    def forget_all_but(self, pids: Collection[int]) -> None:
        """Let go of the heartbeats of processes other than schedulers but for these."""
        for pid in self._others.keys() - set(pids):
            self._forget(pid)

    def _forget(self, pid: int) -> None:
        reader = self._others.pop(pid, None)
        if reader is not None:
            reader.close()

    def living(self) -> list[FollowedHeartbeat]:
        """Return those of processes whose exit was not noticed."""
        return [heartbeat for heartbeat in self.followed.values() if heartbeat.process.exited_at is None]

    def silent(self, secs: float) -> list[FollowedHeartbeat]:
        """Return those that gave no sign in the last `secs` seconds, that first which fell silent first.

        That one is silent does not mean that it hangs.
        """
        living, now = self.living(), self._clock()
        for heartbeat in living:
            heartbeat.catch_up(now)
        return by_last_sign(one for one in living if one.silent_secs >= secs and not one.sign.is_off)

    def last_signs(self) -> dict[int, Heartbeat]:
        """Return what the heartbeat of each scheduler says, or said last, by pid; it outlives the process."""
        return self._last | {pid: heartbeat.last() for pid, heartbeat in self.followed.items()}


def by_last_sign(heartbeats: Iterable[SomeFollowed]) -> list[SomeFollowed]:
    """Return heartbeats in the order in which they gave their last signs."""
    return sorted(heartbeats, key=lambda heartbeat: (heartbeat.sign.at, heartbeat.process.pid))


def modes_of(value: object) -> dict[int, str]:
    """Return the forward modes that a scheduler reported, without other words."""
    modes = value if isinstance(value, dict) else {}
    short = {key: str(name)[:40] for key, name in list(modes.items())[:_MAX_MODES]}
    return {int(key): name for key, name in short.items() if isinstance(key, str) and key.isascii() and key.isdecimal()}
