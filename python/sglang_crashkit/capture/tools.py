"""Run a tool: to its end, to its deadline or until it is called off, whichever comes first.

It may do anything: hang, print for ever, leave children behind. What it printed by its end is kept: of a debugger that
did not come to its end, the first listings are there.
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

#: How often one that prints nothing is looked at, in seconds.
_POLL_SECS = 0.1
#: A killed one is waited for this long, in seconds: a tracer in uninterruptible sleep cannot die yet.
_REAP_SECS = 0.2
#: A thousand threads fifty frames deep take 10 MB.
MAX_OUTPUT = 32 << 20


@dataclass(frozen=True)
class ToolRun:
    """What came of running a tool."""

    text: str  # what it printed; with what it printed on standard error, where that was not kept apart
    reason: str  # why that is not all, or nothing; empty where the tool ended well
    seconds: float  # how long it took
    errors: str = ""  # what it printed on standard error, where that was kept apart
    #: Its exit status, as `subprocess.Popen.returncode` has it; None where it did not end by itself.
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
    """Run `argv`; kill it, and all that it started, `deadline_secs` after `since` (now) by the monotonic clock.

    It is called off when `stop` is set, and given up after `max_output` bytes. `on_start` is called with its pid, which
    is its process group's as well. What it prints on standard error is kept `apart`, or in its place among the rest.
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
            # What it starts is killed with it, and Ctrl-C reaches neither.
            start_new_session=True,
        )
    except OSError as error:
        return ToolRun("", f"{argv[0]}: {error.strerror}", 0.0)
    output = {process.stdout: bytearray(), process.stderr: bytearray()}
    status = None
    try:
        # It is to be killed first where memory runs out, as the server's limit is its, and to leave no core where it
        # crashes. Without permission it stays as it is.
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
    """A tool in a thread of its own, for who must not wait; its standard error is kept apart.

    Raises:
        RuntimeError: the system gives no thread.
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
        """Return what came of it, None while it is under way; never wait."""
        return self._run

    def cancel(self) -> None:
        """End it: its answer is not needed any more."""
        self._stop.set()


def _read(
    process: subprocess.Popen[bytes],
    output: dict[IO[bytes] | None, bytearray],
    deadline: float,
    stop: threading.Event | None,
    max_output: int,
) -> str | None:
    """Read what it prints until it ends; return why it was given up, empty when it ended, None when it is too late."""
    with selectors.DefaultSelector() as selector:
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                selector.register(pipe, selectors.EVENT_READ)
        while selector.get_map() or process.poll() is None:
            left = deadline - time.monotonic()
            is_over = left <= 0 or (stop is not None and stop.is_set())
            # Asked before the look: what it printed until then is there, also where this process had no processor.
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
                # What holds a pipe open now is a child that it left behind.
                return ""
            if is_over:
                return None if left <= 0 else "was called off"
    return ""


def _end(process: subprocess.Popen[bytes]) -> None:
    # Where it was reaped its pid may be another's, but its group lives as long as a child of it does.
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()
    try:
        process.wait(_REAP_SECS)
    except subprocess.TimeoutExpired:
        # Dropped unreaped, it would be a ResourceWarning later. There may be no thread to be had.
        with contextlib.suppress(RuntimeError):
            threading.Thread(target=process.wait, daemon=True).start()
