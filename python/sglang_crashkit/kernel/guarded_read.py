"""Read those files of ``/proc`` that wait for the process they tell of, with a deadline.

The kernel reads ``cmdline``, ``environ``, ``maps`` and ``smaps`` under the target's mmap lock, and the first two out of
its memory. A process whose driver hangs holds that lock for ever, one that forks with hundreds of gigabytes for
seconds, and every reader waits with it. ``comm``, ``stat``, ``status``, ``wchan``, ``cgroup``, ``exe``, ``cwd`` and
``fd`` wait for nothing and need no guard.

A thread that waits so cannot be ended, and its process keeps its locks and sockets until then. So a helper, a fork that
holds nothing but two pipes, reads in its place; it is killed when a read takes too long, and another one takes over. A
process that let a read wait is left alone for a while.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import select
import signal
import struct
import threading
import time
from functools import partial
from pathlib import Path

from sglang_crashkit.kernel.forked import fork_apart, is_reaped

#: The longest that one read may take, in seconds; it takes some 50 us otherwise.
DEADLINE_SECS = 0.25
#: Where several processes let reads wait, each further one is given half of the time, down to this.
_LEAST_SECS = 0.03
#: A process that let a read wait is left alone for so long, in seconds; twice as long each time it does so again.
_SKIP_SECS, _MAX_SKIP_SECS = 5.0, 60.0
#: What is longer is not read: the maps of a process with 65,530 mappings take 8 MB.
_MAX_BYTES = 32 << 20
#: Helpers that even SIGKILL did not end yet, as where a page of the target comes from a disk that hangs.
_MAX_STUCK = 8
_MAX_SKIPPED = 1024
#: Of a machine that is busy, a helper that waits for nothing but a processor is given so much longer, in seconds.
_STARVED_SECS, _STARVED_STEP_SECS = 2.0, 0.02
_REAP_SECS = 0.02
_LOCK_SECS = 3.0
#: What a helper answers first: an errno, 0 if absent, and how many bytes follow.
_ANSWER = struct.Struct("=iQ")
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15
_NAME = b"crashkit_reader"


class BlockedReadError(OSError):
    """The process did not let itself be read in time."""


class GuardedReader:
    """Reads files one after the other, each within a deadline. May be used by several threads."""

    def __init__(self, deadline_secs: float = DEADLINE_SECS) -> None:
        self._max_secs = self._deadline_secs = deadline_secs
        self._lock = threading.Lock()
        self._helper: _Helper | None = None
        self._stuck: list[int] = []
        self._skipped: dict[str, tuple[float, float]] = {}  # until when, and for how long, by the file's folder

    def read(self, path: Path) -> bytes:
        """Return what the file holds.

        Raises:
            BlockedReadError: it did not come in time, or not long ago, and was not tried again.
            OSError: it cannot be read, or is too long.
        """
        target = str(path.parent)
        if not self._lock.acquire(timeout=_LOCK_SECS):
            raise BlockedReadError(errno.EBUSY, "other reads take too long", str(path))
        try:
            until, how_long = self._skipped.get(target, (0.0, 0.0))
            if time.monotonic() < until:
                raise BlockedReadError(errno.ETIMEDOUT, "it let a read wait lately", str(path))
            try:
                data = self._read(path)
            except BlockedReadError:
                how_long = min(max(_SKIP_SECS, 2 * how_long), _MAX_SKIP_SECS)
                if len(self._skipped) >= _MAX_SKIPPED:
                    self._skipped.clear()
                self._skipped[target] = (time.monotonic() + how_long, how_long)
                self._deadline_secs = max(_LEAST_SECS, self._deadline_secs / 2)
                raise
            self._skipped.pop(target, None)
            self._deadline_secs = min(self._max_secs, 2 * self._deadline_secs)
            return data
        finally:
            self._lock.release()

    def close(self) -> None:
        """End the helper; the next read starts another."""
        with self._lock:
            self._end_helper()

    def _read(self, path: Path) -> bytes:
        if self._helper is not None and self._helper.owner != os.getpid():
            # After a fork of this process the helper is still the other one's.
            self._helper.close()
            self._helper, self._stuck = None, []
        for _attempt in range(2):
            if self._helper is None:
                self._stuck = [pid for pid in self._stuck if not is_reaped(pid)]
                if len(self._stuck) >= _MAX_STUCK:
                    raise OSError(errno.EAGAIN, f"{_MAX_STUCK} reads that were given up have not ended yet")
                self._helper = _Helper()
            try:
                return self._helper.read(path, time.monotonic() + self._deadline_secs)
            except EOFError:
                # It ends with the thread that started it, or somebody killed it.
                self._end_helper()
            except BlockedReadError:
                self._end_helper()
                raise
        raise OSError(errno.EIO, "the process that reads for this one was killed", str(path))

    def _end_helper(self) -> None:
        helper, self._helper = self._helper, None
        if helper is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(helper.pid, signal.SIGKILL)
        helper.close()
        deadline = time.monotonic() + _REAP_SECS
        while not is_reaped(helper.pid):
            if time.monotonic() >= deadline:
                self._stuck.append(helper.pid)
                return
            time.sleep(0.001)


class _Helper:
    """A process that reads.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self) -> None:
        requests, self._requests = os.pipe()
        self._answers, answers = os.pipe()
        self.owner = os.getpid()
        try:
            self.pid = fork_apart(partial(_serve, requests, answers, self.owner), [requests, answers])
        except OSError:
            self.close()
            raise
        finally:
            os.close(requests)
            os.close(answers)
        os.set_blocking(self._answers, False)

    def read(self, path: Path, deadline: float) -> bytes:
        """Return what a file holds; see `GuardedReader.read`. The deadline is by the monotonic clock.

        Raises:
            EOFError: it has ended.
        """
        request = os.fsencode(path)
        try:
            os.write(self._requests, struct.pack("=I", len(request)) + request)
        except BrokenPipeError as error:
            raise EOFError from error
        head = self._receive(_ANSWER.size, deadline, path)
        number, length = _ANSWER.unpack(head)
        if number:
            raise OSError(number, os.strerror(number), str(path))
        return self._receive(length, deadline, path)

    def close(self) -> None:
        """Close the pipes to it."""
        os.close(self._requests)
        os.close(self._answers)

    def _receive(self, length: int, deadline: float, path: Path) -> bytes:
        data = bytearray()
        poller = select.poll()
        poller.register(self._answers, select.POLLIN)
        while len(data) < length:
            try:
                chunk = os.read(self._answers, min(length - len(data), 1 << 20))
            except BlockingIOError:
                left = deadline - time.monotonic()
                if left > 0:
                    poller.poll(left * 1000)
                elif _is_runnable(self.pid) and -left < _STARVED_SECS:
                    poller.poll(_STARVED_STEP_SECS * 1000)
                # It may have answered while this process waited for a processor, after the last look.
                elif not poller.poll(0):
                    raise BlockedReadError(
                        errno.ETIMEDOUT, "it did not let itself be read in time", str(path)
                    ) from None
                continue
            if not chunk:
                raise EOFError
            data += chunk
        return bytes(data)


