"""Run one tool on a process: to its end, to its deadline or until it is called off, whichever comes first.

What it printed by then is kept: of a debugger that did not come to its end, the first listings are there.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

#: How often a tool that prints nothing is looked at, in seconds.
_POLL_SECS = 0.1
#: A killed one is waited for this long, in seconds: a tracer in uninterruptible sleep cannot die yet.
_REAP_SECS = 1.0
#: A thousand threads fifty frames deep take 10 MB.
_MOST_BYTES = 32 << 20
#: Killed and not gone yet; dropped unreaped, each would be a ResourceWarning later.
_dying: list[subprocess.Popen[bytes]] = []


@dataclass(frozen=True)
class ToolRun:
    """What came of running a tool.

    Attributes:
        text: what it printed, standard error included.
        reason: why that is not all, or nothing; empty where the tool ended well.
        seconds: how long it took.
        status: its exit status, None where it did not end by itself.
    """

    text: str
    reason: str
    seconds: float
    status: int | None = None


def run_tool(
    argv: Sequence[str],
    deadline_secs: float,
    stop: threading.Event | None = None,
    on_start: Callable[[int], None] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    errors: int = subprocess.STDOUT,
    most_bytes: int = _MOST_BYTES,
) -> ToolRun:
    """Run `argv`; kill it, and all that it started, when its time is over.

    Args:
        argv: the program and its arguments.
        deadline_secs: the longest that it may take, in seconds.
        stop: calls it off when it is set.
        on_start: called with its pid, which is its process group's as well.
        environ: its environment, this process's own by default.
        errors: the file descriptor of its standard error, that of its standard output by default.
        most_bytes: it is killed once it has printed more.
    """
    _dying[:] = [process for process in _dying if process.poll() is None]
    started = time.monotonic()
    name = os.path.basename(argv[0])  # noqa: PTH119 - a name, not a path
    try:
        process = subprocess.Popen(
            list(argv),
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            bufsize=0,
            # What it starts is killed with it, and Ctrl-C reaches neither.
            start_new_session=True,
        )
    except OSError as error:
        return ToolRun("", f"{argv[0]}: {error.strerror}", 0.0)
    output, reason = bytearray(), ""
    try:
        if on_start is not None:
            on_start(process.pid)
        reason = _read(process, output, name, started + deadline_secs, deadline_secs, stop, most_bytes)
    finally:
        _end(process)
    status = None if reason else process.returncode
    if status:
        reason = f"{name} ended with status {status}"
    return ToolRun(output.decode(errors="replace"), reason, round(time.monotonic() - started, 3), status)


def _read(
    process: subprocess.Popen[bytes],
    output: bytearray,
    name: str,
    deadline: float,
    deadline_secs: float,
    stop: threading.Event | None,
    most_bytes: int,
) -> str:
    """Read what it prints until it ends; return why it was given up, empty when it ended."""
    assert process.stdout is not None
    is_open = True
    while is_open or process.poll() is None:
        left = deadline - time.monotonic()
        if left <= 0:
            return f"{name} did not end within {deadline_secs:g} s"
        if stop is not None and stop.is_set():
            return f"{name} was called off"
        if not is_open:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(min(left, _POLL_SECS))
        elif select.select([process.stdout], [], [], min(left, _POLL_SECS))[0]:
            chunk = os.read(process.stdout.fileno(), 1 << 16)
            is_open = bool(chunk)
            output += chunk
            if len(output) > most_bytes:
                return f"{name} printed more than {most_bytes >> 20} MiB"
        elif process.poll() is not None:
            # Whoever holds the pipe open now is a child that it left behind.
            return ""
    return ""


def _end(process: subprocess.Popen[bytes]) -> None:
    # Where it was reaped its pid may be another's, but its group lives as long as a child of it does.
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    assert process.stdout is not None
    process.stdout.close()
    try:
        process.wait(_REAP_SECS)
    except subprocess.TimeoutExpired:
        _dying.append(process)
