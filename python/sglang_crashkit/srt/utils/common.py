"""Hooks of ``sglang/srt/utils/common.py``: a process tree is killed on purpose, and its death waited for.

Releases before 0.5.11 neither wait nor have the functions for it, and later ones poll; here these have one meaning. The
names that upstream's functions look up in their module (``_still_holding_resources``, ``psutil``, ``time``, ``logger``)
are looked up there by these too, so that a replacement there reaches both.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import os
import signal
import sys
import threading
import time  # noqa: F401 - `_names` gives it for that of the patched module
from collections.abc import Iterable
from multiprocessing import connection
from typing import Any, NoReturn

import psutil

from sglang_crashkit.kernel.pidfd import open_pidfd
from sglang_crashkit.settings import Settings
from sglang_crashkit.srt import crash_exit, handler_process, supervisor
from sglang_crashkit.srt.exception_record import tell_exception
from sglang_crashkit.srt.hooks import Function, in_place_of, never_raises
from sglang_crashkit.srt.request_journal import retire_journals
from sglang_crashkit.srt.stack_hooks import report_faults
from sglang_crashkit.srt.startup import StartupError

logger = logging.getLogger(__name__)

_MODULE = "sglang.srt.utils.common"
#: The argument that releases before 0.5.11 lack.
_WAIT = "wait_timeout"
#: Upstream's polling interval, in seconds; the longest sleep here.
_POLL_SECS = 0.1
_MAX_WARN_SECS = 10.0
#: After a crash the children are given this long to go, in seconds: an orchestrator waits for the server's end.
_CHILDREN_SECS = 10.0
#: So often they are looked for and killed.
_SWEEPS = 3
#: What a program ends with that was asked to end: as a shell reports the signal, too.
_ASKED_STATUSES = (None, 0, *(128 + number for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)))


def on_kill_process_tree(kill: Function) -> Function:
    """Wrap ``kill_process_tree``: the crash handler is told first, so that the deaths that follow are no incident.

    After a crash the calling process ends with a telling status when it kills itself or all of its children; see
    `crash_exit`. Where upstream's function has no ``wait_timeout`` (seconds), it gets one: the call returns when all
    that it killed are gone, and raises RuntimeError where they are not in time.
    """
    signature = inspect.signature(kill)
    parameters = list(signature.parameters.values())
    waits = any(p.name == _WAIT or p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    if not waits:
        extra = inspect.Parameter(_WAIT, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None)
        signature = signature.replace(parameters=[*parameters, extra])

    # Named so for the traceback of what it raises.
    @functools.wraps(kill)
    def kill_process_tree(*args: Any, **kwargs: Any) -> Any:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError:
            # Upstream's own words for arguments that it does not take.
            return kill(*args, **(kwargs if waits else {name: kwargs[name] for name in kwargs if name != _WAIT}))
        pid = bound.arguments["parent_pid"]
        # As process 1 of a container this process is above its crash handler, too.
        skipped = handler_process.pid_below() if pid is None or pid == os.getpid() else None
        _prepare_kill(pid, bound.arguments)
        if skipped is not None and "skip_pid" in signature.parameters:
            bound.arguments["skip_pid"] = bound.arguments.get("skip_pid") or skipped
        seconds = None if waits else bound.arguments.pop(_WAIT, None)
        doomed = _processes_of(**bound.arguments) if seconds is not None else []
        result = kill(*bound.args, **bound.kwargs)
        if doomed:
            _names()._wait_for_reap_or_raise(doomed, seconds)
        return result

    kill_process_tree.__signature__ = signature  # type: ignore[attr-defined]
    return kill_process_tree


@never_raises
def _prepare_kill(pid: int | None, arguments: dict[str, Any]) -> None:
    """Tell what is about to happen; does not return where this process is to end because of a crash."""
    is_own, whole = pid is None or pid == os.getpid(), pid is not None and arguments.get("include_parent", True)
    if is_own:
        report_faults()
        if crash_exit.is_due(whole=whole):
            end_after_crash(arguments.get("skip_pid"))
        if not whole and threading.current_thread() is threading.main_thread():
            _tell_own_exception()
    supervisor.announce_teardown(pid, whole=whole)
    if is_own and not whole:
        retire_journals()
    elif is_own:
        handler_process.announce_exit()


def end_after_crash(skip_pid: int | None = None) -> NoReturn:
    """End this process's children, but the one to be skipped, and then itself, with the status of the crash."""
    report_faults()
    supervisor.announce_teardown(os.getpid(), whole=True)
    skipped = handler_process.pid_below()
    handler_process.announce_exit()
    crash_exit.end(functools.partial(_kill_own_children, skip_pid, skipped))


