"""Without a crash handler a server program watches its workers itself: the death of one ends the server.

The crash handler may be killed, for lack of memory for example, or not have started. What SGLang notices by itself then
depends on the release: nothing before 0.5.10, and nothing of the ranks below a data-parallel controller to this day. As
long as the crash handler lives nothing is done here but to wait for its end.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable

from sglang_crashkit import protocol
from sglang_crashkit.incident.exit_status import FATAL_SIGNALS, OUT_OF_MEMORY, is_orderly, status_of_exit
from sglang_crashkit.kernel import cgroup, procfs, signals
from sglang_crashkit.kernel.pidfd import ExitStatus
from sglang_crashkit.settings import SOCKET_VARIABLE, Settings
from sglang_crashkit.srt import crash_exit, server_log
from sglang_crashkit.srt.hooks import handler_pid, never_raises
from sglang_crashkit.srt.own_workers import OwnWorkers, Worker

_NAME = "crashkit-children"

_LOOK_SECS = 1.0
#: Whoever killed a worker may be about to kill the main process as well; it has this long for that, in seconds.
_HARD_HOLD_SECS = 0.05
#: An exit with a status may belong to a shutdown that is announced within this time, in seconds.
_SOFT_HOLD_SECS = 2.0
#: A count of out-of-memory kills is compared with one that is this old at least, in seconds; see `ProcessTree`.
_OOM_AGE_SECS = 30.0


class ChildWatch:
    """Ends the server when a worker dies and there is no crash handler to do it.

    Whoever runs it waits for the descriptors in `watched`, and calls `look` before each wait.

    Args:
        handler_pid: the crash handler; None where there is none, or nothing is known of it.

    Attributes:
        follows: this node's rank is above 0; rank 0 tells its schedulers to end.

    Raises:
        OSError: no descriptor is left.
    """

    def __init__(self, handler_pid: int | None) -> None:
        self.follows = False
        self._pid = os.getpid()
        self._wake = select.epoll()
        self._handler = _open(handler_pid)
        # Where nobody will tell of its end, whether it is there is asked each time.
        self._is_on = self._handler is None
        self._closed = False
        self._workers = OwnWorkers()
        self._excused: dict[int, int] = {}  # start times by pid
        counter = cgroup.find_counter(self._pid)
        self._oom_counters = (counter, counter)
        self._oom_read_at = time.monotonic()

    @property
    def lives(self) -> bool:
        """Whether somebody in this process runs it."""
        return not self._closed and self._pid == os.getpid()

    @property
    def watched(self) -> dict[int, Callable[[], bool]]:
        """Descriptors, and what to call when one has something to read; False: it is waited for no longer."""
        found: dict[int, Callable[[], bool]] = {self._wake.fileno(): lambda: True}
        if self._handler is not None:
            found[self._handler] = self._take_over
        return found

    def look(self) -> float | None:
        """Look at the workers; return in how many seconds to look again at the latest, None where there is no need."""
        if self._closed or not self._is_on:
            return None
        try:
            return self._look()
        except Exception as error:  # noqa: BLE001 - the thread has other duties, and may have better luck next time
            if self._closed:
                return None
            server_log.say_line(f"the workers could not be looked at: {type(error).__name__}: {error}")
            return _LOOK_SECS

    def run(self) -> None:
        """Run it in the calling thread, until it is closed."""
        poller, watched = select.poll(), self.watched
        for descriptor in watched:
            poller.register(descriptor, select.POLLIN)
        while not self._closed:
            pause = self.look()
            for descriptor, _events in poller.poll(None if pause is None else pause * 1000):
                if not watched[descriptor]():
                    poller.unregister(descriptor)

    def excuse(self, pids: set[int]) -> None:
        """Note that this process is about to end these on purpose."""
        for pid in pids:
            stat = procfs.read_stat(pid)
            # Workers or not: to read a title may wait for the process, which an end must not.
            if stat is not None:
                self._excused[pid] = stat.start_ticks

    def close(self) -> None:
        """End it, and close its descriptors."""
        self._closed = True
        self._wake.close()
        self._workers.close()
        if self._handler is not None:
            os.close(self._handler)
            self._handler = None

    def _take_over(self) -> bool:
        if not self._closed:
            self._is_on = True
            server_log.say_line("the crash handler has ended: a crash ends the server, but leaves no incident")
        return False

    def _look(self) -> float:
        if crash_exit.has_begun() or not crash_exit.ends_with_the_server():
            return _LOOK_SECS
        if protocol.is_reachable(os.environ.get(SOCKET_VARIABLE, "")):
            return _LOOK_SECS
        self._read_oom_counter()
        for worker in self._workers.find():
            if worker.handle is not None:
                self._wake.register(worker.handle.fd, select.EPOLLIN)
        pause = _LOOK_SECS
        for worker in self._workers:
            if worker.ended_at is None and worker.has_ended():
                self._note_end(worker)
            if worker.ended_at is not None and not worker.done and crash_exit.is_serving():
                pause = min(pause, self._judge(worker, worker.ended_at))
        return pause

    def _note_end(self, worker: Worker) -> None:
        worker.ended_at = time.monotonic()
        if worker.handle is not None:
            with contextlib.suppress(OSError):
                # It stays readable, and would let nobody sleep.
                self._wake.unregister(worker.handle.fd)

    def _judge(self, worker: Worker, ended_at: float) -> float:
        """End the server where a worker's end is the end of it; return in how many seconds to look again."""
        status = worker.exit_status()
        if self._excused.get(worker.pid) == worker.start_ticks or self._is_no_crash(status):
            worker.done = True
            return _LOOK_SECS
        left = ended_at + _hold_secs(status) - time.monotonic()
        if left > 0:
            return left
        worker.done = True
        if not crash_exit.has_begun():
            self._end_server(worker, status)
        return _LOOK_SECS

    def _is_no_crash(self, status: ExitStatus) -> bool:
        if status.code == 0 and self.follows:
            return True
        return crash_exit.is_draining() and is_orderly(status)

    def _end_server(self, worker: Worker, status: ExitStatus) -> None:
        code = OUT_OF_MEMORY if status.signal == "SIGKILL" and self._was_out_of_memory() else status_of_exit(status)
        words = f"process {worker.pid} ({worker.title}) {_in_words(status)}"
        server_log.say_line(f"{words} and there is no crash handler; the server ends")
        # Where nobody handles it the signal would say less, or nothing at all.
        is_handled = signal.getsignal(signal.SIGQUIT) not in (signal.SIG_DFL, signal.SIG_IGN)
        # Whatever comes of the signal, this process ends.
        crash_exit.begin(code, 2 * Settings.from_environ().end_secs if is_handled else 0.0)
        if is_handled:
            signals.tell_itself()

    def _read_oom_counter(self) -> None:
        if time.monotonic() >= self._oom_read_at + _OOM_AGE_SECS:
            self._oom_read_at = time.monotonic()
            self._oom_counters = (self._oom_counters[1], cgroup.find_counter(self._pid))

    def _was_out_of_memory(self) -> bool:
        counter = self._oom_counters[0]
        return counter is not None and (counter.grown_by() or 0) > 0


