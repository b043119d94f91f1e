"""How a command ends before it is done: by SIGTERM, as by Ctrl-C, and where its answer has no reader any more."""

from __future__ import annotations

import contextlib
import select
import signal
import time
from collections.abc import Iterator
from types import FrameType

#: How often it is looked whether anybody still reads the answer, in seconds.
LOOK_SECS = 1.0


class Terminated(KeyboardInterrupt):
    """SIGTERM came, or what it is for is over."""


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Let SIGTERM end this as Ctrl-C does."""

    def end(_signal: int, _frame: FrameType | None) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def ends_with_reader(descriptor: int, secs: float) -> Iterator[None]:
    """End this as SIGTERM does where `descriptor` has no reader any more, and after `secs` seconds in any case.

    Who runs a command on another machine, as ssh does, does not end it there when it ends itself: all that can be seen
    of it there is that the pipe of the answer has no reader.
    """
    deadline = time.monotonic() + secs
    pipe = select.poll()
    # Of what is hung up or has no reader, it is told without being asked.
    pipe.register(descriptor, 0)

    def look(_signal: int, _frame: FrameType | None) -> None:
        if pipe.poll(0) or time.monotonic() >= deadline:
            # Once: how it ends is not to be cut short.
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise Terminated

    before = signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, LOOK_SECS, LOOK_SECS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
