"""Child processes that work on an incident which is whole: no server and no incident waits for them."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import time
from collections.abc import Sequence

#: A killed one is gone a moment later, in seconds; one in uninterruptible sleep is left to the end of this process.
_REAP_SECS = 1.0


class Child:
    """A program in a session of its own; what it prints goes where this process's own log goes.

    Args:
        argv: the program and its arguments.
        deadline_secs: the longest that it may take, in seconds; without end where it has deadlines of its own.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, argv: Sequence[str], deadline_secs: float = math.inf) -> None:
        self._process = subprocess.Popen(list(argv), stdin=subprocess.DEVNULL, start_new_session=True)
        self._deadline_secs = deadline_secs
        self._deadline = time.monotonic() + deadline_secs
        #: Why it did not do what it was to do; empty as long as it is at work, and where it did.
        self.problem = ""

    def has_ended(self) -> bool:
        """Say whether it is at work no more; at its deadline it is killed."""
        status = self._process.poll()
        if status is None and time.monotonic() >= self._deadline:
            self.kill()
            self.problem = f"did not end within {self._deadline_secs:g} s"
            return True
        if status:
            self.problem = f"ended with status {status}"
        return status is not None

    def wait(self) -> None:
        """Wait for its end, until its deadline."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, self._deadline - time.monotonic()))

    def kill(self) -> None:
        """Kill it, and all that it started."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_REAP_SECS)
        self.leave()

    def leave(self) -> None:
        """Let it work on, and never wait for it."""
        # Otherwise it would be a ResourceWarning.
        self._process.returncode = self._process.poll() or 0
