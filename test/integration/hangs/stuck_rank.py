"""Let a rank of a real server be stuck in ways that no signal has by itself: its own code runs them on SIGUSR1."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from integration.import_hook import write_site

#: Runs in every Python process of the server; two of the ways are by no bytecode, so nothing of Python ends them.
_SITECUSTOMIZE = """
import gc
import os
import signal
import time

FOLDER = os.path.dirname(__file__)
released = False


def spin():
    global released
    released = False
    while not released:
        pass


def hold_gil():
    import ctypes

    # Unlike CDLL, PyDLL keeps the lock; a signal that has a handler ends pause(2).
    ctypes.PyDLL(None).pause()


def sleep_in_kernel():
    # The kernel holds the parent in state D until its child, which waits for a writer, has come to execve(2).
    fifo = (os.POSIX_SPAWN_OPEN, 0, os.path.join(FOLDER, "fifo"), os.O_RDONLY, 0)
    os.waitpid(os.posix_spawn("/bin/true", ["true"], {}, file_actions=[fifo]), 0)


class Garbage:
    def __del__(self):
        # Python collects for as long as this takes.
        while not released:
            time.sleep(0.05)


def collect():
    global released
    released = False
    garbage = Garbage()
    garbage.itself = garbage
    del garbage
    gc.collect()


def on_stick(number, frame):
    if "sglang_crashkit" in frame.f_code.co_filename:
        # What runs in a hook is not what the rank does: a moment later.
        return os.kill(os.getpid(), number)
    with open(os.path.join(FOLDER, "way")) as file:
        way = file.read()
    {"spin": spin, "hold_gil": hold_gil, "sleep_in_kernel": sleep_in_kernel, "collect": collect}[way]()


def on_release(_signal, _frame):
    global released
    released = True


signal.signal(signal.SIGUSR1, on_stick)
signal.signal(signal.SIGUSR2, on_release)
"""


class StuckRank:
    """Makes ranks of servers stuck that were started with its environment; it has a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.environ = write_site(folder, _SITECUSTOMIZE)
        os.mkfifo(folder / "fifo")

    def stick(self, pid: int, way: str) -> None:
        """Let the main thread of process `pid` ``spin``, ``hold_gil``, ``sleep_in_kernel`` or ``collect`` garbage."""
        (self._folder / "way").write_text(way)
        os.kill(pid, signal.SIGUSR1)

    def release(self, pid: int, way: str) -> None:
        """Let it go on.

        Raises:
            OSError: it is not there, or not stuck in the kernel.
        """
        if way == "sleep_in_kernel":
            os.close(os.open(self._folder / "fifo", os.O_WRONLY | os.O_NONBLOCK))
        else:
            os.kill(pid, signal.SIGUSR2)
