"""Run a function in a forked child with a deadline, because the disk or driver that it uses may never answer.

Such a child may block for long, and no signal ends it until the kernel returns from the call. So the child keeps no
lock and no socket of its parent. The parent never waits until a child has ended; `reap` reaps those that have.
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
#: More descriptors than a crash handler ever has. The limit of this process may be 2**30, and without close_range(2)
#: each number takes a close(2) of its own.
_MAX_DESCRIPTORS = 1 << 16
_DONE, _FAILED = b"+", b"-"
_MAX_WORDS = 4000
#: Removed from the text of an error, which also says in words what the number means.
_ERROR_NUMBER = re.compile(r"^\[Errno \d+\] ")
_children: set[int] = set()


def fork_apart(run: Callable[[], object], keep: Sequence[int]) -> int:
    """Run `run` in a child that keeps only the descriptors `keep` of this process; return its pid.

    The child exits when `run` returns or raises. Raises OSError if the kernel does not create the process.
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
    """Say whether the child has ended, and reap it then."""
    try:
        if os.waitpid(pid, os.WNOHANG)[0] == 0:
            return False
    except ChildProcessError:
        # While SIGCHLD is ignored, the kernel reaps the children.
        pass
    _children.discard(pid)
    return True


class ForkedCall:
    """A child that calls `work`, a function that returns bytes, and keeps the descriptors `keep` of this process.

    Raises OSError if the kernel creates no process or no descriptor.
    """

    def __init__(self, work: Callable[[], bytes], keep: Sequence[int] = ()) -> None:
        self._pipe, theirs = os.pipe()
        try:
            self.pid = fork_apart(partial(_answer, theirs, work), [theirs, *keep])
        except OSError:
            # Where the limit of processes is reached, descriptors are scarce too.
            os.close(self._pipe)
            raise
        finally:
            os.close(theirs)
        os.set_blocking(self._pipe, False)

    def wait(self, secs: float, most: int = MAX_ANSWER) -> bytes:
        """Return what `work` returned, at most `most` bytes, within `secs` seconds. Kills the child if it still runs.

        Call it once.

        Raises:
            TimeoutError: the child did not answer in time.
            OSError: `work` raised (the message contains its error), the child died, or its answer was too long.
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
        words = f"the answer is longer than {most} bytes" if said[:1] == _DONE else "the child process died"
        raise OSError(errno.EIO, said[1:].decode(errors="replace") if said[:1] == _FAILED else words)


def _answer(descriptor: int, work: Callable[[], bytes]) -> None:
    try:
        said = _DONE + work()
    except BaseException as error:  # noqa: BLE001 - the child ends here in any case
        kind = "" if isinstance(error, (OSError, CrashkitError)) else f"{type(error).__name__}: "
        words = " ".join(f"{kind}{_ERROR_NUMBER.sub('', str(error))}".split())
        said = _FAILED + words.encode(errors="backslashreplace")[:_MAX_WORDS]
    view = memoryview(said)
    while view:
        view = view[os.write(descriptor, view) :]


def call_within(secs: float, work: Callable[[], bytes], most: int = MAX_ANSWER, keep: Sequence[int] = ()) -> bytes:
    """Return what `work` returns in a child; see `ForkedCall` and its `wait`."""
    return ForkedCall(work, keep).wait(secs, most)
