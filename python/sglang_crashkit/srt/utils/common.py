"""Hook of ``sglang/srt/utils/common.py``: a process tree is about to be killed on purpose."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, TypeVar

from sglang_crashkit.core import channel, procfs, settings
from sglang_crashkit.srt.hooks import never_raises, notify

Function = TypeVar("Function", bound=Callable[..., Any])


def on_kill_process_tree(kill: Function) -> Function:
    """Wrap ``kill_process_tree``: the crash handler is told first, so that the deaths that follow are no incident."""

    @functools.wraps(kill)
    def wrapper(parent_pid: int | None, *args: Any, **kwargs: Any) -> Any:
        _announce_teardown(parent_pid)
        return kill(parent_pid, *args, **kwargs)

    return wrapper  # type: ignore[return-value]


@never_raises
def _announce_teardown(parent_pid: int | None) -> None:
    pid = os.getpid() if parent_pid is None else parent_pid
    notify("teardown", pid=pid)
    if pid != os.getpid():
        # The tree may be another server, which has a handler of its own.
        stat = procfs.read_stat(pid)
        if stat is not None:
            path = str(settings.socket_path(pid, stat.start_ticks))
            if path != os.environ.get(settings.SOCKET_VARIABLE) and os.path.exists(path):  # noqa: PTH110
                channel.notify(path, "teardown", pid=pid)
