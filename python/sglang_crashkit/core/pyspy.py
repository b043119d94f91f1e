"""Photograph Python processes with py-spy: all at once, without stopping them, each within a deadline.

``--nonblocking`` reads the target's memory without pausing it: it works on a stopped process and never waits for a
thread in uninterruptible sleep. A snapshot of a running process may be inconsistent; py-spy then says so, and it is
taken again.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from sglang_crashkit.core.stacks import Thread, parse_pyspy

_ATTEMPTS = 3
#: Killed and not gone yet. Dropped unreaped, each would be a ResourceWarning in whatever the process does next.
_dying: list[subprocess.Popen[bytes]] = []


@dataclass(frozen=True)
class Photograph:
    """What came of photographing one process.

    Attributes:
        pid: the process.
        threads: its threads, None when there is no snapshot.
        reason: why there is none; empty otherwise.
        seconds: from the start of the round to this result.
    """

    pid: int
    threads: tuple[Thread, ...] | None
    reason: str
    seconds: float


@dataclass
class _Run:
    pid: int
    process: subprocess.Popen[bytes]
    attempts: int
    output: dict[str, bytearray] = field(default_factory=lambda: {"out": bytearray(), "err": bytearray()})
    open_pipes: int = 2


def find_pyspy() -> str | None:
    """Return py-spy's executable: that of this interpreter's environment, else the first on PATH, else None."""
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if beside.exists() else shutil.which("py-spy")


def photograph_all(pids: Iterable[int], deadline_secs: float, executable: str | None = None) -> list[Photograph]:
    """Photograph all of `pids` side by side.

    Args:
        pids: the processes.
        deadline_secs: the longest that the whole round may take, in seconds; py-spy is killed at its end.
        executable: py-spy to use; found by `find_pyspy` when None.

    Returns:
        A result for each pid, in the order given.
    """
    _dying[:] = [process for process in _dying if process.poll() is None]
    executable = executable or find_pyspy()
    wanted = list(dict.fromkeys(pids))
    if executable is None:
        return [Photograph(pid, None, "py-spy is not installed; next: pip install py-spy", 0.0) for pid in wanted]
    results = _Round(executable, deadline_secs).take(wanted)
    return [results[pid] for pid in wanted]


class _Round:
    """One round of photographs; reads all pipes with one selector."""

    def __init__(self, executable: str, deadline_secs: float) -> None:
        self._executable = executable
        self._started = time.monotonic()
        self._deadline_secs = deadline_secs
        self._selector = selectors.DefaultSelector()
        self._results: dict[int, Photograph] = {}
        self._running: set[int] = set()

    def take(self, pids: list[int]) -> dict[int, Photograph]:
        for pid in pids:
            self._start(pid, attempts=1)
        try:
            while self._running:
                remaining = self._started + self._deadline_secs - time.monotonic()
                if remaining <= 0:
                    break
                for key, _events in self._selector.select(remaining):
                    self._read(key)
        finally:
            self._stop_the_rest()
        return self._results

    def _start(self, pid: int, attempts: int) -> None:
        command = [self._executable, "dump", "--nonblocking", "--json", "--pid", str(pid)]
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
            )
        except OSError as error:
            self._finish(pid, None, f"{self._executable}: {error.strerror}")
            return
        run = _Run(pid, process, attempts)
        self._running.add(pid)
        for name, pipe in (("out", process.stdout), ("err", process.stderr)):
            assert pipe is not None
            self._selector.register(pipe, selectors.EVENT_READ, (run, name))

    def _read(self, key: selectors.SelectorKey) -> None:
        run, name = key.data
        chunk = os.read(key.fd, 1 << 16)
        if chunk:
            run.output[name] += chunk
            return
        self._selector.unregister(key.fileobj)
        key.fileobj.close()  # type: ignore[union-attr]
        run.open_pipes -= 1
        if run.open_pipes == 0:
            self._running.discard(run.pid)
            self._collect(run)

    def _collect(self, run: _Run) -> None:
        try:
            status = run.process.wait(timeout=max(0.05, self._started + self._deadline_secs - time.monotonic()))
        except subprocess.TimeoutExpired:
            _kill(run.process)
            self._finish(run.pid, None, f"py-spy did not end within {self._deadline_secs:g} s")
            return
        reason = _last_line(bytes(run.output["err"])) or f"py-spy ended with status {status}"
        if status == 0:
            try:
                threads = parse_pyspy(run.output["out"].decode(errors="replace"))
            except ValueError as error:
                reason = str(error)
            else:
                if any(thread.frames for thread in threads):
                    self._finish(run.pid, threads, "")
                    return
                reason = "py-spy saw no Python frame"
        if run.attempts < _ATTEMPTS:
            self._start(run.pid, run.attempts + 1)
        else:
            self._finish(run.pid, None, reason)

    def _finish(self, pid: int, threads: tuple[Thread, ...] | None, reason: str) -> None:
        self._results[pid] = Photograph(pid, threads, reason, round(time.monotonic() - self._started, 4))

    def _stop_the_rest(self) -> None:
        left = list(self._selector.get_map().values())
        for key in left:
            key.data[0].process.kill()
        for key in left:
            run, _name = key.data
            _kill(run.process)
            with contextlib.suppress(OSError):
                key.fileobj.close()  # type: ignore[union-attr]
            if run.pid not in self._results:
                self._finish(run.pid, None, f"py-spy did not end within {self._deadline_secs:g} s")
        self._selector.close()


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    try:
        process.wait(timeout=0.2)
    except subprocess.TimeoutExpired:
        # A tracer in uninterruptible sleep cannot die yet; it is not waited for.
        _dying.append(process)


def _last_line(data: bytes) -> str:
    lines = [line.strip() for line in data.decode(errors="replace").splitlines() if line.strip()]
    return lines[0].removeprefix("Error: ")[:300] if lines else ""
