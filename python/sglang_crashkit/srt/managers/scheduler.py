"""Hooks of ``sglang/srt/managers/scheduler.py`` for an exception, whether it ends the scheduler or is caught."""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import sys
from typing import Any

from sglang_crashkit.kernel import procfs, signals, titles
from sglang_crashkit.kernel.pidfd import ProcessHandle
from sglang_crashkit.settings import Settings, read_bool
from sglang_crashkit.srt.exception_record import tell_caught, tell_exception
from sglang_crashkit.srt.hooks import before, never_raises, request
from sglang_crashkit.srt.managers.scheduler_heartbeat import known_gpu

logger = logging.getLogger(__name__)

#: Extra time for the crash handler to finish an incident, and then for the server to end, in seconds.
_FINISH_SECS = 2.0
_MAX_NAMED = 8
#: The class that a scheduler constructs, or the method that it calls, when it catches an exception in its event loop
#: and serves on: SGLang's pull requests 40078 (fault tolerance) and 33340 (``--debug-mode``).
_FAULT, _DISCARD = "FaultToleranceRankFaultOutput", "_discard_failed_batch"


def on_scheduler_exception() -> None:
    """Report the exception being handled to the crash handler; call it before the parent learns of it."""
    tell_exception(known_gpu())


@never_raises
def watch_caught_exceptions() -> None:
    """Report each exception after which this scheduler serves on, in a release that catches exceptions.

    Call it in the scheduler's process before the event loop, when its modules are loaded.
    """
    modules = {name: module for name, module in list(sys.modules.items()) if name.startswith("sglang.srt.")}
    fault: Any = getattr(modules.get("sglang.srt.managers.io_struct"), _FAULT, None)
    for name, module in modules.items():
        # The module that defines the class keeps it: the encoding of messages depends on the class.
        if fault is not None and name != fault.__module__ and getattr(module, _FAULT, None) == fault:
            setattr(module, _FAULT, before(fault, _tell_caught))
    scheduler: Any = getattr(modules.get("sglang.srt.managers.scheduler"), "Scheduler", None)
    if inspect.isfunction(inspect.getattr_static(scheduler, _DISCARD, None)):
        setattr(scheduler, _DISCARD, before(getattr(scheduler, _DISCARD), _tell_caught))


def _tell_caught(*_args: object, **_fields: object) -> None:
    tell_caught(known_gpu())


@never_raises
def on_parent_told() -> None:
    """Kill the server's process group if ``SGLANG_KILLPG_ON_SCHEDULER_EXCEPTION`` is set.

    Call it after SIGQUIT was sent to the parent. The group is killed once the requests are saved and the incident is
    complete, after ``SGLANG_CRASHKIT_BUDGET_SECS`` at the latest. If the kit is off, only the release's own code, if
    any, kills the group.
    """
    if not read_bool(os.environ, "SGLANG_KILLPG_ON_SCHEDULER_EXCEPTION", False) or not hasattr(os, "killpg"):
        return
    settings = Settings.from_environ()
    if settings.enabled:
        answer = request("await_incident", settings.budget_secs + _FINISH_SECS)
        # Give the server time to end its processes, this one too, with a status that names the cause; a kill would
        # not. Without a crash handler the server's end also means that the requests are saved.
        with contextlib.suppress(OSError):
            server = ProcessHandle(find_server(os.getpid()))
            server.has_exited(settings.budget_secs if answer is None else _FINISH_SECS)
            server.close()
        kill_own_group()


def kill_own_group() -> None:
    """Send SIGKILL to the processes of this server in this process's group, to this process last.

    Other processes in the group, such as a shell, are logged and left alive, though upstream kills the whole group.
    """
    group = os.getpgrp()
    own = procfs.TreeScanner(find_server(os.getpid())).scan()
    present = (int(name) for name in os.listdir("/proc") if name.isdigit())  # noqa: PTH208
    members = {pid for pid in present if procfs.is_running(pid) and _group_of(pid) == group}
    foreign = sorted(members - own)
    if not foreign:
        signals.kill_group(group)
        return
    logger.warning(
        "crash kit: process group %d has %d processes of other programs, which are not killed: %s; "
        "next: start the server in a session of its own (setsid)",
        group,
        len(foreign),
        ", ".join(map(str, foreign[:_MAX_NAMED])),
    )
    signals.kill_all([*sorted(members & own - {os.getpid()}), os.getpid()])


def find_server(pid: int) -> int:
    """Return the main process of the worker `pid`'s server: the first ancestor that is not a worker."""
    # By the kernel's short name (``comm``) of the process: reading it never blocks.
    while (stat := procfs.read_stat(pid)) is not None and stat.comm.startswith(titles.PREFIX):
        # An orphan's parent is init, which is not a server. In a container the server itself may be process 1.
        if stat.ppid < 1 or (stat.ppid == 1 and not procfs.is_python(1)):
            break
        pid = stat.ppid
    return pid


def _group_of(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except OSError:
        return None
