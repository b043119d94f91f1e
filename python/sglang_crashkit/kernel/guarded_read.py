"""Read, with a deadline, the files of ``/proc/PID`` that a process can block.

The kernel reads ``cmdline``, ``environ``, ``maps`` and ``smaps`` under the target's mmap lock, and the first two from
its memory. A process whose driver hangs holds that lock for ever. A process that forks with hundreds of gigabytes holds
it for seconds. Every reader waits until the lock is free. Reads of ``comm``, ``stat``, ``status``, ``wchan``,
``cgroup``, ``exe``, ``cwd`` and ``fd`` do not block and need no guard.

No signal ends a thread that waits for the lock, and its process keeps its own locks and sockets until the thread ends.
So a helper process, a fork with two pipes only, does the reading. When a read takes too long, the helper is killed, and
the next read starts another. After a read of a process timed out, that process is not read for a while.
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

#: The longest that a read may take, in seconds; a read that is not blocked takes about 50 us.
DEADLINE_SECS = 0.25
#: Seconds; each read that times out halves the deadline of the next, but not below this.
_LEAST_SECS = 0.03
#: Seconds without a read of a process after a read of it timed out; doubled each time it times out again.
_SKIP_SECS, _MAX_SKIP_SECS = 5.0, 60.0
#: Longer files are refused; the maps of a process with 65,530 mappings take 8 MB.
_MAX_BYTES = 32 << 20
#: The most helpers that SIGKILL has not ended yet, such as one that waits for a page on a disk that hangs.
_MAX_STUCK = 8
_MAX_SKIPPED = 1024
#: Extra seconds, and how often they are checked, for a helper that is runnable but gets no processor on a busy machine.
_STARVED_SECS, _STARVED_STEP_SECS = 2.0, 0.02
_REAP_SECS = 0.02
_LOCK_SECS = 3.0
#: The header of a helper's answer: an errno, or 0 for success, and the number of bytes that follow.
_ANSWER = struct.Struct("=iQ")
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15
_NAME = b"crashkit_reader"


class BlockedReadError(OSError):
    """A read of a file of a process did not finish in time."""


class GuardedReader:
    """Reads files one after the other, each within a deadline. Several threads may share an instance."""

    def __init__(self, deadline_secs: float = DEADLINE_SECS) -> None:
        self._max_secs = self._deadline_secs = deadline_secs
        self._lock = threading.Lock()
        self._helper: _Helper | None = None
        self._stuck: list[int] = []
        self._skipped: dict[str, tuple[float, float]] = {}  # end (monotonic) and length of the skip, by file's folder

    def read(self, path: Path) -> bytes:
        """Return the content of the file.

        Raises:
            BlockedReadError: the read did not finish in time, or a recent one did not and this one was not tried.
            OSError: the file cannot be read, or is too long.
        """
        target = str(path.parent)
        if not self._lock.acquire(timeout=_LOCK_SECS):
            raise BlockedReadError(errno.EBUSY, "other reads take too long", str(path))
        try:
            until, how_long = self._skipped.get(target, (0.0, 0.0))
            if time.monotonic() < until:
                raise BlockedReadError(errno.ETIMEDOUT, "a recent read of this process timed out", str(path))
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
            # After this process was forked, the helper still belongs to the parent.
            self._helper.close()
            self._helper, self._stuck = None, []
        for _attempt in range(2):
            if self._helper is None:
                self._stuck = [pid for pid in self._stuck if not is_reaped(pid)]
                if len(self._stuck) >= _MAX_STUCK:
                    raise OSError(errno.EAGAIN, f"{_MAX_STUCK} helper processes of timed-out reads have not ended yet")
                self._helper = _Helper()
            try:
                return self._helper.read(path, time.monotonic() + self._deadline_secs)
            except EOFError:
                # The helper ends with the thread that started it (PR_SET_PDEATHSIG), or was killed from outside.
                self._end_helper()
            except BlockedReadError:
                self._end_helper()
                raise
        raise OSError(errno.EIO, "the helper process that reads /proc was killed", str(path))

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
    """A forked process that reads files for this one.

    Raises:
        OSError: the process cannot be started.
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
        """Return the content of a file; see `GuardedReader.read`. `deadline` is a time of the monotonic clock.

        Raises:
            EOFError: the helper has ended.
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
        """Close the pipes to the helper."""
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
                # The helper may have answered since the last read, while this process waited for a processor.
                elif not poller.poll(0):
                    raise BlockedReadError(errno.ETIMEDOUT, "the read did not finish in time", str(path)) from None
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
    # Imported here only: ctypes takes a megabyte, which the owner of the helper does not need.
    import ctypes

    # A garbage collection would write to, and so copy, pages that the helper shares with its owner.
    gc.disable()
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_NAME, _NAME, 0, 0, 0)
    # While a read blocks, the helper cannot see that its pipe was closed.
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
    """Let `reader` do all guarded reads of this process; with None, the default, the process reads files itself."""
    global _reader
    earlier, _reader = _reader, reader
    if earlier is not None:
        earlier.close()


def read_guarded(path: Path) -> bytes:
    """Return the content of a file whose read may block; see `guard_reads` and `GuardedReader.read`."""
    return path.read_bytes() if _reader is None else _reader.read(path)
