"""A process that is watched, held by pidfd, and the event that ends a watch."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from typing import Protocol

from sglang_crashkit.kernel.pidfd import ProcessHandle

#: Whoever waits for a child in another thread is given this long to reap it, in seconds.
REAP_SECS = 1.0


class Process(Protocol):
    """What is needed of a process; `subprocess.Popen` has it."""

    @property
    def pid(self) -> int:
        """Its process id."""

    def poll(self) -> int | None:
        """Return its exit status as subprocess tells it, None while it lives."""


class StopEvent(threading.Event):
    """Ends a watch when it is set, and wakes the watcher."""

    def __init__(self) -> None:
        super().__init__()
        self.wake_reader, self._writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def set(self) -> None:
        """End the watch."""
        super().set()
        self.wake()

    def wake(self) -> None:
        """Let the watcher look."""
        with contextlib.suppress(OSError):
            os.write(self._writer, b".")

    def __del__(self) -> None:
        for descriptor in (self.wake_reader, self._writer):
            with contextlib.suppress(OSError):
                os.close(descriptor)


class Held:
    """A watched process and its pidfd, where the kernel gives one.

    Attributes:
        name: what it is called.
        process: the process.
        since: when it was seen first, in seconds since the epoch.
        ignored: it has ended, and that is no matter.
        handle: its pidfd.
    """

    def __init__(self, name: str, process: Process) -> None:
        self.name = name
        self.process = process
        self.since = time.time()
        self.ignored = False
        self.handle: ProcessHandle | None = None
        if process.poll() is None:
            with contextlib.suppress(OSError):
                self.handle = ProcessHandle(process.pid)
            if self.handle is not None and process.poll() is not None:
                # Reaped in between; the pid may be another's.
                self.close()

    def has_exited(self) -> bool:
        """Say whether it has ended."""
        handle = self.handle
        # Another thread may just have closed it.
        with contextlib.suppress(OSError, ValueError):
            if handle is not None:
                return handle.has_exited()
        return self.process.poll() is not None

    def returncode(self) -> int | None:
        """Return how it ended as subprocess tells it; None where nobody reaped it in time."""
        deadline = time.monotonic() + REAP_SECS
        while (code := self.process.poll()) is None and time.monotonic() < deadline:
            time.sleep(0.002)
        return code

    def close(self) -> None:
        """Close the pidfd."""
        if self.handle is not None:
            self.handle.close()
            self.handle = None
