"""Times of events in seconds since the epoch, in the order in which the events happened.

Somebody may set the machine's clock between two deaths. So each time is the monotonic clock, which all processes of a
machine share, plus an offset to the epoch. The offset stays constant while events are compared.
"""

from __future__ import annotations

import time

_distance = time.time() - time.monotonic()


def now() -> float:
    """Return the present time, in seconds since the epoch."""
    return at(time.monotonic())


def at(monotonic: float) -> float:
    """Convert a time of the monotonic clock to seconds since the epoch."""
    return monotonic + _distance


def follow_machine() -> None:
    """Update the offset after the machine's clock was set; call it only while no earlier time is still in use."""
    global _distance
    _distance = time.time() - time.monotonic()
