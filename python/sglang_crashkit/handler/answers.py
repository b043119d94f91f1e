"""The messages that are answered when the incident is whole."""

from __future__ import annotations

import time
from collections.abc import Callable

from sglang_crashkit.protocol import WAIT_FIELD, Mailbox, Message

#: What comes after the last GPU core, up to the answer, takes no longer than this, in seconds.
_LAST_LOOK_SECS = 5.0


class Answers:
    """Those who wait for the incident at hand.

    Args:
        mailbox: how they are answered.
        step_secs: who waits is asked anew when the end of the wait has moved by so many seconds. More often it is not
            done: of a sender that reads nothing, as it is stopped, the kernel keeps ten answers and loses the last.
    """

    def __init__(self, mailbox: Mailbox, step_secs: float) -> None:
        self._mailbox = mailbox
        self._step_secs = step_secs
        self._waiting: list[Message] = []
        self._asked_until = 0.0

    def add(self, message: Message, secs_left: float | None) -> None:
        """Note that the sender waits: for GPU cores at most `secs_left` seconds more, None where none is awaited."""
        self._waiting.append(message)
        if secs_left is not None:
            self.ask_to_wait(message, secs_left)

    def ask_all_to_wait(self, secs_left: float | None) -> None:
        """Ask all of them to wait on, where they were not asked for so long; see `add`."""
        if secs_left is None or time.monotonic() + secs_left < self._asked_until + self._step_secs:
            return
        self._asked_until = time.monotonic() + secs_left
        for message in self._waiting:
            self.ask_to_wait(message, secs_left)

    def give(self, answer: Callable[[Message], None]) -> None:
        """Answer all of them."""
        for message in self._waiting:
            answer(message)
        self._waiting.clear()
        self._asked_until = 0.0

    def ask_to_wait(self, message: Message, secs_left: float) -> None:
        """Ask one sender to wait while GPU cores are written."""
        self._mailbox.acknowledge(message, ack="wait", **{WAIT_FIELD: secs_left + _LAST_LOOK_SECS})
