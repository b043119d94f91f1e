"""Send the signals that end a server's processes, or make them end the server; `policy` decides whether to send one.

Four kinds of signal are sent elsewhere: to end a tool that the kit started, to request stacks from faulthandler
(`ladder`), SIGCONT to a process that a debugger may have left stopped (`tracing`), and those that the kit sends in
place of upstream's ``kill_process_tree``.
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
    """Send SIGQUIT, by which SGLang's processes report a failure to the main process; return whether it was sent."""
    try:
        process.send_signal(signal.SIGQUIT)
    except OSError:
        return False
    return True


def send_itself_sigquit() -> None:
    """Send SIGQUIT to this process's main thread: a signal to another thread would not interrupt its system call."""
    main_thread = threading.main_thread().ident
    assert main_thread is not None
    signal.pthread_kill(main_thread, signal.SIGQUIT)


def kill_below(pid: int, skipped: Collection[int] = ()) -> None:
    """Send SIGKILL to all descendants of `pid` that are not in `skipped`."""
    kill_all(procfs.TreeScanner(pid).scan() - {pid, *skipped})


def kill_all(pids: Iterable[int]) -> None:
    """Send SIGKILL to processes, and ignore errors, such as of a process that is gone."""
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def kill_group(group: int) -> None:
    """Send SIGKILL to a process group."""
    os.killpg(group, signal.SIGKILL)


def kill_itself() -> None:
    """End this process by SIGKILL; returns only in process 1 of a container, for which the kernel ignores it."""
    os.kill(os.getpid(), signal.SIGKILL)
