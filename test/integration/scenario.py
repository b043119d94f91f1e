"""One real server that is broken while it works on requests, and what was left of it."""

from __future__ import annotations

import contextlib
import threading
import time
import urllib.error
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lanelib.servers import Server
from sglang_crashkit.core import procfs
from sglang_crashkit.core.incident_store import find_incidents

#: For ``params``: a plain run takes the newest release, ``scripts/test --matrix`` the older ones.
RELEASES = (
    pytest.param("0.5.9", marks=pytest.mark.matrix),
    pytest.param("0.5.12.post1", marks=pytest.mark.matrix),
    "0.5.23",
)
EXIT_TIMEOUT_S = 120.0
PROMPTS = ("Hello", "The quick brown fox", "1 2 3 4 5 6 7 8")


@dataclass(frozen=True)
class Wreck:
    """What was left of a server.

    Attributes:
        crash_folder: what the server was given as ``--crash-dump-folder``.
        incidents: every incident folder below it, with what its ``incident.json`` holds.
        pids: pid of each process that the server had before, by title.
        status: the main process's exit status, negative for a signal, as subprocess tells it.
        left: processes that were still there after the main process had gone and 5 s had passed.
        log: what the server printed.
        seconds_to_exit: from the fault to the main process's exit.
    """

    crash_folder: Path
    incidents: list[tuple[Path, dict[str, Any]]]
    pids: dict[str, int]
    status: int
    left: list[int]
    log: str
    seconds_to_exit: float

    @property
    def incident(self) -> dict[str, Any]:
        """The only incident."""
        assert len(self.incidents) == 1, f"{len(self.incidents)} incidents: {[str(p) for p, _ in self.incidents]}"
        return self.incidents[0][1]

    @property
    def folder(self) -> Path:
        """The folder of the only incident."""
        assert self.incident
        return self.incidents[0][0]

    def report(self, title: str) -> dict[str, Any]:
        """Return the incident's report on the process that had this title before the fault."""
        pid = self.pids[title]
        found = [process for process in self.incident["processes"] if process["pid"] == pid]
        assert len(found) == 1, f"{len(found)} reports on {title} (pid {pid})"
        return found[0]

    def evidence(self, title: str, kind: str) -> dict[str, Any]:
        """Return the only piece of evidence of this kind on that process."""
        found = [piece for piece in self.report(title)["evidence"] if piece["kind"] == kind]
        assert len(found) == 1, f"{len(found)} pieces of kind {kind} on {title}"
        return found[0]


def answers_of(server: Server) -> list[list[int]]:
    """Return the tokens of a few greedy answers."""
    return [server.generate(prompt, max_new_tokens=16, timeout_s=120)["output_ids"] for prompt in PROMPTS]


def wreck(
    server: Server,
    crash_folder: Path,
    fault: Callable[[Server], None],
    *,
    requests: int = 3,
    before_fault_s: float = 1.5,
) -> Wreck:
    """Break a ready server while `requests` long requests are under way, and gather what is left.

    Args:
        server: ready.
        crash_folder: where its incidents are expected.
        fault: what breaks it.
        requests: how many requests are in flight.
        before_fault_s: seconds from the requests to the fault.
    """
    pids = {title.split(" ")[0]: pid for pid, title in server.processes() if "::" in title}
    pids["sglang::crash_handler"] = handler_pid(server) if _handlers_of(server) else 0
    threads = [threading.Thread(target=_ask, args=(server,), daemon=True) for _ in range(requests)]
    for thread in threads:
        thread.start()
    time.sleep(before_fault_s)
    began = time.monotonic()
    fault(server)
    status = server.popen.wait(timeout=EXIT_TIMEOUT_S)
    seconds_to_exit = time.monotonic() - began
    left = _wait_gone([pid for pid in pids.values() if pid], 5.0)
    for thread in threads:
        thread.join(timeout=10)
    return Wreck(
        crash_folder=crash_folder,
        incidents=[(stored.path, stored.document or {}) for stored in _incidents(crash_folder)],
        pids=pids,
        status=status,
        left=left,
        log=server.log_path.read_text(errors="replace"),
        seconds_to_exit=seconds_to_exit,
    )


def handler_pid(server: Server) -> int:
    """Return the pid of the crash handler that watches `server`."""
    pids = _handlers_of(server)
    assert len(pids) == 1, f"{len(pids)} crash handlers of server {server.pid}"
    return pids[0]


def _handlers_of(server: Server) -> list[int]:
    """Return the crash handlers that hold a pidfd of `server`."""
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    return [pid for pid in pids if procfs.read_title(pid) == "sglang::crash_handler" and _watches(pid, server.pid)]


def _watches(handler: int, pid: int) -> bool:
    for path in Path(f"/proc/{handler}/fdinfo").iterdir():
        try:
            if f"Pid:\t{pid}\n" in path.read_text():
                return True
        except OSError:
            continue
    return False


def _incidents(crash_folder: Path) -> list[Any]:
    return find_incidents(crash_folder) if crash_folder.is_dir() else []


def _ask(server: Server) -> None:
    # That it is cut off is the point.
    with contextlib.suppress(urllib.error.URLError, OSError, ValueError):
        server.generate("Once upon a time", max_new_tokens=4000, timeout_s=EXIT_TIMEOUT_S)


def _wait_gone(pids: list[int], timeout_s: float) -> list[int]:
    deadline = time.monotonic() + timeout_s
    while True:
        left = [pid for pid in pids if (stat := procfs.read_stat(pid)) is not None and stat.state != "Z"]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.05)
