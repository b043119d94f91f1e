"""Take the stacks of Python processes with py-spy: all at once, each within a deadline.

``--nonblocking`` reads the target's memory without pausing it: it works on a stopped process and never waits for a
thread in uninterruptible sleep. A snapshot of a running process may be inconsistent; py-spy then says so, and it is
taken again. ``--native`` stops the target, so it is for those that `native_stacks` let pass.

What is run in py-spy's place may do anything: hang, print for ever, leave children behind.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from sglang_crashkit.model.sample import Sample, Thread, parse_pyspy

EXECUTABLE_VARIABLE = "SGLANG_CRASHKIT_PYSPY"

Mode = Literal["--nonblocking", "--native"]

#: How often it is tried: a snapshot without a pause may be torn, one with a pause is not.
_ATTEMPTS: dict[Mode, int] = {"--nonblocking": 6, "--native": 1}
#: Two hundred threads a hundred frames deep take 6 MB.
_MOST_BYTES = 16 << 20
#: The killed ones are waited for this long, all together, in seconds.
_REAP_SECS = 0.2
#: Killed and not gone yet. Dropped unreaped, each would be a ResourceWarning in whatever the process does next.
_dying: list[subprocess.Popen[bytes]] = []


@dataclass
class _Run:
    pid: int
    process: subprocess.Popen[bytes]
    attempts: int
    output: dict[str, bytearray] = field(default_factory=lambda: {"out": bytearray(), "err": bytearray()})
    open_pipes: int = 2


def find_pyspy() -> str | None:
    """Return py-spy's executable, None where there is none.

    That of ``SGLANG_CRASHKIT_PYSPY`` where it is set, else of this interpreter's environment, else the first on PATH.
    """
    named = os.environ.get(EXECUTABLE_VARIABLE)
    if named:
        return named
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if beside.exists() else shutil.which("py-spy")


def sample_all(
    pids: Iterable[int],
    deadline_secs: float,
    executable: str | None = None,
    mode: Mode = "--nonblocking",
    on_start: Callable[[int, int], None] | None = None,
) -> list[Sample]:
    """Take the stacks of all of `pids` side by side.

    Args:
        pids: the processes.
        deadline_secs: the longest that the whole round may take, in seconds; py-spy is killed at its end.
        executable: py-spy to use; found by `find_pyspy` when None.
        mode: what py-spy is asked for.
        on_start: called with a process and the pid of its py-spy, which is its process group's as well.

    Returns:
        A result for each pid, in the order given.
    """
    _dying[:] = [process for process in _dying if process.poll() is None]
    executable = executable or find_pyspy()
    wanted = list(dict.fromkeys(pids))
    if executable is None:
        return [Sample(pid=pid, problem="py-spy is not installed; next: pip install py-spy") for pid in wanted]
    results = _Round(executable, deadline_secs, mode, on_start).take(wanted)
    return [results[pid] for pid in wanted]


class _Round:
    """One round; reads all pipes with one selector."""

    def __init__(
        self, executable: str, deadline_secs: float, mode: Mode, on_start: Callable[[int, int], None] | None
    ) -> None:
        self._executable = executable
        self._mode = mode
        self._on_start = on_start
        self._started = time.monotonic()
        self._deadline_secs = deadline_secs
        self._selector = selectors.DefaultSelector()
        self._results: dict[int, Sample] = {}
        self._running: dict[int, _Run] = {}
        self._killed: list[subprocess.Popen[bytes]] = []

    def take(self, pids: list[int]) -> dict[int, Sample]:
        try:
            for pid in pids:
                self._start(pid, attempts=1)
            while self._running:
                remaining = self._remaining()
                if remaining <= 0:
                    break
                for key, _events in self._selector.select(remaining):
                    self._read(key)
        finally:
            self._stop_the_rest()
        return self._results

    def _remaining(self) -> float:
        return self._started + self._deadline_secs - time.monotonic()

    def _start(self, pid: int, attempts: int) -> None:
        command = [self._executable, "dump", self._mode, "--json", "--pid", str(pid)]
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                # What it starts is killed with it.
                start_new_session=True,
            )
        except OSError as error:
            self._finish(pid, (), f"{self._executable}: {error.strerror}")
            return
        run = _Run(pid, process, attempts)
        self._running[pid] = run
        for name, pipe in (("out", process.stdout), ("err", process.stderr)):
            assert pipe is not None
            self._selector.register(pipe, selectors.EVENT_READ, (run, name))
        if self._on_start is not None:
            self._on_start(pid, process.pid)

    def _read(self, key: selectors.SelectorKey) -> None:
        run, name = key.data
        if run.pid not in self._running:
            # Given up between two pipes of one turn.
            return
        chunk = os.read(key.fd, 1 << 16)
        if chunk:
            run.output[name] += chunk
            if sum(len(output) for output in run.output.values()) > _MOST_BYTES:
                self._give_up(run, f"py-spy printed more than {_MOST_BYTES >> 20} MiB")
            return
        self._close(key)
        run.open_pipes -= 1
        if run.open_pipes == 0:
            self._collect(run)

    def _collect(self, run: _Run) -> None:
        try:
            status = run.process.wait(timeout=max(0.05, self._remaining()))
        except subprocess.TimeoutExpired:
            self._give_up(run, self._too_late())
            return
        del self._running[run.pid]
        reason = _first_line(bytes(run.output["err"])) or f"py-spy ended with status {status}"
        if status == 0:
            try:
                threads = parse_pyspy(run.output["out"].decode(errors="replace"))
            except ValueError as error:
                reason = f"py-spy's output: {error}"
            else:
                if any(thread.frames for thread in threads):
                    self._finish(run.pid, threads, "")
                    return
                reason = "py-spy saw no Python frame"
        if run.attempts < _ATTEMPTS[self._mode]:
            self._start(run.pid, run.attempts + 1)
        else:
            self._finish(run.pid, (), reason)

    def _finish(self, pid: int, threads: tuple[Thread, ...], problem: str) -> None:
        seconds = round(time.monotonic() - self._started, 4)
        self._results[pid] = Sample(pid=pid, threads=threads, problem=problem, seconds=seconds)

    def _give_up(self, run: _Run, reason: str) -> None:
        del self._running[run.pid]
        for key in list(self._selector.get_map().values()):
            if key.data[0] is run:
                self._close(key)
        _kill_group(run.process)
        self._killed.append(run.process)
        self._finish(run.pid, (), reason)

    def _close(self, key: selectors.SelectorKey) -> None:
        self._selector.unregister(key.fileobj)
        with contextlib.suppress(OSError):
            key.fileobj.close()  # type: ignore[union-attr]

    def _stop_the_rest(self) -> None:
        for run in list(self._running.values()):
            self._give_up(run, self._too_late())
        self._selector.close()
        deadline = time.monotonic() + _REAP_SECS
        for process in self._killed:
            try:
                process.wait(timeout=max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                # A tracer in uninterruptible sleep cannot die yet; it is not waited for.
                _dying.append(process)

    def _too_late(self) -> str:
        return f"py-spy did not end within {self._deadline_secs:g} s"


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    # Not reaped yet, so its pid, which is its group's too, is no other's.
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()


def _first_line(data: bytes) -> str:
    lines = [line.strip() for line in data.decode(errors="replace").splitlines() if line.strip()]
    return lines[0].removeprefix("Error: ")[:300] if lines else ""
