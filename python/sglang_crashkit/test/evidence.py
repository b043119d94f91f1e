"""What is known of a process that ended unexpectedly; its survivors' stacks are taken, then they are killed."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

from sglang_crashkit import protocol, settings
from sglang_crashkit.capture.pyspy import sample_all
from sglang_crashkit.errors import CrashkitError
from sglang_crashkit.incident.store import StoredIncident
from sglang_crashkit.kernel import procfs, titles
from sglang_crashkit.kernel.pidfd import ProcessHandle
from sglang_crashkit.kernel.private_files import make_private_folder, write_private
from sglang_crashkit.model.sample import format_threads, main_thread
from sglang_crashkit.view.model import headline

_FRAMES = 3


@dataclass(frozen=True)
class Survivor:
    """One process of the surviving side, as it was when the death was noticed."""

    name: str  # what the watched process is called that it belongs to
    pid: int  # its process id
    title: str  # its title
    doing: tuple[str, ...] = ()  # innermost frames of its main thread, innermost first; empty where there is no stack
    reason: str = ""  # why there is no stack; empty otherwise


@dataclass
class Death:
    """An unexpected exit."""

    name: str  # what the process is called
    pid: int  # its process id
    returncode: int  # its exit status, or minus the number of the signal that ended it, as subprocess tells it
    noticed: float  # when it was noticed, in seconds since the epoch
    #: Further watched processes that had ended unexpectedly by then, each as ``name (pid=…) exited rc=…``.
    others: tuple[str, ...] = ()
    folder: Path | None = None  # where the survivors' stacks are; None where nothing could be written
    survivors: list[Survivor] = field(default_factory=list)  # the processes of the surviving side
    #: The incident that the process's own crash handler wrote; None if absent.
    incident: StoredIncident | None = None
    seconds: float = 0.0  # from the notice to the end of the evidence

    @property
    def exit_status(self) -> int:
        """The status that a test run ends with for it: 128 + N for signal N, and never 0."""
        status = self.returncode if self.returncode >= 0 else 128 - self.returncode
        return status or 1

    @property
    def headline(self) -> str:
        """Who ended, and how; and who failed first in it, once its incident is known."""
        who = f"{self.name} (pid={self.pid}) exited rc={self.returncode}"
        if self.incident is None or (verdict := self.incident.incident.verdict) is None:
            return who
        first = verdict.first_failure
        return f"{who}; {headline(self.incident.incident)}" if first and first.pid != self.pid else who

    @property
    def verdict(self) -> str:
        """What the incident says of it, and where the incident is; empty if absent."""
        if self.incident is None:
            return ""
        verdict = self.incident.incident.verdict
        return f"{verdict.text if verdict is not None else 'no verdict'} ({self.incident.path})"

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


def default_folder() -> Path:
    """Return the folder that the evidence of deaths goes to where none is named."""
    return settings.fallback_folder() / socket.gethostname() / "deaths"


def capture(death: Death, survivors: Iterable[tuple[str, int]], folder: Path, deadline_secs: float) -> None:
    """Take the stacks of every Python process of the surviving side at once, without stopping one.

    Of each watched process that lives there is the name and the pid. What came of it is kept in `death`, and in a
    folder of this death, with mode 0700, in `folder`.
    """
    owners = {pid: name for name, root in survivors for pid in sorted(procfs.TreeScanner(root).scan())}
    roles = {pid: procfs.read_title(pid) for pid in owners if procfs.is_python(pid)}
    moment = datetime.fromtimestamp(death.noticed, timezone.utc).strftime("%Y%m%dT%H%M%S")
    own = folder / f"{moment}-{titles.label_of(death.name, death.pid)}-{os.urandom(4).hex()}"
    for result in sample_all(roles, deadline_secs):
        name, title = owners[result.pid], roles[result.pid]
        doing: tuple[str, ...] = ()
        if result.threads:
            thread = main_thread(result.threads, result.pid)
            doing = tuple(str(frame) for frame in (thread.frames if thread else ())[:_FRAMES])
            file = f"{name}-{titles.label_of(title, result.pid)}.txt".replace("/", "_")
            text = "\n".join(format_threads(title, result.pid, result.threads)) + "\n"
            with contextlib.suppress(OSError, CrashkitError):
                death.folder = make_private_folder(own)
                write_private(death.folder / file, text.encode(errors="replace"))
        if titles.role_of(title) != "helper" or "multiprocessing" not in title:
            # multiprocessing's own helpers only wait.
            death.survivors.append(Survivor(name, result.pid, title, doing, result.problem))


def kill_trees(roots: Sequence[int], timeout_secs: float) -> list[int]:
    """Kill processes with their descendants; return the pids of those that are not gone within `timeout_secs`.

    Their crash handlers are told first, so that what follows is no incident.
    """
    deadline = time.monotonic() + timeout_secs
    for root in roots:
        path = settings.socket_of(root)
        if path is not None and path.exists():
            with contextlib.suppress(protocol.HandlerUnreachableError):
                protocol.notify(str(path), "teardown", pid=root)
    handles: dict[int, ProcessHandle] = {}
    try:
        # Once more after the first round: one may have been about to fork.
        for _ in range(2):
            for pid in [pid for root in roots for pid in procfs.TreeScanner(root).scan() if pid not in handles]:
                with contextlib.suppress(OSError):
                    handles[pid] = ProcessHandle(pid)
            for handle in handles.values():
                with contextlib.suppress(OSError):
                    handle.send_signal(signal.SIGKILL)
        return [pid for pid, handle in handles.items() if not handle.has_exited(max(0.0, deadline - time.monotonic()))]
    finally:
        for handle in handles.values():
            handle.close()
