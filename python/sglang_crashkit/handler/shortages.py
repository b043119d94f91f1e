"""What the crash handler itself is short of: descriptors, memory, processes, room on the disk. Each is told once.

Some descriptors are held back. They are given up where no others are left, so that an incident can still be written.
"""

from __future__ import annotations

import errno
import logging
import os
import resource

from sglang_crashkit.handler.reporting import ServerLog

logger = logging.getLogger(__name__)

#: One incident takes fewer at a time: a tool with its pipes, files of the incident, sockets for answers.
_HELD_BACK = 48
#: More than a crash handler ever has.
_MAX_DESCRIPTORS = 1 << 16
_WORDS = {
    errno.EMFILE: ("file descriptors", "raise the limit of open files (ulimit -n)"),
    errno.ENFILE: ("file descriptors on this machine", "raise fs.file-max"),
    errno.ENOMEM: ("memory", "raise the memory limit of the container"),
    errno.EAGAIN: ("processes or threads", "raise the limit of processes (ulimit -u, pids.max)"),
    errno.ENOSPC: ("room on a disk", "df -h"),
    errno.EDQUOT: ("room in a disk quota", "quota"),
}


class Shortages:
    """Notices that something runs out, and says it once.

    Args:
        log: the server's.
    """

    def __init__(self, log: ServerLog) -> None:
        self._log = log
        self._told: set[int] = set()
        self._unsaid: list[str] = []
        self._held: list[int] = []

    def raise_limit(self) -> None:
        """Let this process have as many descriptors as it may."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = _MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MAX_DESCRIPTORS)
        if soft != resource.RLIM_INFINITY and soft < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))

    def look(self) -> None:
        """Hold descriptors back while there are plenty; give them up, and say so, where nearly none are left."""
        try:
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            limit = _MAX_DESCRIPTORS if limit == resource.RLIM_INFINITY else limit
            left = limit - len(os.listdir("/proc/self/fd"))  # noqa: PTH208
            if left < _HELD_BACK // 2:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            while len(self._held) < _HELD_BACK and left > 2 * _HELD_BACK:
                self._held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        except OSError as error:
            self.note(error)
        while self._unsaid and self._log.is_heard:
            self._log.say(self._unsaid.pop(0))

    def note(self, error: BaseException) -> bool:
        """Say whether an error is one of a resource that ran out, which is told the first time."""
        number = _number_of(error)
        if number not in _WORDS:
            return False
        if number in (errno.EMFILE, errno.ENFILE):
            self.close()
        if number not in self._told:
            self._told.add(number)
            what, next_step = _WORDS[number]
            words = f"the crash handler has no {what} left: incidents may lack evidence; next: {next_step}"
            logger.error("%s (%s)", words, error)
            if self._log.is_heard:
                self._log.say(words)
            else:
                self._unsaid.append(words)
        return True

    def close(self) -> None:
        """Give up what is held back."""
        while self._held:
            os.close(self._held.pop())


def _number_of(error: BaseException) -> int:
    if isinstance(error, MemoryError):
        return errno.ENOMEM
    if isinstance(error, RuntimeError) and "start new thread" in str(error):
        return errno.EAGAIN
    return (error.errno or 0) if isinstance(error, OSError) else 0