def _is_runnable(pid: int) -> bool:
    try:
        line = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False
    return line[line.rfind(b")") + 2 :][:1] == b"R"


def _serve(requests: int, answers: int, owner: int) -> None:
    """Answer requests until the other end is closed or `owner` ends."""
    # Here alone: it takes a megabyte, which its owner does not need.
    import ctypes

    # A collection would write to the pages that both share.
    gc.disable()
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_NAME, _NAME, 0, 0, 0)
    # While it waits for a process, it cannot notice that the pipe is closed.
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    while os.getppid() == owner and (head := os.read(requests, 4)):
        path = os.read(requests, struct.unpack("=I", head)[0])
        number, data = 0, b""
        try:
            data = _read_whole(path)
        except OSError as error:
            number = error.errno or errno.EIO
        answer = memoryview(_ANSWER.pack(number, len(data)) + data)
        while answer:
            answer = answer[os.write(answers, answer) :]


def _read_whole(path: bytes) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        data = bytearray()
        while chunk := os.read(descriptor, 1 << 17):
            data += chunk
            if len(data) > _MAX_BYTES:
                raise OSError(errno.EFBIG, "too long")
        return bytes(data)
    finally:
        os.close(descriptor)


_reader: GuardedReader | None = None


def guard_reads(reader: GuardedReader | None) -> None:
    """Have all of this process's reads of such files done by `reader`; by itself where it is None, as at first."""
    global _reader
    earlier, _reader = _reader, reader
    if earlier is not None:
        earlier.close()


def read_guarded(path: Path) -> bytes:
    """Return what a file holds that may wait for a process; see `guard_reads` and `GuardedReader.read`."""
    return path.read_bytes() if _reader is None else _reader.read(path)
