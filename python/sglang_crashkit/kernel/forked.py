"""Run a function in a forked child with a deadline: what it touches, a disk or a driver, may never answer.

The child holds nothing of its parent's, no lock and no socket, as it may stand still for long and no signal ends it
until the kernel lets go of it. Its parent never waits for its end; `reap` takes those that have ended.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import select
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial

from sglang_crashkit.errors import CrashkitError

#: The longest answer that is read, in bytes.
MAX_ANSWER = 1 << 20
#: More than a crash handler ever has. The limit of this process may be 2**30, each closed by a call of its own where
#: there is no close_range(2).
_MAX_DESCRIPTORS = 1 << 16
_DONE, _FAILED = b"+", b"-"
_MAX_WORDS = 4000
#: Who reads a log is told what it means beside it.
_ERROR_NUMBER = re.compile(r"^\[Errno \d+\] ")
_children: set[int] = set()


def fork_apart(run: Callable[[], object], keep: Sequence[int]) -> int:
    """Run `run` in a child that has the descriptors `keep` and no other of this process's; return its pid.

    It ends with `run`, whatever that raises. Raises OSError where there is no process to be had.
    """
    pid = os.fork()
    if pid:
        _children.add(pid)
        return pid
    status = 1
    try:
        first = 0
        for kept in (*sorted(keep), _MAX_DESCRIPTORS):
            os.closerange(first, kept)
            first = kept + 1
        run()
        status = 0
    finally:
        os._exit(status)


def reap() -> None:
    """Reap the children that have ended by now."""
    for pid in list(_children):
        is_reaped(pid)


def is_reaped(pid: int) -> bool:
    """Say whether the child has ended; it is reaped then."""
    try:
        if os.waitpid(pid, os.WNOHANG)[0] == 0:
            return False
    except ChildProcessError:
        # The kernel reaps where SIGCHLD is ignored.
        pass
    _children.discard(pid)
    return True


class ForkedCall:
    """A child that does `work`, a function that returns bytes, with the descriptors `keep` of this process's.

    Raises OSError where there is no process, or no descriptor, to be had.
    """

    def __init__(self, work: Callable[[], bytes], keep: Sequence[int] = ()) -> None:
        self._pipe, theirs = os.pipe()
        try:
            self.pid = fork_apart(partial(_answer, theirs, work), [theirs, *keep])
        except OSError:
            # At the limit of processes every descriptor is needed.
            os.close(self._pipe)
            raise
        finally:
            os.close(theirs)
        os.set_blocking(self._pipe, False)

    def wait(self, secs: float, most: int = MAX_ANSWER) -> bytes:
        """Return what `work` returned, `most` bytes at most, within so many seconds, after which the child is killed.

        To be called once.

        Raises:
            TimeoutError: it did not answer in time.
            OSError: `work` raised, died or said too much; the words say so.
        """
        deadline, said = time.monotonic() + secs, bytearray()
        poller = select.poll()
        poller.register(self._pipe, select.POLLIN)
        try:
            while len(said) <= most:
                if not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
                    raise TimeoutError(errno.ETIMEDOUT, f"it did not answer within {secs:g} s")
                chunk = os.read(self._pipe, 1 << 16)
                if not chunk:
                    break
                said += chunk
        finally:
            os.close(self._pipe)
            if not is_reaped(self.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, signal.SIGKILL)
        if said[:1] == _DONE and len(said) <= most:
            return bytes(said[1:])
        words = said[1:].decode(errors="replace") if said[:1] == _FAILED else "the process that tried died"
        raise OSError(errno.EIO, words)


def _answer(descriptor: int, work: Callable[[], bytes]) -> None:
    try:
        said = _DONE + work()
    except BaseException as error:  # noqa: BLE001 - of this process nothing else is left
        kind = "" if isinstance(error, (OSError, CrashkitError)) else f"{type(error).__name__}: "
        words = " ".join(f"{kind}{_ERROR_NUMBER.sub('', str(error))}".split())
        said = _FAILED + words.encode(errors="backslashreplace")[:_MAX_WORDS]
    view = memoryview(said)
    while view:
        view = view[os.write(descriptor, view) :]


def call_within(secs: float, work: Callable[[], bytes], most: int = MAX_ANSWER, keep: Sequence[int] = ()) -> bytes:
    """Return what `work` returns in a child; see `ForkedCall` and its `wait`."""
    return ForkedCall(work, keep).wait(secs, most)
