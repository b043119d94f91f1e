"""Lock a folder among processes; the kernel lets go of the lock when its holder ends, however it ends.

flock(2) on the folder itself leaves no lock file behind. It holds across containers of one machine, and where a network
file system has it, across machines; pids and start times do neither.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from pathlib import Path
from typing import Literal

State = Literal["held", "taken", "unsupported"]

_POLL_SECS = 0.01


class FolderLock:
    """A lock on a folder, once `acquire` says so.

    Args:
        folder: what to lock; a link in its place is not followed.
        shared: others may have it too, unless they want it for themselves alone.
    """

    def __init__(self, folder: Path, *, shared: bool = False) -> None:
        self._folder = folder
        self._kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        self._descriptor = -1

    def acquire(self, timeout_secs: float = 0.0) -> State:
        """Try to lock the folder.

        Args:
            timeout_secs: how long to wait for somebody else to let go, in seconds.

        Returns:
            ``taken`` where somebody else had it all the time, ``unsupported`` where this file system has no locks.

        Raises:
            OSError: there is no such folder, or it may not be read.
        """
        deadline = time.monotonic() + timeout_secs
        self._descriptor = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        while True:
            try:
                fcntl.flock(self._descriptor, self._kind | fcntl.LOCK_NB)
            except OSError as error:
                is_taken = error.errno in (errno.EWOULDBLOCK, errno.EACCES)
                if is_taken and time.monotonic() < deadline:
                    time.sleep(_POLL_SECS)
                    continue
                self.release()
                return "taken" if is_taken else "unsupported"
            return "held"

    def release(self) -> None:
        """Let go of it; does nothing where it is not held."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
