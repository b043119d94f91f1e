"""Hooks of ``sglang/srt/managers/data_parallel_controller.py``: the wait for its schedulers, and an exception.

A separate thread starts each data-parallel rank. The thread must never end: the kernel would end its schedulers with
it. So the main thread waits for the ranks of all threads, where an error reaches upstream's own error handling.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from sglang_crashkit.kernel.procfs import open_files
from sglang_crashkit.settings import LAUNCH_VARIABLE, Settings
from sglang_crashkit.srt import startup, supervisor
from sglang_crashkit.srt.exception_record import tell_exception
from sglang_crashkit.srt.hooks import Function, in_place_of, never_raises, note_failure
from sglang_crashkit.srt.startup import Startup, StartupError
from sglang_crashkit.srt.supervisor import Child

logger = logging.getLogger(__name__)

_GROUPS = "_crashkit_groups"
#: The controller knows more of ranks that are not ready than the launching process, and times out so much earlier.
_HEAD_START_SECS = 2.0
_FOREVER_SECS = 24 * 3600.0
_thread = threading.local()


def on_controller_exception() -> None:
    """Report the exception being handled to the crash handler; call it before the parent learns of it.

    A failed start of the ranks has been reported by then, and is not a failure of the controller.
    """
    if not isinstance(sys.exc_info()[1], StartupError):
        tell_exception()


def on_scheduler_groups(controller: Any, ready_events: list[threading.Event]) -> list[Any]:
    """Return the objects that the main thread of a ``DataParallelController`` waits on in place of `ready_events`.

    There is one event for each thread that is about to start a group; before them comes one wait for all groups.
    """
    return _group_events(controller, ready_events) or ready_events


@never_raises
def _group_events(controller: Any, ready_events: list[threading.Event]) -> list[Any]:
    if not Settings.from_environ().enabled:
        return ready_events
    groups = _Groups(controller, len(ready_events))
    setattr(controller, _GROUPS, groups)
    return [groups, *ready_events]


def on_scheduler_group_launch(launch: Function) -> Function:
    """Wrap ``launch_tensor_parallel_group``: an error in a group's thread is raised in the main thread."""
    signature = inspect.signature(launch)

    def launch_in_thread(launch: Function, controller: Any, *args: Any, **kwargs: Any) -> Any:
        groups = getattr(controller, _GROUPS, None)
        if not isinstance(groups, _Groups):
            return launch(controller, *args, **kwargs)
        _thread.dp_rank = signature.bind(controller, *args, **kwargs).arguments.get("dp_rank")
        try:
            return launch(controller, *args, **kwargs)
        except Exception as error:
            logger.exception("crash kit: data-parallel rank %s could not be started", _thread.dp_rank)
            groups.error = error
            while True:
                time.sleep(_FOREVER_SECS)

    return in_place_of(launch, launch_in_thread)


def on_scheduler_group_started(controller: Any, readers: list[Any]) -> list[Any]:
    """Wait for the group of schedulers at the other ends of `readers`; return pipes that give each one's message.

    Raises:
        StartupError: a RuntimeError; a scheduler will not get ready.
    """
    members: list[Child] = []
    try:
        if not Settings.from_environ().enabled or not startup.can_watch(readers, []):
            return readers
        supervisor.register(_own_processes(controller))
        dp_rank = getattr(_thread, "dp_rank", None)
        group = "" if dp_rank is None else f"DP{dp_rank} "
        processes: list[Any]
        if started := getattr(controller, "prelaunched_schedulers", None):
            # The launching process started the schedulers for the controller: they are known by pid, None if unknown.
            pids = {id(reader): pid for pid, reader in started.values()}
            processes = [pids.get(id(reader)) for reader in readers]
        else:
            # Threads start their groups at the same time, so the order of the processes means nothing. Find the process
            # that has the other end of each pipe, None if unknown. The kernel's name of a pipe contains its inode.
            files = [(each, {path for _link, path in open_files(each.pid)}) for each in _own_processes(controller)]
            pipes = [Path(f"/proc/self/fd/{reader.fileno()}").readlink() for reader in readers]
            processes = [next((process for process, opened in files if pipe in opened), None) for pipe in pipes]
        pairs = enumerate(zip(processes, readers, strict=True))
        members += [Child(f"{group}Rank {rank} scheduler", process, reader) for rank, (process, reader) in pairs]
        groups = getattr(controller, _GROUPS, None)
        if isinstance(groups, _Groups):
            groups.join(members)
        else:
            Startup(_with_others(controller, members), waited_secs=_waited_secs()).run()
    except StartupError as error:
        startup.report(error)
        raise
    except Exception:  # noqa: BLE001 - upstream reads the rest
        note_failure(on_scheduler_group_started)
    return startup.readers_of(members) or readers


class _Groups:
    """The groups that threads start, and one wait for all of them."""

    def __init__(self, controller: Any, expected: int) -> None:
        self._controller = controller
        self._missing = expected
        self._lock = threading.Lock()
        self._members: list[Child] = []
        #: The exception that the main thread raises.
        self.error: Exception | None = None
        self._ready = threading.Event()

    def join(self, members: list[Child]) -> None:
        """Hand a group's members to the main thread; return when all groups are ready, or never if one fails."""
        with self._lock:
            self._members += members
            self._missing -= 1
        while not self._ready.wait(_FOREVER_SECS):
            pass

    def wait(self) -> None:
        """Wait for all groups, in the main thread.

        Raises:
            StartupError: a scheduler will not get ready.
            Exception: a thread's exception from starting its group.
        """
        try:
            Startup(self._members, self._all_known, _waited_secs()).run()
        except StartupError as error:
            startup.report(error)
            raise
        except Exception:
            if self.error is not None:
                raise
            # Each thread reads the rest from its group's pipes.
            note_failure(self.wait)
        delattr(self._controller, _GROUPS)
        self._ready.set()

    def _all_known(self) -> bool:
        if self.error is not None:
            raise self.error
        with self._lock:
            if self._missing > 0:
                return False
            if self._missing == 0:
                self._missing = -1
                # Also watch a scheduler that died before it could be assigned to a pipe.
                _with_others(self._controller, self._members)
        return True


def _waited_secs() -> float:
    """Return how long the launching process has waited for this one's schedulers, plus the head start, in seconds.

    It is 0 for schedulers that an elastic controller starts later: nothing has waited for them.
    """
    with contextlib.suppress(KeyError, ValueError):
        return time.monotonic() - float(os.environ.pop(LAUNCH_VARIABLE)) + _HEAD_START_SECS
    return 0.0


def _own_processes(controller: Any) -> list[Any]:
    # An elastic controller's released slots are None.
    return [process for process in list(controller.scheduler_procs) if process is not None]


def _with_others(controller: Any, members: list[Child]) -> list[Child]:
    """Add the controller's other schedulers to `members`, and return it."""
    known = [member.process for member in members]
    members += [Child("", process) for process in _own_processes(controller) if process not in known]
    return members
