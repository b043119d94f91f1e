"""An incident as it is known by now, and its folder, which is written anew with all that is added."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

from sglang_crashkit.analysis.verdict import FailureEvent, judge
from sglang_crashkit.handler import evidence
from sglang_crashkit.handler.identity import handler_info, server_info
from sglang_crashkit.handler.tree import ProcessTree, TrackedProcess
from sglang_crashkit.incident.folder import IncidentFolder
from sglang_crashkit.incident.summary import format_summary
from sglang_crashkit.model.incident import Incident, ProcessReport, Trigger, Verdict, iso_time

logger = logging.getLogger(__name__)


class IncidentDraft:
    """The document of one incident in its folder.

    Args:
        kind: see `IncidentRun`.
        trigger: the event that opened it.
        process: whom the event came from.
        seconds: when, since the epoch.
        tree: the server's processes.
        folder: the incident's own folder.

    Attributes:
        incident: the document.
        opened: since when it is gathered, by the monotonic clock.
        finished: it is complete; what is added still is written anew.
    """

    def __init__(
        self,
        kind: str,
        trigger: str,
        process: TrackedProcess,
        seconds: float,
        tree: ProcessTree,
        folder: IncidentFolder,
    ) -> None:
        self._folder = folder
        self._failures: list[FailureEvent] = []
        self._afterwords: list[str] = []
        self.opened = time.monotonic()
        self.finished = False
        self.incident = Incident(
            id=folder.id,
            kind=kind,
            trigger=Trigger(trigger, iso_time(seconds), process.pid, process.title),
            server=server_info(tree.root.pid, tree.root.handle.start_ticks),
            handler=handler_info(),
        )
        self._checkpoint()

    @property
    def path(self) -> Path:
        """The incident's folder as it is named now."""
        return self._folder.path

    @property
    def problem(self) -> str:
        """Why it does not lie on disk, so that nothing but answers and logs tell of it; empty where it does."""
        return self._folder.problem

    def note(self, seconds: float, event: str, /, **fields: Any) -> None:
        """Add an event to the timeline; see `Incident.note`."""
        self.incident.note(seconds, event, **fields)

    def add_failure(self, event: FailureEvent) -> None:
        """Take in a failure for the verdict; once the incident is finished, it is only written anew."""
        if self.finished:
            self._save_again()
        else:
            self._failures.append(event)

    def add_afterword(self, sentence: str) -> None:
        """Add a sentence to the verdict, also once the incident is finished."""
        self._afterwords.append(sentence)
        if self.finished:
            self.incident.verdict = self._judge()
            self._save_again()

    def _save_again(self) -> None:
        try:
            self.save()
        except OSError as error:
            # It may have been removed by now.
            logger.warning("incident %s could not be brought up to date: %s", self.path, error)

    @property
    def stacks(self) -> int:
        """Of how many processes there are stacks."""
        return sum(
            any(piece.kind == "stack" and piece.status == "captured" for piece in report.evidence)
            for report in self.incident.processes
        )

    def keep(self, name: str, data: bytes) -> str:
        """Write a file into the incident's folder, and return its name; see `IncidentFolder.write_bytes`."""
        return self._folder.write_bytes(name, data)

    def charge(self, name: str, size: int) -> None:
        """Count a file that is written into the incident's folder; see `IncidentFolder.charge`."""
        self._folder.charge(name, size)

    def write_json(self, name: str, value: Any) -> str:
        """Write a file into the incident's folder, and return its name; see `IncidentFolder.write_json`."""
        return self._folder.write_json(name, value)

    def write_text(self, name: str, text: str) -> str:
        """Write a file into the incident's folder, and return its name; see `IncidentFolder.write_text`."""
        return self._folder.write_text(name, text)

    def make_room_beside(self, folder: Path, size: int) -> str:
        """Make room for what somebody else writes; see `IncidentFolder.make_room_beside`."""
        return self._folder.make_room_beside(folder, size)

    def why_no_longer(self, folder: Path) -> str:
        """Say why what somebody else writes to `folder` is to become no longer; empty where it may."""
        return "" if self.problem else self._folder.make_room_beside(folder, 0)

    def report(self, process: TrackedProcess) -> ProcessReport:
        """Return the report on a process, to which evidence may be added."""
        return self._report(process)

    def save(self, *, sync: bool = False) -> None:
        """Write the incident as it is now; see `IncidentFolder.save`."""
        document = self.incident.to_json()
        self._folder.save(document, format_summary(document), sync=sync)

    def _checkpoint(self) -> None:
        """Write what is known by now: whatever kills this process next, it is on disk."""
        self.incident.verdict = self._judge()
        try:
            self.save()
        except OSError as error:
            logger.warning("incident %s cannot be written for now: %s", self.path, error)

    def discard(self) -> None:
        """Remove what was written: the event was no incident after all."""
        self._folder.discard()

    def _judge(self) -> Verdict:
        verdict = judge(self.incident, self._failures)
        verdict.basis += self._afterwords
        verdict.text = " ".join([verdict.text, *self._afterwords])
        return verdict

    def _report(self, process: TrackedProcess) -> ProcessReport:
        report = self.incident.process(process.pid)
        if report is None:
            report = evidence.report_of(process)
            self.incident.processes.append(report)
        elif report.title != process.title:
            report.title, report.role, report.rank = process.title, process.role, process.rank
        return report
