"""Run a tool until it ends, its deadline passes or it is cancelled, whichever comes first.

A tool may hang, print without end, or leave children behind. Its output up to then is kept: for a debugger that did not
finish, these are the first listings.
"""

from __future__ import annotations

import contextlib
import os
import resource
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

#: Seconds between checks of a tool that prints nothing.
_POLL_SECS = 0.1
#: Seconds to wait for the end of a killed tool: a tracer in uninterruptible sleep cannot end yet.
_REAP_SECS = 0.2
#: The most bytes of output. A thousand threads fifty frames deep take 10 MB.
MAX_OUTPUT = 32 << 20


@dataclass(frozen=True)
class ToolRun:
    """The result of running a tool."""

    text: str  # its standard output; and its standard error, if that is not in `errors`
    reason: str  # why the output is incomplete or missing; empty if the tool ended with status 0
    seconds: float  # how long it took
    errors: str = ""  # its standard error, if that was kept `apart`
    #: Its exit status, as in `subprocess.Popen.returncode`; None if it did not end by itself.
    status: int | None = None


def run_tool(
    argv: Sequence[str],
    deadline_secs: float,
    stop: threading.Event | None = None,
    on_start: Callable[[int], None] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    since: float | None = None,
    apart: bool = False,
    max_output: int = MAX_OUTPUT,
    stdin: int = subprocess.DEVNULL,
) -> ToolRun:
    """Run `argv`; kill its process group `deadline_secs` after `since` (default: now), by the monotonic clock.

    It is also killed when `stop` is set, and after `max_output` bytes of output. `on_start` is called with its pid,
    which is also its process group. With `apart`, standard error is kept separately; else it is part of the output.
    """
    started = time.monotonic()
    name = os.path.basename(argv[0])  # noqa: PTH119 - a name, not a path
    try:
        process = subprocess.Popen(
            list(argv),
            env=environ,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if apart else subprocess.STDOUT,
            bufsize=0,
            # In a session of its own, its children are killed with it, and Ctrl-C reaches none of them.
            start_new_session=True,
        )
    except OSError as error:
        return ToolRun("", f"{argv[0]}: {error.strerror}", 0.0)
    output = {process.stdout: bytearray(), process.stderr: bytearray()}
    status = None
    try:
        # The tool counts toward the server's memory limit, so the kernel is to kill it first if memory runs out. If it
        # crashes, it is to leave no core. Without permission for these settings, it runs without them.
        with contextlib.suppress(OSError, ValueError):
            Path(f"/proc/{process.pid}/oom_score_adj").write_text("1000")
        with contextlib.suppress(OSError, ValueError):
            resource.prlimit(process.pid, resource.RLIMIT_CORE, (0, 0))
        if on_start is not None:
            on_start(process.pid)
        deadline = (started if since is None else since) + deadline_secs
        try:
            reason = _read(process, output, deadline, stop, max_output)
        except OSError as error:
            reason = f"could not be read: {error.strerror}"
        if reason is None:
            reason = f"did not end within {deadline_secs:g} s"
        elif not reason:
            status = process.returncode
            reason = f"ended with status {status}" if status else ""
    finally:
        _end(process)
    text, errors = (output[pipe].decode(errors="replace") for pipe in (process.stdout, process.stderr))
    return ToolRun(text, reason and f"{name} {reason}", round(time.monotonic() - started, 3), errors, status)


class BackgroundTool:
    """A tool that runs in a thread of its own, for callers that must not wait; its standard error is kept apart.

    Raises:
        RuntimeError: no thread can be started.
    """

    def __init__(self, name: str, argv: Sequence[str], deadline_secs: float, max_output: int = MAX_OUTPUT) -> None:
        self._run: ToolRun | None = None
        self._stop = threading.Event()

        def run() -> None:
            try:
                self._run = run_tool(argv, deadline_secs, self._stop, apart=True, max_output=max_output)
            except Exception as error:  # noqa: BLE001 - the caller waits for an answer
                self._run = ToolRun("", f"{type(error).__name__}: {error}", 0.0)

        threading.Thread(target=run, name=name, daemon=True).start()

    def look(self) -> ToolRun | None:
        """Return the result, None while the tool runs; never wait."""
        return self._run

    def cancel(self) -> None:
        """End the tool, whose result is no longer needed."""
        self._stop.set()


def _read(
    process: subprocess.Popen[bytes],
    output: dict[IO[bytes] | None, bytearray],
    deadline: float,
    stop: threading.Event | None,
    max_output: int,
) -> str | None:
    """Read the output until the tool ends; return "" if it did, None after the deadline, else why reading stopped."""
    with selectors.DefaultSelector() as selector:
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                selector.register(pipe, selectors.EVENT_READ)
        while selector.get_map() or process.poll() is None:
            left = deadline - time.monotonic()
            is_over = left <= 0 or (stop is not None and stop.is_set())
            # Poll before the select: if the tool has ended, its output is there, even if this process did not run.
            has_ended = process.poll() is not None
            wait_secs = 0.0 if is_over or has_ended else min(left, _POLL_SECS)
            if not selector.get_map():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(wait_secs)
            ready = selector.select(wait_secs) if selector.get_map() else []
            for key, _events in ready:
                chunk = os.read(key.fd, 1 << 16)
                output[cast("IO[bytes]", key.fileobj)] += chunk
                if not chunk:
                    selector.unregister(key.fileobj)
            if sum(map(len, output.values())) > max_output:
                return f"printed more than {max_output >> 20} MiB"
            if has_ended and (is_over or not ready):
                # If a pipe is still open, a child that the tool left behind holds it.
                return ""
            if is_over:
                return None if left <= 0 else "was called off"
    return ""


def _end(process: subprocess.Popen[bytes]) -> None:
    # Signal the group, not the pid, which another process may have if the tool was reaped; a child keeps the group.
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()
    try:
        process.wait(_REAP_SECS)
    except subprocess.TimeoutExpired:
        # If it is not reaped, Python emits a ResourceWarning later. If no thread can be started, accept that.
        with contextlib.suppress(RuntimeError):
            threading.Thread(target=process.wait, daemon=True).start()
