"""Have a worker write its stacks when its parent ends, before it ends itself.

Upstream asks the kernel for SIGKILL at the parent's end (``PR_SET_PDEATHSIG``), which leaves no time for a stack: of a
server whose main process, or data-parallel controller, is killed nobody could say what its ranks were doing. Here the
kernel sends a real-time signal instead. faulthandler writes the stacks, without the interpreter, and the crash handler
ends the process as soon as it has looked at it.

The signal does not end the process, for it comes several times: a child belongs to a thread of its parent, is given to
another one when that ends, and is told each time. The second signal would be the end in the middle of the stacks. It
sets an alarm instead, of as many seconds as its number: should the crash handler end in the same moment as the parent,
the kernel still sees to the end of the worker.

The request belongs to a thread, and the kernel honours those of all threads: where the crash handler is gone before the
parent, another thread asks for SIGKILL as well.
"""

from __future__ import annotations

import ctypes
import faulthandler
import multiprocessing
import os
import signal
import threading

from sglang_crashkit.core import procfs

_PR_SET_PDEATHSIG, _PR_GET_PDEATHSIG = 1, 2  # linux/prctl.h


def is_wanted(signum: int) -> bool:
    """Say whether this thread is the main one and asked for SIGKILL, or for `signum` already, at its parent's end.

    The request of another thread would be gone with it, and what came of the parent's end would be another matter.
    """
    return threading.get_native_id() == os.getpid() and _asked_for() in (signal.SIGKILL, signum)


def arm(signum: int, descriptor: int) -> bool:
    """Have the stacks written to `descriptor` when the parent of this thread ends; say whether they will be.

    Args:
        signum: a real-time signal that nobody uses.
        descriptor: stays open until `disarm`.
    """
    if signum in signal.pthread_sigmask(signal.SIG_BLOCK, []):
        return False
    libc = ctypes.CDLL(None)
    # A function of the C library that may be called in a signal handler, and takes the signal's number for seconds.
    _handle_by(signum, ctypes.cast(libc.alarm, ctypes.c_void_p))
    faulthandler.register(signum, file=descriptor, all_threads=True, chain=True)
    # By default the signal ends a process as well, so that nothing is lost if it is no longer caught some day.
    if procfs.catches_signal(os.getpid(), signum) and _ask_for(signum):
        return True
    disarm(signum)
    return False


def disarm(signum: int) -> None:
    """Write no stacks any more; where the parent's end still sends the signal, it ends the process at once."""
    faulthandler.unregister(signum)
    _handle_by(signum, None)


def end_if_orphaned() -> None:
    """End this process where it asked to be ended with its parent, and asked when that had ended already.

    A worker asks once it is imported, seconds after it was started. What the kernel was not asked for in time it never
    does: a server that ends while it starts would leave workers that wait for it for ever.
    """
    parent = multiprocessing.parent_process()
    if parent is not None and _asked_for() and not parent.is_alive():
        os.kill(os.getpid(), signal.SIGKILL)


def ask_for_sigkill() -> None:
    """Have SIGKILL sent as well when the parent ends, for as long as the calling thread lives."""
    _ask_for(signal.SIGKILL)


def _handle_by(signum: int, function: ctypes.c_void_p | None) -> None:
    """Have a function of the C library called when the signal comes; None for what the signal does by default."""
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    libc.signal(signum, function)


def _ask_for(signum: int) -> bool:
    return bool(ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signum), 0, 0, 0) == 0)


def _asked_for() -> int:
    signum = ctypes.c_int(0)
    answer = ctypes.CDLL(None).prctl(_PR_GET_PDEATHSIG, ctypes.byref(signum), 0, 0, 0)
    return signum.value if answer == 0 else 0
