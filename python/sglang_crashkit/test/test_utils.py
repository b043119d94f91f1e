"""Hooks of ``sglang/test/test_utils.py``: the watcher that ends a test run when a server process has ended."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from typing import Any

from sglang_crashkit.settings import Settings
from sglang_crashkit.test.fail_fast import NamedProcesses, Watcher

logger = logging.getLogger(__name__)


def start_subprocess_fail_fast_watcher(named_procs: NamedProcesses) -> threading.Event:
    """End this process, with the same status, as soon as one of the subprocesses exits with a status other than 0.

    Before that, capture the stacks of the other subprocesses, and kill them and their descendants. Set the returned
    event before the subprocesses are ended on purpose.
    """
    processes = list(named_procs)
    watcher = Watcher.covering(process for _, process in processes if process is not None)
    watcher = watcher or Watcher(processes, any_status=False).start()
    return watcher.stopped


def provide_fail_fast_watcher() -> Callable[[NamedProcesses], threading.Event]:
    """Return the kit's watcher for releases without upstream's; if it cannot start, the processes are not watched."""
    return on_start_fail_fast_watcher(lambda _named_procs: threading.Event())


def on_start_fail_fast_watcher(start: Callable[..., Any]) -> Callable[..., Any]:
    """Replace upstream's ``start_subprocess_fail_fast_watcher``; call it if the kit is off or its watcher fails."""

    @functools.wraps(start)
    def wrapper(named_procs: Any) -> Any:
        try:
            if Settings.from_environ().enabled:
                return start_subprocess_fail_fast_watcher(named_procs)
        except Exception:
            logger.warning("crash kit: its watcher could not start; upstream's does", exc_info=True)
        return start(named_procs)

    return wrapper
