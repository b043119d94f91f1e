"""The signals that end processes of a server, or have them end it; `policy` decides whether one is sent.

Four kinds are sent elsewhere: what ends a tool of the kit's own, the signal by which faulthandler is asked for stacks
(`ladder`), SIGCONT for what a debugger may have left stopped (`tracing`), and what the kit sends in the place of
upstream's ``kill_process_tree``.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Collection, Iterable

from sglang_crashkit.kernel import procfs
from sglang_crashkit.kernel.pidfd import ProcessHandle


def send_sigquit(process: ProcessHandle) -> bool:
    """Send SIGQUIT, by which SGLang's processes tell the main one of a failure; return whether it was sent."""
    try:
        process.send_signal(signal.SIGQUIT)
    except OSError:
        return False
    return True


def send_itself_sigquit() -> None:
    """Send SIGQUIT to the main thread of this process: it may be in a call that a signal to another would not end."""
    main_thread = threading.main_thread().ident
    assert main_thread is not None
    signal.pthread_kill(main_thread, signal.SIGQUIT)


def kill_below(pid: int, skipped: Collection[int] = ()) -> None:
    """Send SIGKILL to all processes below `pid`, but to those that are skipped."""
    kill_all(procfs.TreeScanner(pid).scan() - {pid, *skipped})


def kill_all(pids: Iterable[int]) -> None:
    """Send SIGKILL to processes; one that is gone is no error."""
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def kill_group(group: int) -> None:
    """Send SIGKILL to a process group."""
    os.killpg(group, signal.SIGKILL)


def kill_itself() -> None:
    """End this process by SIGKILL; returns only in process 1 of a container, which is deaf to it."""
    os.kill(os.getpid(), signal.SIGKILL)
