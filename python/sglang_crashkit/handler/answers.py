"""What the server is told: answers to those who wait for an incident, and lines for its own log.

That log is written by its main process: the crash handler holds none of it open.
"""

from __future__ import annotations

import logging
import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sglang_crashkit.handler.processes import TrackedProcess
from sglang_crashkit.incident.exit_status import while_starting
from sglang_crashkit.incident.first_screen import LOG_LINES, failed_at_start, first_screen
from sglang_crashkit.kernel.stack_hooks import FAULT, HookFiles
from sglang_crashkit.model.incident import Incident
from sglang_crashkit.protocol import WAIT_FIELD, HandlerUnreachableError, Mailbox, Message, notify

logger = logging.getLogger(__name__)

#: What comes after the last GPU core, up to the answer, takes no longer than this, in seconds.
_LAST_LOOK_SECS = 5.0
_MAX_CHARACTERS = 3000


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


def log_lines(incident: Incident, folder: Path | None, ends_with: int | None = None) -> list[str]:
    """Return what the server's own log says of a finished incident, before it says where that lies.

    Args:
        incident: see above.
        folder: where it lies, which commands name it by; None where it was not written.
        ends_with: the exit status that the incident stands for; None where the kit does not end the server with it.
    """
    document = incident.to_json()
    if ends_with is not None and failed_at_start(document):
        ends_with = while_starting(ends_with)
    where = shlex.quote(str(folder.absolute())) if folder is not None else ""
    return first_screen(document, ends_with=ends_with, where=where, wraps=False)[:LOG_LINES]


class ServerLog:
    """The log of one server; see `srt.stack_hooks` for the other end.

    Args:
        root: the server's main process.
        runtime: where the server's processes say which hooks they have.
    """

    def __init__(self, root: TrackedProcess, runtime: Path) -> None:
        self._socket = HookFiles.of(runtime, root.pid, root.handle.start_ticks).say

    @property
    def is_heard(self) -> bool:
        """Whether the main process listens."""
        return self._socket.exists()

    def report_fault(self) -> None:
        """Have the main process copy what a dying worker wrote to its standard error, as upstream has it there."""
        self._notify(FAULT)

    def say(self, text: str) -> None:
        """Have the main process write one line, when it gets to it; it may be the one that hangs."""
        self._notify("say", text=text[:_MAX_CHARACTERS])

    def _notify(self, event: str, **fields: Any) -> None:
        try:
            notify(str(self._socket), event, **fields)
        except HandlerUnreachableError as error:
            logger.warning("the server's own log does not report it: %s", error)