_watch: ChildWatch | None = None


def replace(handler_pid: int | None) -> ChildWatch:
    """Return a watch that takes the place of the one before, and is run by the caller.

    Args:
        handler_pid: see `ChildWatch`.

    Raises:
        OSError: no descriptor is left.
    """
    global _watch
    if _watch is not None:
        _watch.close()
    _watch = ChildWatch(handler_pid)
    return _watch


@never_raises
def ensure(*, follows: bool) -> None:
    """Watch in a thread of its own, where no other thread of this process does.

    Args:
        follows: see `ChildWatch`.
    """
    watch = _watch
    if watch is None or not watch.lives:
        watch = replace(handler_pid())
        threading.Thread(target=watch.run, name=_NAME, daemon=True).start()
    watch.follows = follows


@never_raises
def excuse(pid: int) -> None:
    """Note that this process is about to end the process `pid` and all below it on purpose."""
    if _watch is not None:
        _watch.excuse(procfs.TreeScanner(pid).scan())


def _open(pid: int | None) -> int | None:
    if pid is None:
        return None
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


def _hold_secs(status: ExitStatus) -> float:
    if status.signal in FATAL_SIGNALS:
        return _HARD_HOLD_SECS
    # Where several tokenizer workers tell the schedulers to end, this process is the last to hear of it.
    return Settings.from_environ().end_secs if is_orderly(status) else _SOFT_HOLD_SECS


def _in_words(status: ExitStatus) -> str:
    if status.signal is not None:
        return f"ended by {status.signal}"
    return f"ended with status {status.code}" if status.code is not None else "ended"
