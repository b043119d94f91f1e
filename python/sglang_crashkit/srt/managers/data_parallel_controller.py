"""Hooks of ``sglang/srt/managers/data_parallel_controller.py``: it waits for the schedulers that it starts, and raises.

Each data-parallel rank is started by a thread of its own, which must never end: the kernel would end its schedulers
with it. So the main thread waits for the ranks of all threads, and an error reaches upstream's own handling of it.
"""

from __future__ import annotations

import inspect
import logging
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any

from sglang_crashkit.settings import Settings
from sglang_crashkit.srt import startup, supervisor
from sglang_crashkit.srt.exception_record import tell_exception
from sglang_crashkit.srt.hooks import Function, in_place_of, note_failure
from sglang_crashkit.srt.startup import Startup, StartupError
from sglang_crashkit.srt.supervisor import Child

logger = logging.getLogger(__name__)

_GROUPS = "_crashkit_groups"
#: The launching process waits for this one, which knows more of who is not ready, and so speaks this much earlier.
_HEAD_START_SECS = 2.0
_FOREVER_SECS = 24 * 3600.0
_thread = threading.local()


def on_controller_exception() -> None:
    """Tell the crash handler of the exception being handled, unless that ranks did not get ready, which it knows."""
    if not isinstance(sys.exc_info()[1], StartupError):
        tell_exception()


def on_scheduler_groups(controller: Any, ready_events: list[threading.Event]) -> list[Any]:
    """Return what the main thread waits on in place of the `ready_events` of threads that are about to start groups."""
    try:
        if Settings.from_environ().enabled:
            groups = _Groups(controller, len(ready_events))
            controller.scheduler_procs = _Processes(controller.scheduler_procs)
            setattr(controller, _GROUPS, groups)
            return [groups, *ready_events]
    except Exception:  # noqa: BLE001 - upstream waits as it does
        note_failure(on_scheduler_groups)
    return ready_events


def on_scheduler_group_launch(launch: Function) -> Function:
    """Wrap ``launch_tensor_parallel_group``: an error in a group's thread is raised in the main thread instead."""
    signature = inspect.signature(launch)

    def launch_in_thread(launch: Function, controller: Any, *args: Any, **kwargs: Any) -> Any:
        groups = getattr(controller, _GROUPS, None)
        if not isinstance(groups, _Groups):
            return launch(controller, *args, **kwargs)
        _thread.dp_rank = signature.bind(controller, *args, **kwargs).arguments.get("dp_rank")
        try:
            result = launch(controller, *args, **kwargs)
        except Exception as error:
            if not isinstance(error, StartupError):
                logger.exception("crash kit: data-parallel rank %s could not be started", _thread.dp_rank)
            groups.end(error)
            while True:
                time.sleep(_FOREVER_SECS)
        groups.end()
        return result

    return in_place_of(launch, launch_in_thread)


def on_scheduler_group_started(controller: Any, readers: list[Any]) -> list[Any]:
    """Wait for a group of schedulers, of which `readers` are the pipes; return pipes that hold what each sent.

    Raises:
        StartupError: a RuntimeError; a scheduler will not get ready.
    """
    members: list[Child] = []
    try:
        if not Settings.from_environ().enabled or not startup.can_watch(readers, []):
            return readers
        processes = controller.scheduler_procs
        supervisor.register([process for process in list(processes) if process is not None])
        members += _members_of_group(controller, readers)
        groups = getattr(controller, _GROUPS, None)
        launched = groups.launched if isinstance(groups, _Groups) else startup.launched_at()
        # Of those that an elastic controller starts later nothing waited before.
        waited_secs = 0.0 if launched is None else time.monotonic() - launched + _HEAD_START_SECS
        Startup(members, waited_secs).run()
    except StartupError as error:
        startup.report(error)
        raise
    except Exception:  # noqa: BLE001 - upstream reads what is left
        note_failure(on_scheduler_group_started)
    return startup.readers_of(members) or readers


class _Processes(list[Any]):
    """The controller's processes, of which those are known that this thread added."""

    def __init__(self, processes: Iterable[Any]) -> None:
        super().__init__(processes)
        self._own = threading.local()

    def append(self, process: Any) -> None:
        super().append(process)
        self._own.processes = [*self.of_this_thread(), process]

    def of_this_thread(self) -> list[Any]:
        return getattr(self._own, "processes", [])


class _Groups:
    def __init__(self, controller: Any, expected: int) -> None:
        self.launched = startup.launched_at()
        self._controller = controller
        self._missing = expected
        self._error: Exception | None = None
        self._changed = threading.Condition()

    def end(self, error: Exception | None = None) -> None:
        """Say that one more is ready, or that it will not be."""
        with self._changed:
            self._missing -= 1
            self._error = self._error or error
            self._changed.notify()

    def wait(self) -> None:
        """Wait until all groups are ready, in the main thread; raises what a thread raised when it started one."""
        with self._changed:
            self._changed.wait_for(lambda: self._error or self._missing <= 0)
        delattr(self._controller, _GROUPS)
        if self._error is not None:
            raise self._error


def _members_of_group(controller: Any, readers: Sequence[Any]) -> list[Child]:
    dp_rank = getattr(_thread, "dp_rank", None)
    group = "" if dp_rank is None else f"DP{dp_rank} "
    processes: list[Any]
    if started := getattr(controller, "prelaunched_schedulers", None):
        # By the launching process; of these the pids are known.
        pids = {id(reader): pid for pid, reader in started.values()}
        processes = [pids.get(id(reader)) for reader in readers]
    else:
        known = controller.scheduler_procs
        processes = (known.of_this_thread() if isinstance(known, _Processes) else [])[-len(readers) :]
        processes = processes or list(known)[-len(readers) :]
    pairs = enumerate(zip(processes, readers, strict=True))
    return [Child(f"{group}Rank {rank} scheduler", process, reader) for rank, (process, reader) in pairs]
