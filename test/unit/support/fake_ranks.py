"""Ranks that live on a clock of their own: no process, no pipe and no time passes."""

from __future__ import annotations

import threading
from collections.abc import Collection
from multiprocessing import connection
from typing import Any

from sglang_crashkit.srt.supervisor import Child, Clock
from unit.support.waiting import LONG

READY = {"status": "ready", "max_total_num_tokens": 8192}
_NEVER = float("inf")
#: Above any real pid and descriptor.
_FIRST = 1 << 28


class WaitsForEverError(Exception):
    """Nothing is left that could happen."""


class FakeClock(Clock):
    """A clock that stands still but for waiting, and knows when which descriptor is readable."""

    def __init__(self) -> None:
        self.time = 1000.0
        self.due: dict[int, float] = {}
        self.has_endless = False

    def now(self) -> float:
        return self.time

    def wait(self, descriptors: Collection[int], seconds: float | None) -> set[int]:
        real = set(connection.wait([each for each in descriptors if each < _FIRST], 0))
        until = _NEVER if seconds is None else self.time + seconds
        first = min([until, *(self.due.get(each, _NEVER) for each in descriptors)])
        if not real:
            if first == _NEVER:
                raise WaitsForEverError
            self.time = max(self.time, first)
        return real | {each for each in descriptors if self.due.get(each, _NEVER) <= self.time}

    def join(self, thread: threading.Thread, seconds: float) -> None:
        thread.join(0.002 if self.has_endless else LONG)
        if thread.is_alive():
            self.time += seconds


class FakeRank:
    """A scheduler as `multiprocessing` shows it, with the pipe that it says "ready" on.

    Args:
        number: its rank.
        clock: its clock.
        script: seconds since the start, and what happens then: ``ready``, ``close``, ``garble``, ``begin`` (a message
            that never ends), an exit code, or what it sends.
    """

    def __init__(self, number: int, clock: FakeClock, *script: tuple[float, Any]) -> None:
        self.number, self.clock = number, clock
        self.pid = _FIRST + 3 * number
        self.sentinel = self.pid + 1
        self._code, self._words = None, []
        for seconds, what in script:
            when = clock.time + seconds
            clock.has_endless |= what == "begin"
            if isinstance(what, int):
                self._code = what
                clock.due[self.sentinel] = when + (0.1 if what < 0 else 0.0)
                what = "close"
            if self.fileno() not in clock.due:
                clock.due[self.fileno()] = when
                self._words.append(what)

    @property
    def exitcode(self) -> int | None:
        return self._code if self.clock.due.get(self.sentinel, _NEVER) <= self.clock.time else None

    def fileno(self) -> int:
        return self.pid + 2

    def recv(self) -> Any:
        (what,) = self._words
        if what == "ready":
            return READY | {"rank": self.number}
        if what == "close":
            raise EOFError
        if what == "garble":
            raise ValueError("invalid load key")
        if what == "begin":
            threading.Event().wait(LONG)
        return what

    def child(self, *, is_waited_for: bool = True) -> Child:
        reader = self if is_waited_for else None
        return Child(f"Rank {self.number} scheduler", self, reader, f"sglang::scheduler_TP{self.number}")
