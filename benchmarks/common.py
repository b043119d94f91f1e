"""Code that the benchmarks share: paths of the kit and its tests, real servers, their incidents and their costs.

Import it first: it runs the benchmark again in the tools environment, which has what the kit and its tests import.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / name) for name in ("scripts", "python", "test")]

from lanelib.tools import run_in_tools

run_in_tools()

from lanelib.lanes import Lane
from lanelib.procs import title_of, watchers_of
from lanelib.servers import Server, greedy
from sglang_crashkit.incident.store import find_incidents
from sglang_crashkit.model.lenient import seconds_of

_Value = TypeVar("_Value")
#: The second of two tensor-parallel ranks.
VICTIM = "sglang::scheduler_TP1"
HANDLER = "sglang::crash_handler"
#: Seconds within which a crash handler ends after its server.
CLEAN_S = 60.0


def incidents(folder: Path) -> list[dict[str, Any]]:
    """Return the finished incidents below a crash folder, the newest first."""
    found = find_incidents(folder) if folder.is_dir() else []
    return [one.document for one in found if one.finished and one.document]


def time_of(incident: dict[str, Any], event: str) -> float | None:
    """Return the time of an event of an incident, in seconds since the epoch; None if absent."""
    times = [entry["time"] for entry in incident["timeline"] if entry["event"] == event]
    return seconds_of(times[0]) if times else None


def first_failure(incident: dict[str, Any]) -> dict[str, Any]:
    """Return the first failure of an incident; empty if its verdict names no process, or `incident` is empty."""
    return (incident.get("verdict") or {}).get("first_failure") or {}


def wait_for(condition: Callable[[], _Value], secs: float) -> _Value:
    """Return the value of `condition` once it is true, or after `secs` seconds."""
    end = time.monotonic() + secs
    while not (found := condition()) and time.monotonic() < end:
        time.sleep(0.05)
    return found


def ask_later(server: Server, tokens: int, timeout_s: float) -> threading.Thread:
    """Send a request that may never be answered."""
    return server.ask_later("generate", greedy("Hello", tokens), timeout_s)


@contextlib.contextmanager
def serving(lane: Lane, *options: str, **how: Any) -> Iterator[tuple[Server, Path]]:
    """Yield a running server and its crash folder, until the end of the block; see `Server.start`."""
    with scratch() as crash:
        arguments = ["--crash-dump-folder", str(crash), *options]
        with Server.start(lane, extra_args=arguments, **how) as server:
            yield server, crash


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """Yield an empty folder, and remove it at the end of the block."""
    folder = Path(tempfile.mkdtemp(prefix="crashkit-benchmark-"))

    def is_gone() -> bool:
        shutil.rmtree(folder, ignore_errors=True)
        return not folder.exists()

    try:
        yield folder
    finally:
        # A crash handler outlives its server, and may still write into the folder.
        wait_for(is_gone, CLEAN_S)


def status_of(missed: Sequence[str]) -> int:
    """Return the exit status of a benchmark, and print the missed goals on standard error."""
    if missed:
        print("; ".join(missed), file=sys.stderr)
    return int(bool(missed))


def handlers_of(server: Server) -> list[int]:
    """Return the pids of a server's crash handlers; empty for an unpatched server."""
    found = watchers_of(pid for pid, _title in server.processes())
    return [one.pid for one in found if title_of(one.pid) == HANDLER]


def cpu_s(pids: Iterable[int]) -> float:
    """Return the CPU seconds of processes and of the children that they reaped; a process that is gone counts 0."""
    ticks = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def memory_mib(pid: int, name: str, file: str = "smaps_rollup") -> float:
    """Return a memory figure of a process, such as ``Pss``, in MiB; 0 if the process is gone."""
    try:
        found = re.search(rf"^{name}:\s+(\d+) kB", Path(f"/proc/{pid}/{file}").read_text(), re.M)
    except OSError:
        return 0.0
    return int(found[1]) / 1024 if found else 0.0
