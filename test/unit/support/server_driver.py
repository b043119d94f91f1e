"""Drive a `fake_server` and find the crash handler that it started."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sglang_crashkit.incident.store import StoredIncident, find_incidents
from sglang_crashkit.kernel import procfs
from sglang_crashkit.kernel.pidfd import ProcessHandle
from sglang_crashkit.kernel.procfs import server_key
from unit.support.waiting import LONG, wait_until, watched_pids

HOST = "test-host"
#: A busy machine takes longer for stacks, and for an incident, than a server may be kept waiting for them.
PATIENCE = {"SGLANG_CRASHKIT_BUDGET_SECS": "60", "SGLANG_CRASHKIT_CAPTURE_SECS": "10"}
SCRIPT = Path(__file__).with_name("fake_server.py")


class Server:
    """A stand-in server with its crash handler; see `fake_server`."""

    def __init__(
        self,
        folder: Path,
        *,
        crash_folder: Path | None,
        environ: Mapping[str, str] = {},
        python: str = sys.executable,
        umask: int = -1,
        with_handler: bool = True,
        **options: Any,
    ) -> None:
        self.temp = folder
        self.crash_folder = crash_folder
        defaults = {"answers_sigquit": True, "catches_sigquit": True, "tears_down_on_sigterm": True}
        options = defaults | options | {"crash_folder": str(crash_folder) if crash_folder else None}
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("SGLANG_")}
        self.process = subprocess.Popen(
            [python, str(SCRIPT), json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            umask=umask,
            env=inherited | PATIENCE | {"TMPDIR": str(folder), "HOSTNAME": HOST} | dict(environ),
        )
        self.pid = self.process.pid
        self._handles = [ProcessHandle(self.pid)]
        self.handler: ProcessHandle | None = None
        self._text = b""
        try:
            ready = self.line().split()
            assert ready[0] == "ready", ready
            self.ranks = {name: int(pid) for name, pid in (pair.split("=") for pair in ready[1:])}
            self._handles += [ProcessHandle(pid) for pid in self.ranks.values()]
            if with_handler:
                self.handler = ProcessHandle(wait_until(self._find_handler, "the handler watches the ranks"))
                self.settle()
        except BaseException:
            self.close()
            raise

    def line(self) -> str:
        """Return the next line that the server says."""
        deadline = time.monotonic() + LONG
        while b"\n" not in self._text:
            ready = select.select([self.process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]
            assert ready, "the server says nothing"
            chunk = os.read(self.process.stdout.fileno(), 4096)
            assert chunk, "the server is gone"
            self._text += chunk
        first, _, self._text = self._text.partition(b"\n")
        return first.decode()

    def say(self, command: str) -> None:
        """Give the server a command that it does not answer."""
        self.process.stdin.write(command.encode() + b"\n")

    def ask(self, command: str) -> str:
        """Give the server a command and return its answer."""
        self.say(command)
        return self.line()

    def settle(self) -> None:
        """Wait until the handler has read the titles of all processes that are there now.

        A helper is seen and let go of: between the two the handler has finished a whole scan.
        """
        helper = int(self.ask("helper"))
        wait_until(lambda: helper in self.watched(), "the handler sees a new process")
        os.kill(helper, signal.SIGKILL)
        wait_until(lambda: not {helper, -1} & self.watched(), "the handler lets go of a dead helper")

    def watched(self) -> set[int]:
        """Return the pids that the handler holds on to; -1 stands for one that is dead and reaped."""
        return watched_pids(self.handler.pid)

    def kill(self, name: str, signum: int = signal.SIGKILL) -> None:
        """Send a signal to a rank."""
        os.kill(self.ranks[name], signum)

    def strike(self, name: str, fault: str) -> None:
        """Have a rank fail by a signal of that name, or as a command says."""
        if fault.startswith("SIG"):
            self.kill(name, signal.Signals[fault])
        else:
            self.say(f"tell {name} {fault}")

    def incidents(self, folder: Path | None = None) -> list[StoredIncident]:
        """Return the incidents on disk."""
        folder = folder or self.crash_folder or self.fallback
        return find_incidents(folder) if folder.is_dir() else []

    def incident(self, folder: Path | None = None) -> StoredIncident:
        """Wait for the one incident and return it."""

        def finished() -> list[StoredIncident]:
            return [found for found in self.incidents(folder) if found.finished and found.document]

        wait_until(finished, "an incident is finished")
        incidents = self.incidents(folder)
        assert len(incidents) == 1, incidents
        return incidents[0]

    def wait_for_the_end(self) -> StoredIncident | None:
        """Wait until server and handler are gone; return the incident that they left, None if absent."""
        self.process.wait(LONG)
        self.wait_for_handler()
        incidents = self.incidents()
        assert len(incidents) <= 1, incidents
        return incidents[0] if incidents else None

    def tear_down(self, timeout_secs: float = LONG) -> None:
        """Have it end in good order, and its handler with it."""
        try:
            self.say("teardown")
            self.process.wait(timeout_secs)
            self.wait_for_handler()
        finally:
            self.close()

    def wait_for_handler(self) -> None:
        """Wait until the handler has left."""
        wait_until(self.handler.has_exited, "the handler leaves")

    @property
    def fallback(self) -> Path:
        """The folder for incidents where the crash folder cannot be used."""
        return self.temp / f"sglang-crashkit-{os.getuid()}"

    @property
    def runtime(self) -> Path:
        """The folder of the handler's socket."""
        return self.fallback / "run" / server_key(self.pid, self._handles[0].start_ticks)

    @property
    def spool(self) -> Path:
        """The folder of the ranks' records."""
        assert self.crash_folder is not None
        return self.crash_folder / HOST / "incidents" / f".spool-{server_key(self.pid, self._handles[0].start_ticks)}"

    def close(self) -> None:
        """End whatever is left of it."""
        for handle in self._handles:
            with contextlib.suppress(ProcessLookupError):
                handle.send_signal(signal.SIGKILL)
        self.process.wait(LONG)
        try:
            if self.handler is not None:
                self.wait_for_handler()
        finally:
            for handle in [*self._handles, *([self.handler] if self.handler else [])]:
                with contextlib.suppress(ProcessLookupError):
                    if handle is self.handler:
                        handle.send_signal(signal.SIGKILL)
                handle.close()
            for pipe in (self.process.stdin, self.process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()

    def _find_handler(self) -> int | None:
        wanted = {self.pid, *self.ranks.values()}
        for entry in Path("/proc").iterdir():
            pid = int(entry.name) if entry.name.isdigit() else None
            if pid and procfs.read_title(pid) == "sglang::crash_handler" and wanted <= watched_pids(pid):
                return pid
        return None


#: What the fixture `start_server` gives.
Start = Callable[..., Server]


def document_of(server: Server) -> dict[str, Any]:
    """Wait for the server's end, and return its one incident's document and ``folder``."""
    stored = server.wait_for_the_end()
    assert stored is not None, "there is no incident"
    return stored.document | {"folder": stored.path}


def crash(server: Server, signum: int = signal.SIGKILL, status: int | None = None) -> dict[str, Any]:
    """Kill the second rank, and return the same once the server has ended, with a status that is known."""
    server.kill("scheduler_TP1", signum)
    assert status in (None, server.process.wait(2 * LONG))
    return document_of(server)


def finished(server: Server) -> list[dict[str, Any]]:
    """Return the documents of the finished incidents, oldest first."""
    return [found.document for found in reversed(server.incidents()) if found.finished and found.document]


def report_of(document: dict[str, Any], title: str) -> dict[str, Any]:
    """Return what an incident says of a process of SGLang."""
    (found,) = [process for process in document["processes"] if process["title"] == f"sglang::{title}"]
    return found


def piece_of(report: dict[str, Any], kind: str) -> dict[str, Any]:
    """Return the one piece of evidence of a kind in what an incident says of a process."""
    (found,) = [piece for piece in report["evidence"] if piece["kind"] == kind]
    return found


def piece_if_any(document: dict[str, Any], title: str, kind: str) -> dict[str, Any]:
    """Return the piece of evidence of a kind that an incident has of a process of SGLang; empty where it has none."""
    found = [piece for piece in report_of(document, title)["evidence"] if piece["kind"] == kind]
    assert len(found) <= 1
    return found[0] if found else {}


def events_of(document: dict[str, Any]) -> list[str]:
    return [entry["event"] for entry in document["timeline"]]