def on_wait_for_reap(wait: Function) -> Function:
    """Take over from ``_wait_for_reap_or_raise``; see `wait_for_reap_or_raise`."""

    def instead(wait: Function, procs: Iterable[Any], wait_timeout: float) -> None:
        if Settings.from_environ().enabled:
            wait_for_reap_or_raise(procs, wait_timeout)
        else:
            wait(procs, wait_timeout)

    return in_place_of(wait, instead, meant=RuntimeError)


def still_holding_resources(procs: Iterable[Any]) -> list[Any]:
    """Return those of `procs` that hold memory, descriptors or a GPU context: no zombies, nor what cannot be asked."""
    module = _names()
    alive = []
    for process in procs:
        try:
            if process.is_running() and process.status() != module.psutil.STATUS_ZOMBIE:
                alive.append(process)
        except (psutil.NoSuchProcess, OSError):
            pass
    return alive


def wait_for_reap_or_raise(procs: Iterable[Any], wait_timeout: float) -> None:
    """Return as soon as all of `procs`, which were sent SIGKILL, are gone; a warning after 10 s or half the time.

    Woken by pidfds where there are any; looks at ``/proc`` every 0.1 s besides, as upstream does.

    Raises:
        RuntimeError: some are left; it names their pids.
    """
    module = _names()
    processes = list(procs)
    warn_at = min(_MAX_WARN_SECS, wait_timeout / 2)
    deadline = module.time.monotonic() + wait_timeout
    warn_deadline = module.time.monotonic() + warn_at
    warned = False
    while alive := module._still_holding_resources(processes):
        now = module.time.monotonic()
        pids = [process.pid for process in alive]
        if now >= deadline:
            raise RuntimeError(
                f"kill_process_tree: {len(alive)} process(es) not reaped within "
                f"{wait_timeout}s after SIGKILL; pids={pids}"
            )
        if not warned and now >= warn_deadline:
            warned = True
            module.logger.warning(
                "kill_process_tree: %d process(es) still alive after %.1fs SIGKILL; "
                "continuing to wait up to %.1fs total. pids=%s",
                len(alive),
                warn_at,
                wait_timeout,
                pids,
            )
        # Not beyond the end of one of them.
        pidfds = [pidfd for pidfd in map(_open_pidfd, alive) if pidfd is not None]
        try:
            if pidfds:
                connection.wait(pidfds, _POLL_SECS)
            else:
                module.time.sleep(_POLL_SECS)
        finally:
            for pidfd in pidfds:
                os.close(pidfd)


#: This module stands in for the patched one, where that is not loaded or lacks them.
_still_holding_resources, _wait_for_reap_or_raise = still_holding_resources, wait_for_reap_or_raise
#: A program may take it out of `sys.modules`, to import SGLang afresh.
_OWN = sys.modules[__name__]


def _names() -> Any:
    module = sys.modules.get(_MODULE)
    return module if hasattr(module, "_wait_for_reap_or_raise") else _OWN


def _processes_of(parent_pid: int | None, include_parent: bool = True, skip_pid: int | None = None) -> list[Any]:
    module, words = _names(), "kill_process_tree called: parent_pid=%s, include_parent=%s, pid=%s"
    module.logger.info(words, parent_pid, include_parent, os.getpid())
    try:
        parent = module.psutil.Process(parent_pid)
        members = [*parent.children(recursive=True), *([parent] if include_parent and parent_pid is not None else [])]
    except psutil.NoSuchProcess:
        return []
    return [process for process in members if process.pid != skip_pid]


def _kill_own_children(*skipped: int | None) -> None:
    module = _names()
    # Another thread, that of the supervisor of tokenizer workers, may start new ones for those that died.
    for _ in range(_SWEEPS):
        killed = []
        for child in module.psutil.Process().children(recursive=True):
            if child.pid not in skipped:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
                    killed.append(child)
        module._wait_for_reap_or_raise(killed, _CHILDREN_SECS)


@never_raises
def _tell_own_exception() -> None:
    """Tell of the exception by which a server program ends: its launcher ends its children while it propagates.

    Not of what somebody asked for, or of what was told when a rank did not get ready.
    """
    error, state = sys.exc_info()[1], crash_exit.state
    if error is None or not state.is_program or state.draining:
        return
    if isinstance(error, SystemExit) and error.code in _ASKED_STATUSES:
        return
    if any(isinstance(link, (KeyboardInterrupt, StartupError)) for link in crash_exit.chain_of(error)):
        return
    tell_exception()
    if not state.started:
        crash_exit.end_by_status(error, None)


def _open_pidfd(process: Any) -> int | None:
    # Not isinstance, which a mock with a spec passes.
    if not issubclass(type(process), psutil.Process):
        return None
    try:
        pidfd = open_pidfd(process.pid)
    except OSError:
        return None
    if still_holding_resources([process]):
        return pidfd
    # That of a zombie would end every sleep at once; a pid that was reaped may be another process's by now.
    os.close(pidfd)
    return None
