"""Hooks of ``sglang/srt/managers/scheduler.py``: the scheduler process hit an exception, and told its parent."""

from __future__ import annotations

import contextlib
import os
import select

from sglang_crashkit.kernel.pidfd import ProcessHandle
from sglang_crashkit.settings import Settings, read_bool
from sglang_crashkit.srt.exception_record import tell_exception
from sglang_crashkit.srt.hooks import never_raises, request
from sglang_crashkit.srt.process_group import find_server, kill_own_group

#: The incident is written within this time once its own is spent, and the server ends within it, in seconds.
_FINISH_SECS = 2.0


def on_scheduler_exception() -> None:
    """Tell the crash handler of the exception being handled, before the parent is told; see `tell_exception`."""
    tell_exception()


@never_raises
def on_parent_told() -> None:
    """Kill the server's process group where ``SGLANG_KILLPG_ON_SCHEDULER_EXCEPTION`` asks for it.

    To be called once the parent was sent SIGQUIT, on which it saves the requests. The kill comes when they are saved
    and the incident is whole, after ``SGLANG_CRASHKIT_BUDGET_SECS`` at the latest. Where the kit is off nothing is done
    here: the branch that some releases have of their own then does as upstream says.
    """
    if not read_bool(os.environ, "SGLANG_KILLPG_ON_SCHEDULER_EXCEPTION", False) or not hasattr(os, "killpg"):
        return
    settings = Settings.from_environ()
    if settings.enabled:
        answer = request("await_incident", settings.budget_secs + _FINISH_SECS)
        # The server ends its processes, this one too, with a status that tells of the crash, which a kill would not.
        _await_server(settings.budget_secs if answer is None else _FINISH_SECS)
        kill_own_group()


def _await_server(timeout_secs: float) -> None:
    """Wait until the server has ended by itself: where there is no crash handler, this tells of the dump too."""
    with contextlib.suppress(OSError):
        server = ProcessHandle(find_server(os.getpid()))
        poller = select.poll()
        poller.register(server, select.POLLIN)
        poller.poll(timeout_secs * 1000)
        server.close()
