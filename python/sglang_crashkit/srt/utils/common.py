"""Hooks of ``sglang/srt/utils/common.py``: a process tree is killed on purpose, and its death is waited for.

Releases before 0.5.11 don't wait and lack the functions for it; later ones poll. With the kit all behave alike. The
names that upstream's functions look up in their module (``_still_holding_resources``, ``psutil``, ``time``, ``logger``)
are looked up there by these functions too, so that a replacement there affects both.
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
import time  # noqa: F401 - `_names` may return this module in place of the patched one
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
#: The parameter that releases before 0.5.11 lack.
_WAIT = "wait_timeout"
#: Upstream's polling interval, in seconds; the longest sleep here.
_POLL_SECS = 0.1
_MAX_WARN_SECS = 10.0
#: Time limit for the children to end after a crash, in seconds: an orchestrator waits for the server's end.
_CHILDREN_SECS = 10.0
#: How many times children are looked for and killed.
_SWEEPS = 3
#: Exit statuses of a program that was asked to end, including those by which a shell reports a signal.
_ASKED_STATUSES = (None, 0, *(128 + number for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)))


def on_kill_process_tree(kill: Function) -> Function:
    """Wrap ``kill_process_tree``: it is announced to the crash handler, so that the deaths that follow are no incident.

    After a crash, if the calling process kills itself or all of its children, its exit status names the cause; see
    `crash_exit`. If upstream's function has no ``wait_timeout`` (seconds), it gets one: the call returns when all
    processes that it killed are gone, and raises RuntimeError if they are not in time.
    """
    signature = inspect.signature(kill)
    parameters = list(signature.parameters.values())
    waits = any(p.name == _WAIT or p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    if not waits:
        extra = inspect.Parameter(_WAIT, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None)
        signature = signature.replace(parameters=[*parameters, extra])

    # Has upstream's name for tracebacks of the exceptions that it raises.
    @functools.wraps(kill)
    def kill_process_tree(*args: Any, **kwargs: Any) -> Any:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError:
            # Upstream raises its own error for arguments that it does not take.
            return kill(*args, **(kwargs if waits else {name: kwargs[name] for name in kwargs if name != _WAIT}))
        pid = bound.arguments["parent_pid"]
        # If this is process 1 of a container, the crash handler is among its descendants.
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
    """Announce the kill to the crash handler; don't return if this process ends because of a crash."""
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
    """End this process's children except `skip_pid`, then this process, with the status of the crash."""
    report_faults()
    supervisor.announce_teardown(os.getpid(), whole=True)
    skipped = handler_process.pid_below()
    handler_process.announce_exit()
    crash_exit.end(functools.partial(_kill_own_children, skip_pid, skipped))


def on_wait_for_reap(wait: Function) -> Function:
    """Replace ``_wait_for_reap_or_raise`` by `wait_for_reap_or_raise`."""

    def instead(wait: Function, procs: Iterable[Any], wait_timeout: float) -> None:
        if Settings.from_environ().enabled:
            wait_for_reap_or_raise(procs, wait_timeout)
        else:
            wait(procs, wait_timeout)

    return in_place_of(wait, instead, meant=RuntimeError)


def still_holding_resources(procs: Iterable[Any]) -> list[Any]:
    """Return the `procs` that hold memory, descriptors or a GPU context: not zombies, nor those that cannot be read."""
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
    """Wait for the end of all `procs`, which were sent SIGKILL; warn after 10 s or half of `wait_timeout`, if less.

    Woken by pidfds if the kernel gives any; also checks ``/proc`` every 0.1 s, as upstream does.

    Raises:
        RuntimeError: processes are left after `wait_timeout` seconds; it names their pids.
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
        # Don't sleep beyond the end of a process.
        pidfds = [pidfd for pidfd in map(_open_pidfd, alive) if pidfd is not None]
        try:
            if pidfds:
                connection.wait(pidfds, _POLL_SECS)
            else:
                module.time.sleep(_POLL_SECS)
        finally:
            for pidfd in pidfds:
                os.close(pidfd)


#: This module replaces the patched one if that is not loaded or lacks these functions.
_still_holding_resources, _wait_for_reap_or_raise = still_holding_resources, wait_for_reap_or_raise
#: A reference to this module: a program may remove it from `sys.modules` to import SGLang again.
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
    # Another thread, the supervisor of the tokenizer workers, may replace those that died.
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
    """Report the exception that ends a server program: its launcher ends its children while the exception propagates.

    Skip an exit on request, and the failed start of a rank, which is already reported.
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
    # Not isinstance, which is true for a mock with a spec.
    if not issubclass(type(process), psutil.Process):
        return None
    try:
        pidfd = open_pidfd(process.pid)
    except OSError:
        return None
    if still_holding_resources([process]):
        return pidfd
    # A zombie's pidfd would end every sleep at once. The pid of a reaped process may belong to another one by now.
    os.close(pidfd)
    return None
