"""What the benchmarks share: where the kit and its tests are, and what real servers do and leave.

To be imported first: it goes on in the environment of the tools, which has what the kit and its tests need.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / name) for name in ("scripts", "python", "test")]

from lanelib.tools import run_in_tools, tool

run_in_tools()

from lanelib.commands import LaneError
from lanelib.procs import title_of, watchers_of
from lanelib.servers import Server
from sglang_crashkit.incident.store import find_incidents
from sglang_crashkit.model.checked_json import seconds_of

_Value = TypeVar("_Value")
#: The second of two tensor-parallel ranks.
VICTIM = "sglang::scheduler_TP1"
HANDLER = "sglang::crash_handler"


def incidents(folder: Path) -> list[dict[str, Any]]:
    """Return the whole incidents below a crash folder, the newest first."""
    found = find_incidents(folder) if folder.is_dir() else []
    return [one.document for one in found if one.finished and one.document]


def time_of(incident: dict[str, Any], event: str) -> float | None:
    """Return when an event of an incident was, in seconds since the epoch; None where there was none."""
    times = [entry["time"] for entry in incident["timeline"] if entry["event"] == event]
    return seconds_of(times[0]) if times else None


def first_failure(incident: dict[str, Any]) -> dict[str, Any]:
    """Return who failed first, by an incident; nobody where it names nobody, or there is none."""
    return (incident.get("verdict") or {}).get("first_failure") or {}


def wait_for(condition: Callable[[], _Value], secs: float) -> _Value:
    """Return what `condition` answers once that is true, or at the end of so many seconds."""
    end = time.monotonic() + secs
    while not (found := condition()) and time.monotonic() < end:
        time.sleep(0.05)
    return found


def ask_later(server: Server, tokens: int, timeout_s: float) -> threading.Thread:
    """Send a request that may never be answered."""

    def ask() -> None:
        with contextlib.suppress(OSError, ValueError, http.client.HTTPException):
            server.generate("Hello", max_new_tokens=tokens, timeout_s=timeout_s)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    return thread


@contextlib.contextmanager
def watching(server: Server, folder: Path, hang_secs: float, *options: str) -> Iterator[Path]:
    """Have ``sglang-crashkit watch`` beside a server to the end of the block, from when it sees the server serve.

    Gives the file with what it says; see `told_by`.
    """
    said = folder / "watch"
    command = [str(tool("sglang-crashkit")), "watch", "--json", "--once", "--pid", str(server.pid), *options]
    command += ["--hang-secs", f"{hang_secs:g}", "--output-dir", str(said.with_suffix(".stacks"))]
    with said.open("wb") as out, subprocess.Popen(command, stdout=out, stderr=subprocess.DEVNULL) as popen:
        try:
            if not wait_for(lambda: told_by(said, "serving"), 60.0):
                raise LaneError(f"watch does not see that {server.name} serves")
            yield said
        finally:
            popen.kill()


def told_by(said: Path, kind: str) -> list[dict[str, Any]]:
    """Return the events of that kind that ``watch`` told of so far."""
    whole, _newline, _rest = said.read_text().rpartition("\n")
    return [event for line in whole.splitlines() if (event := json.loads(line))["event"] == kind]


def handlers_of(server: Server) -> list[int]:
    """Return the pids of a server's crash handler; none of one as published."""
    found = watchers_of(pid for pid, _title in server.processes())
    return [one.pid for one in found if title_of(one.pid) == HANDLER]


def cpu_s(pids: Iterable[int]) -> float:
    """Return the CPU time of processes and of the children that they reaped so far, in seconds; one gone has none."""
    ticks = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def memory_mib(pid: int, name: str, file: str = "smaps_rollup") -> float:
    """Return a figure of the memory of a process, such as ``Pss``; 0 where it is gone."""
    try:
        found = re.search(rf"^{name}:\s+(\d+) kB", Path(f"/proc/{pid}/{file}").read_text(), re.M)
    except OSError:
        return 0.0
    return int(found[1]) / 1024 if found else 0.0
