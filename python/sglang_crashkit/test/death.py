"""What is known of a process that ended unexpectedly, and its form as text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from sglang_crashkit.incident.store import StoredIncident
from sglang_crashkit.incident.summary import headline, mapping_of


@dataclass(frozen=True)
class Survivor:
    """One process of the surviving side, as it was when the death was noticed.

    Attributes:
        name: what the watched process is called that it belongs to.
        pid: its process id.
        title: its title.
        doing: innermost frames of its main thread, innermost first; empty where there is no stack.
        reason: why there is no stack; empty otherwise.
    """

    name: str
    pid: int
    title: str
    doing: tuple[str, ...] = ()
    reason: str = ""


@dataclass
class Death:
    """An unexpected exit.

    Attributes:
        name: what the process is called.
        pid: its process id.
        returncode: its exit status, or minus the number of the signal that ended it, as subprocess tells it.
        noticed: when it was noticed, in seconds since the epoch.
        others: further watched processes that had ended unexpectedly by then, each as ``name (pid=…) exited rc=…``.
        folder: where the survivors' stacks are; None where nothing could be written.
        survivors: the processes of the surviving side.
        incident: the incident that the process's own crash handler wrote; None where there is none.
        seconds: from the notice to the end of the evidence.
    """

    name: str
    pid: int
    returncode: int
    noticed: float
    others: tuple[str, ...] = ()
    folder: Path | None = None
    survivors: list[Survivor] = field(default_factory=list)
    incident: StoredIncident | None = None
    seconds: float = 0.0

    @property
    def exit_status(self) -> int:
        """The status that a test run ends with for it: 128 + N for signal N, and never 0."""
        status = self.returncode if self.returncode >= 0 else 128 - self.returncode
        return status or 1

    @property
    def headline(self) -> str:
        """Who ended, and how; and who failed first in it, once its incident is known."""
        who = f"{self.name} (pid={self.pid}) exited rc={self.returncode}"
        document = (self.incident.document if self.incident is not None else None) or {}
        first = mapping_of(mapping_of(document.get("verdict")).get("first_failure"))
        return f"{who}; {headline(document)}" if first and first.get("pid") != self.pid else who

    @property
    def verdict(self) -> str:
        """What the incident says of it, and where the incident is; empty where there is none."""
        if self.incident is None:
            return ""
        verdict = (self.incident.document or {}).get("verdict") or {}
        return f"{verdict.get('text', 'no verdict')} ({self.incident.path})"

    def lines(self) -> Iterator[str]:
        """Yield what is known, for a person: the headline, the incident's verdict, what the survivors did."""
        yield self.headline
        yield from (f"also: {other}" for other in self.others)
        if self.incident is not None:
            yield f"incident: {self.verdict}"
        if self.folder is not None:
            yield f"stacks of the survivors: {self.folder}"
        for survivor in sorted(self.survivors, key=self._importance):
            what = " < ".join(survivor.doing) if survivor.doing else f"no stack: {survivor.reason}"
            yield f"meanwhile: {survivor.name}: {survivor.title} (pid {survivor.pid}): {what}"

    def _importance(self, survivor: Survivor) -> tuple[int, str]:
        # JUnit's reports keep the first lines only: one of each side comes first, a scheduler where there is one.
        side = [other for other in self.survivors if other.name == survivor.name]
        side.sort(key=lambda other: not other.title.startswith("sglang::scheduler"))
        return side.index(survivor), survivor.name
