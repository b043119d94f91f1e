"""Memory that the server's processes passed on to this one by descriptor: it outlives them, and tells of them."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from typing import Any

from sglang_crashkit.handler.collectors.deadline import share_of
from sglang_crashkit.handler.collectors.environment import Surroundings
from sglang_crashkit.handler.collectors.logs import ProcessLogs
from sglang_crashkit.handler.collectors.requests import RequestJournals
from sglang_crashkit.handler.collectors.steps import StepRecords
from sglang_crashkit.handler.heartbeats import Heartbeats
from sglang_crashkit.handler.incident import IncidentRun
from sglang_crashkit.handler.processes import ProcessTree, TrackedProcess
from sglang_crashkit.protocol import Message
from sglang_crashkit.settings import Settings


class Received:
    """What the processes of one server passed on."""

    def __init__(self, tree: ProcessTree, settings: Settings) -> None:
        self.heartbeats = Heartbeats(tree, is_on=settings.hang_secs > 0)
        self._journals = RequestJournals()
        self._steps = StepRecords()
        self._logs = ProcessLogs()
        self._surroundings = Surroundings()
        self._tree = tree
        self._log_records = settings.log_records

    def take(self, message: Message, sender: TrackedProcess, seconds: float) -> None:
        """Take in what came with a message, said at `seconds` since the epoch; other messages mean nothing here."""
        descriptor, fields = message.descriptor, message.fields
        match message.event:
            case "beat":
                self.heartbeats.follow(sender, descriptor, fields.get("modes"))
            case "journal":
                self._journals.follow(sender, descriptor)
            case "steps":
                self._steps.follow(sender, descriptor, fields.get("modes"))
            case "log":
                self._logs.follow(sender, descriptor)
            case "surroundings" if sender.is_root:
                self._surroundings.hear(descriptor, seconds, ready=fields.get("ready") is True)

    def add_to(self, run: IncidentRun, deadline: float, note_error: Callable[[str, Exception], Any]) -> None:
        """Put all of it into an incident that is about to be finished; one that fails costs no other.

        Args:
            run: the incident.
            deadline: until when all of it is to be there, by the monotonic clock.
            note_error: called with what failed and why.
        """
        run.add_last_signs(self.heartbeats.last_signs())
        parts: list[Callable[[float], None]] = [
            functools.partial(self._steps.add_to, run, self._tree),
            functools.partial(self._logs.add_to, run, self._tree, self._log_records),
            functools.partial(self._surroundings.add_to, run, self._tree),
        ]
        if not run.problem:
            parts.insert(1, functools.partial(self._journals.add_to, run))
        for part in parts:
            try:
                part(share_of(deadline, time.monotonic()))
            except Exception as error:  # noqa: BLE001 - told in the log and the incident
                note_error("what was kept in memory", error)

    def arguments(self) -> dict[str, Any]:
        """Return the server's arguments, as far as it told them by now."""
        return self._surroundings.arguments()

    def journal_bytes(self) -> int:
        """Return how much memory the request journals take."""
        return sum(os.fstat(held.descriptor).st_blocks * 512 for held in self._journals.held)

    def release(self, *, is_written: bool) -> None:
        """Give back what dead processes left, where an incident that is on the disk has it."""
        for rings in (self._journals, self._logs):
            if is_written:
                rings.remove_taken()
            else:
                rings.keep()

    def forget_requests(self) -> None:
        """Give back what an earlier server of the same program was asked."""
        self._journals.close()
        self._steps.close()

    def close(self) -> None:
        """Give all of it back."""
        for part in (self._journals, self._steps, self._logs, self._surroundings):
            part.close()
