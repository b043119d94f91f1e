"""What was announced of a server's end, and what was seen of it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Outlook:
    """What is known of the server as a whole.

    Attributes:
        expected: the processes whose end was announced.
        draining: the server was asked to end and finishes its requests.
        ended_well: the server's own process ended with status 0.
        gone_at: when the end of the server's own process was noticed, by the monotonic clock; None while it lives.
    """

    expected: set[int] = field(default_factory=set)
    draining: bool = False
    ended_well: bool = False
    gone_at: float | None = None
