"""Write to the log of this server without a logger, whose lock whoever hangs may hold, and without waiting for long."""

from __future__ import annotations

import contextlib
import os
import select
import time

_STDERR = 2
_SAY_SECS = 1.0
_MOST_LINE_BYTES = 4000


def say(text: bytes) -> None:
    """Write to standard error, but not for longer than whoever reads it takes.

    Raises:
        OSError: nobody reads it any more.
    """
    poller = select.poll()
    poller.register(_STDERR, select.POLLOUT)
    deadline = time.monotonic() + _SAY_SECS
    # What a pipe that is ready takes without blocking.
    for start in range(0, len(text), select.PIPE_BUF):
        if not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
            return
        os.write(_STDERR, text[start : start + select.PIPE_BUF])


def say_line(text: str) -> None:
    """Write one line of the kit's, without what a terminal would take for a command; nothing where nobody reads it."""
    line = "".join(char if char.isprintable() else " " for char in f"crash kit: {text}")
    with contextlib.suppress(OSError):
        say(line.encode(errors="backslashreplace")[:_MOST_LINE_BYTES] + b"\n")
