"""Kill the server's processes of the own process group, as upstream does when it was asked to.

Upstream kills the whole group, which may hold what started the server: a shell, a test runner, another server. Those
are named and left alive.
"""

from __future__ import annotations

import logging
import os

from sglang_crashkit.kernel import procfs, signals

logger = logging.getLogger(__name__)

_WORKER = "sglang::"
_MOST_NAMED = 8


def kill_own_group() -> None:
    """Send SIGKILL to the processes of this server that are in this process's group, this one last.

    Does not return where it succeeds.
    """
    group = os.getpgrp()
    own = procfs.TreeScanner(find_server(os.getpid())).scan()
    present = (int(name) for name in os.listdir("/proc") if name.isdigit())  # noqa: PTH208
    members = {pid for pid in present if _group_of(pid) == group}
    strangers = sorted(members - own)
    if not strangers:
        signals.kill_group(group)
        return
    named = ", ".join(f"{pid} {procfs.read_title(pid)}" for pid in strangers[:_MOST_NAMED])
    more = f" and {len(strangers) - _MOST_NAMED} more" if len(strangers) > _MOST_NAMED else ""
    logger.warning(
        "crash kit: process group %d holds processes that are not the server's, which are left alive: %s%s; "
        "next: start the server in a session of its own (setsid)",
        group,
        named,
        more,
    )
    signals.kill_all([*sorted(members & own - {os.getpid()}), os.getpid()])


def find_server(pid: int) -> int:
    """Return the main process of the server that the worker `pid` belongs to: the first ancestor that is no worker."""
    while procfs.read_title(pid).startswith(_WORKER):
        stat = procfs.read_stat(pid)
        # An orphan's parent is init, which is no server; in a container the server itself may be process 1.
        if stat is None or stat.ppid < 1 or (stat.ppid == 1 and not procfs.is_python(1)):
            break
        pid = stat.ppid
    return pid


def _group_of(pid: int) -> int | None:
    stat = procfs.read_stat(pid)
    if stat is None or stat.state in "ZX":
        return None
    try:
        return os.getpgid(pid)
    except OSError:
        return None
