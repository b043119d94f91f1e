"""Sleep until a process ends, by pidfd where the kernel gives one.

``pidfd_open`` of a process that is just being killed gives EINVAL, ESRCH or ENOENT, by kernel; a container's filter
gives EPERM or ENOSYS, a full table EMFILE. None of these says that the process is gone, and a pidfd may be that of
another process which got the pid since; so a pidfd only ends a sleep, and who is gone is asked elsewhere.
"""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

import psutil


class DeathAlarm:
    """Ends a sleep when one of some processes ends; to be used as a context manager, which closes the pidfds."""

    def __init__(self) -> None:
        self._pidfds: dict[int, int | None] = {}  # by id of the process object; None where there is none to be had
        self._processes: list[Any] = []  # keeps the ids valid

    def __enter__(self) -> DeathAlarm:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for descriptor in self._pidfds.values():
            if descriptor is not None:
                os.close(descriptor)
        self._pidfds.clear()
        self._processes.clear()

    def sleep(self, processes: Iterable[Any], seconds: float, nap: Callable[[float], None]) -> None:
        """Sleep, but not beyond the end of one of `processes`.

        Args:
            processes: `psutil.Process` objects; others (a test's stand-ins) have no pidfd.
            seconds: the longest to sleep.
            nap: sleeps where no pidfd can be watched, such as `time.sleep`.
        """
        poller = select.poll()
        watched: dict[int, int] = {}  # key in _pidfds by descriptor
        for process in processes:
            if id(process) not in self._pidfds:
                self._processes.append(process)
                descriptor = self._pidfds[id(process)] = _open_pidfd(process)
                if descriptor is None and _is_real(process):
                    # It may just have gone: the caller looks again before it sleeps.
                    return
            descriptor = self._pidfds[id(process)]
            if descriptor is not None:
                poller.register(descriptor, select.POLLIN)
                watched[descriptor] = id(process)
        if not watched:
            nap(seconds)
            return
        for descriptor, _events in poller.poll(max(0.0, seconds) * 1000):
            # It stays readable; were the caller to hold the process for alive still, no sleep would last.
            self._pidfds[watched[descriptor]] = None
            os.close(descriptor)


def _is_real(process: Any) -> bool:
    # Not isinstance, which a mock with a spec passes.
    return issubclass(type(process), psutil.Process)


def _open_pidfd(process: Any) -> int | None:
    if not _is_real(process) or not hasattr(os, "pidfd_open"):
        return None
    try:
        descriptor = os.pidfd_open(process.pid)
    except OSError:
        return None
    with contextlib.suppress(psutil.Error, OSError):
        if process.is_running():
            return descriptor
    # The pid was reaped, and may be another process's by now.
    os.close(descriptor)
    return None
