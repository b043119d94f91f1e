"""What was announced of a server's end, and what was seen of it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from sglang_crashkit.policy import Action, Event, Mode, decide


@dataclass
class Outlook:
    """What is known of the server as a whole.

    Attributes:
        mode: what the program is that launched it; until it says so, the one in which nothing is ended.
        expected: the processes whose end was announced.
        draining: the server was asked to end and finishes its requests.
        has_left: a process of it ended because it was asked to, too.
        ended_well: the server's own process ended with status 0.
        gone_at: when the end of the server's own process was noticed, by the monotonic clock; None while it lives.
    """

    mode: Mode = Mode.LIBRARY
    expected: set[int] = field(default_factory=set)
    draining: bool = False
    has_left: bool = False
    ended_well: bool = False
    gone_at: float | None = None

    def begin(self, mode: Mode, alive: Collection[int] = ()) -> None:
        """Take in that a server is launched, maybe after another one of the same program.

        Args:
            mode: what the program is.
            alive: the processes that are there. Of those whose end was announced before, some may end still: releases
                before 0.5.11 do not wait for it.
        """
        self.mode = mode
        self.expected.intersection_update(alive)
        self.draining = self.has_left = False

    def decide(self, event: Event) -> Action:
        """Return what is done about an event; see `policy.decide`."""
        return decide(self.mode, event)
