"""Times of events in seconds since the epoch, in the order in which they happened.

The machine's clock may be set between two deaths. So a time is one of the monotonic clock, which all processes of a
machine share, and a distance to the epoch that stays as it is while events are compared.
"""

from __future__ import annotations

import time

_distance = time.time() - time.monotonic()


def now() -> float:
    """Return the time, in seconds since the epoch."""
    return at(time.monotonic())


def at(monotonic: float) -> float:
    """Return a time of the monotonic clock, in seconds since the epoch."""
    return monotonic + _distance


def follow_machine() -> None:
    """Take over what the machine's clock was set to; to be called while no earlier time is of use."""
    global _distance
    _distance = time.time() - time.monotonic()
