"""Whoever waits for the incident at hand: asked to wait on while GPU cores are written, and answered at its end."""

from __future__ import annotations

import time
from collections.abc import Callable

from sglang_crashkit.protocol import WAIT_FIELD, Mailbox, Message

#: What comes after the last GPU core, up to the answer, takes no longer than this, in seconds.
_LAST_LOOK_SECS = 5.0


class Answers:
    """The messages that are answered when the incident is whole.

    Args:
        mailbox: how they are answered.
        step_secs: who waits is told anew when the end of the wait has moved by so many seconds. More often it is not
            done: of a sender that reads nothing, as it is stopped, the kernel keeps ten answers and loses the last.
    """

    def __init__(self, mailbox: Mailbox, step_secs: float) -> None:
        self._mailbox = mailbox
        self._step_secs = step_secs
        self._waiting: list[Message] = []
        self._told_until = 0.0

    def add(self, message: Message, secs_left: float | None) -> None:
        """Note that the sender of `message` waits.

        Args:
            message: see above.
            secs_left: how long the cores may take from now on, in seconds; None where none is awaited.
        """
        self._waiting.append(message)
        if secs_left is not None:
            self._ask_to_wait(message, secs_left)

    def tell(self, secs_left: float | None) -> None:
        """Ask all of them to wait on, where they were not told of so late an end.

        Args:
            secs_left: see `add`.
        """
        if secs_left is None or time.monotonic() + secs_left < self._told_until + self._step_secs:
            return
        self._told_until = time.monotonic() + secs_left
        for message in self._waiting:
            self._ask_to_wait(message, secs_left)

    def give(self, answer: Callable[[Message], None]) -> None:
        """Answer all of them."""
        for message in self._waiting:
            answer(message)
        self._waiting.clear()
        self._told_until = 0.0

    def _ask_to_wait(self, message: Message, secs_left: float) -> None:
        self._mailbox.acknowledge(message, ack="wait", **{WAIT_FIELD: secs_left + _LAST_LOOK_SECS})
