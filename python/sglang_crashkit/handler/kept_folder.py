"""Keep cleaners of the temporary folder away from the runtime folder for as long as the server lives.

``systemd-tmpfiles`` removes what was not touched for ten days, sockets included, but leaves a folder alone, with all
that is below it, which somebody has locked by flock(2); see tmpfiles.d(5). Others go by the time of the last change.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from pathlib import Path

from sglang_crashkit.kernel.folder_lock import FolderLock
from sglang_crashkit.settings import RUN

logger = logging.getLogger(__name__)

#: The shortest age that a cleaner goes by is a day; seconds.
_TOUCH_SECS = 6 * 3600.0
#: A cleaner that looks at a folder just now has it locked for a moment, in seconds.
_LOCK_SECS = 0.5


class KeptFolder:
    """The runtime folder of one server, in use.

    Args:
        runtime: locked for this process alone; the two above it, which are the kit's own, together with the handlers of
            other servers.
    """

    def __init__(self, runtime: Path) -> None:
        self._runtime = runtime
        self._above = [runtime.parent.parent, runtime.parent] if runtime.parent.name == RUN else []
        self._locks = [*(FolderLock(folder, shared=True) for folder in self._above), FolderLock(runtime)]
        for lock in self._locks:
            with contextlib.suppress(OSError):
                lock.acquire(_LOCK_SECS)
        self._due = time.monotonic() + _TOUCH_SECS

    def touch_on_time(self) -> None:
        """Give the folder and all in it a new time of change, a few times a day."""
        if time.monotonic() < self._due:
            return
        self._due = time.monotonic() + _TOUCH_SECS
        folders = [*self._above, self._runtime]
        with contextlib.suppress(OSError):
            folders += [Path(entry.path) for entry in os.scandir(self._runtime)]
        for path in folders:
            with contextlib.suppress(OSError):
                os.utime(path, follow_symlinks=False)
        if not self._runtime.is_dir():
            logger.error("somebody removed %s: the server's processes cannot reach this crash handler", self._runtime)

    def release(self) -> None:
        """Let go of it."""
        for lock in self._locks:
            lock.release()
