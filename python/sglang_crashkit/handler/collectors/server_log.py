"""Say something in the server's own log, which its main process writes: the crash handler holds none of it open."""

from __future__ import annotations

import logging
import shlex
from pathlib import Path
from typing import Any

from sglang_crashkit.handler.processes import TrackedProcess
from sglang_crashkit.incident.exit_status import while_starting
from sglang_crashkit.incident.first_screen import LOG_LINES, first_screen, is_of_start
from sglang_crashkit.kernel.stack_hooks import FAULT, HookFiles
from sglang_crashkit.model.incident import Incident
from sglang_crashkit.protocol import HandlerUnreachableError, notify

logger = logging.getLogger(__name__)

_MAX_CHARACTERS = 3000


def log_lines(incident: Incident, folder: Path | None, ends_with: int | None = None) -> list[str]:
    """Return what the server's own log says of a finished incident, before it says where that lies.

    Args:
        incident: see above.
        folder: where it lies, which commands name it by; None where it was not written.
        ends_with: the exit status that the incident stands for; None where the kit does not end the server with it.
    """
    document = incident.to_json()
    if ends_with is not None and is_of_start(document):
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
