"""What the patched ``sglang/test/test_utils.py`` calls: the watcher that ends a test run when a server has ended."""

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
    """End this process, with the same status, as soon as one of some subprocesses exits with another status than 0.

    The others are captured, and killed with their descendants. The event that is returned is to be set before the
    subprocesses are ended on purpose.
    """
    processes = list(named_procs)
    watcher = Watcher.covering(process for _, process in processes if process is not None)
    watcher = watcher or Watcher(processes, any_status=False).start()
    return watcher.stopped


def provide_fail_fast_watcher() -> Callable[[NamedProcesses], threading.Event]:
    """Return `start_subprocess_fail_fast_watcher`, for releases that have none; where it cannot start, none watches."""
    return on_start_fail_fast_watcher(lambda _named_procs: threading.Event())


def on_start_fail_fast_watcher(start: Callable[..., Any]) -> Callable[..., Any]:
    """Take over from upstream's ``start_subprocess_fail_fast_watcher``, which still runs where the kit is off."""

    @functools.wraps(start)
    def wrapper(named_procs: Any) -> Any:
        try:
            if Settings.from_environ().enabled:
                return start_subprocess_fail_fast_watcher(named_procs)
        except Exception:
            logger.warning("crash kit: its watcher could not start; upstream's does", exc_info=True)
        return start(named_procs)

    return wrapper
