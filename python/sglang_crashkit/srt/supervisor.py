"""Who belongs to this server, and what the end of one of them means while it serves.

As long as there is a crash handler, nothing is done but to wait for the handler's end; without one, the end of a worker
ends the server.

Titles do not say who belongs to the server. The launch names the schedulers that it started, and each worker says
to the main process that it is there (`join`), where the kernel says that the server started it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import threading
import weakref
from collections.abc import Callable, Iterable
from stat import S_ISFIFO
from typing import Any

from sglang_crashkit import protocol
from sglang_crashkit.incident.exit_status import FATAL_SIGNALS, OUT_OF_MEMORY, is_orderly, status_of_exit
from sglang_crashkit.kernel import cgroup, procfs, signals, titles
from sglang_crashkit.kernel.pidfd import ExitStatus, wait_status_of
from sglang_crashkit.settings import SOCKET_VARIABLE, Settings
from sglang_crashkit.srt import crash_exit
from sglang_crashkit.srt.children import LOOK_SECS, Child, Clock, Supervisor
from sglang_crashkit.srt.hooks import handler_pid, never_raises, notify, say_line

logger = logging.getLogger(__name__)

#: Where a worker says to the main process that it is there: a pipe's path below ``/proc``, a space, its inode.
MEMBERS_VARIABLE = "SGLANG_CRASHKIT_MEMBERS"

#: What a scheduler says in the place of its title once it goes round its event loop.
_READY = "ready"
#: What killed a worker may be about to kill the main process as well; it has this long for that, in seconds.
_HARD_HOLD_SECS = 0.05
#: An exit with a status may belong to a shutdown that is announced within this time, in seconds.
_SOFT_HOLD_SECS = 2.0
#: A count of out-of-memory kills is compared with one that is this old at least, in seconds.
_OOM_AGE_SECS = 30.0
#: So many processes are named in one message to the crash handler, which has a limit.
_MAX_AT_ONCE = 512
#: What a pipe holds at most.
_PIPE_BYTES = 1 << 16


class Serving(Supervisor):
    """The server's own processes, as its main process knows them; ends the server where there is no crash handler.

    Attributes:
        excused: the start times of those that this process ends on purpose, by pid; see `procfs.ProcStat`.
        when_ready: called once, in the thread that watches, when each scheduler that said that it is there goes round
            its event loop; None where somebody else waits for the ranks, as from `begin` on.

    Raises:
        OSError: no descriptor is left.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        super().__init__([], clock)
        self.pid = os.getpid()
        self._has_begun = self._follows = False
        self._handler = Child()
        self._next_handler: Child | None = None
        self.registered: dict[int, Child] = {}
        #: The `multiprocessing.Process` of each registered child, while the server holds it.
        self.started: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self.excused: dict[int, int] = {}
        self.when_ready: Callable[[], object] | None = None
        self._ready: set[int] = set()
        # A signal may interrupt the thread that holds it.
        self._lock = threading.RLock()
        counter = cgroup.find_counter(self.pid)
        self._oom_counters, self._oom_read_at = (counter, counter), self.clock.now()
        # It needs no folder and ends with this process; the kernel lets this user's processes open it, and no others.
        self._reader, self._writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._invite()

    def begin(self, handler: int | None, *, follows: bool) -> None:
        """Watch from now on; to be called at each launch, from any thread.

        Args:
            handler: the crash handler's pid; None if there is none, or it is unknown.
            follows: this node's rank is above 0; rank 0 tells its schedulers to end.
        """
        child = Child("", handler)
        child.hold()
        self._has_begun, self._follows, self._next_handler = True, follows, child
        self.when_ready = None
        self._invite()
        # A waiting process is woken; where the pipe is full it is awake.
        with contextlib.suppress(BlockingIOError):
            os.write(self._writer, b"\n")

    def run(self) -> None:
        """Run it in the calling thread, for as long as this process lives."""
        while True:
            try:
                self.turn()
            except Exception as error:  # noqa: BLE001 - it may have better luck next time
                say_line(f"the workers could not be looked at: {type(error).__name__}: {error}")
                self.clock.wait((), LOOK_SECS)

    def turn(self) -> None:
        """Look at the processes, and wait until there is something to look at."""
        self.read_registered()
        schedulers = {pid for pid, its in list(self.registered.items()) if titles.role_of(its.title) == "scheduler"}
        if self.when_ready is not None and schedulers and schedulers <= self._ready:
            call, self.when_ready = self.when_ready, None
            call()
        # A launch in another thread may name the next one meanwhile.
        if (handler := self._next_handler) is not None and handler is not self._handler:
            self._handler.close()
            self._handler = handler
        ends = self._handler.descriptors()
        # Where nothing reports the handler's end, each call asks whether it is there.
        pause = self._look() if self._has_begun and not ends else None
        if self.wait(pause, {self._reader, *ends}).intersection(ends):
            self._handler.close()
            say_line("the crash handler has ended: a crash ends the server, but leaves no incident")

    def register(self, pid: int, title: str) -> None:
        """Take in a process of the server, with the title that it says it has, from any thread.

        Nothing happens where the server did not start it.
        """
        child = Child("", pid, title=title)
        with self._lock:
            known = self.registered.get(pid)
            if known is not None and known.start_ticks == child.start_ticks:
                known.title = title or known.title
            elif child.start_ticks and self._is_own(pid):
                self.registered = {pid: its for pid, its in self.registered.items() if its.stat() is not None}
                self.registered[pid] = child

    def tokenizer_workers(self) -> list[Child]:
        """Return those that their parent starts anew, so that their ends do not concern the server."""
        self.read_registered()
        return [child for child in list(self.registered.values()) if _is_tokenizer_worker(child)]

    def read_registered(self) -> None:
        """Take in who said that it is there; once this returns, it is known, whichever thread read of it."""
        with self._lock, contextlib.suppress(BlockingIOError):
            for line in os.read(self._reader, _PIPE_BYTES).decode(errors="replace").splitlines():
                pid, _space, title = line.partition(" ")
                if pid.isdecimal() and title == _READY:
                    self._ready.add(int(pid))
                elif pid.isdecimal():
                    self.register(int(pid), title)

    def _invite(self) -> None:
        inode = os.fstat(self._writer).st_ino
        os.environ[MEMBERS_VARIABLE] = f"/proc/{self.pid}/fd/{self._writer} {inode}"

    def _is_own(self, pid: int) -> bool:
        above = procfs.read_stat(pid)
        # A program that is no Python may be in between, such as one that binds memory to a socket.
        while above is not None and above.ppid:
            parent, known = procfs.read_stat(above.ppid), self.registered.get(above.ppid)
            if above.ppid == self.pid or (parent and known and known.start_ticks == parent.start_ticks):
                return True
            if procfs.is_python(above.ppid):
                return False
            above = parent
        return False

    def _look(self) -> float | None:
        """Look at the processes, and return in how many seconds to look again at the latest, None if at no time."""
        if not crash_exit.ends_with_the_server():
            return None
        if crash_exit.has_begun() or protocol.is_reachable(os.environ.get(SOCKET_VARIABLE, "")):
            return LOOK_SECS
        if self.clock.now() >= self._oom_read_at + _OOM_AGE_SECS:
            self._oom_read_at = self.clock.now()
            self._oom_counters = (self._oom_counters[1], cgroup.find_counter(self.pid))
        for child in list(self.registered.values()):
            if child not in self.children and not _is_tokenizer_worker(child) and child.hold():
                self.children = [*self.children, child]
        self.wait(0.0)
        pause = LOOK_SECS
        for child in self.ended() if crash_exit.state.serves else ():
            left = self._judge(child, child.learn_exit())
            pause = min(pause, left or pause)
            if left is None:
                child.close()
                self.children = [each for each in self.children if each is not child]
                with self._lock:
                    self.registered = {pid: each for pid, each in self.registered.items() if each is not child}
        return pause

    def _judge(self, child: Child, status: ExitStatus) -> float | None:
        """End the server where a worker's end is the end of it; return in how many seconds to look at it again."""
        is_excused = child.pid is not None and self.excused.get(child.pid) == child.start_ticks
        is_asked = (status.code == 0 and self._follows) or (crash_exit.state.draining and is_orderly(status))
        if is_excused or is_asked:
            return None
        if status.signal in FATAL_SIGNALS:
            hold_secs = _HARD_HOLD_SECS
        else:
            # Where several tokenizer workers tell the schedulers to end, this process is the last to hear of it.
            hold_secs = Settings.from_environ().end_secs if is_orderly(status) else _SOFT_HOLD_SECS
        left = child.ended_at + hold_secs - self.clock.now()
        if left > 0:
            return left
        if not crash_exit.has_begun():
            self._end_server(child, status)
        return None

    def _end_server(self, child: Child, status: ExitStatus) -> None:
        counter = self._oom_counters[0] if status.signal == "SIGKILL" else None
        is_oom = counter is not None and (counter.grown_by() or 0) > 0
        how = f"by {status.signal}" if status.signal is not None else f"with status {status.code}"
        words = f"process {child.pid} ({child.title or 'a scheduler'}) ended{f' {how}' if status.known else ''}"
        say_line(f"{words} and there is no crash handler; the server ends")
        # Where it is not handled the signal would say less, or nothing at all.
        is_handled = signal.getsignal(signal.SIGQUIT) not in (signal.SIG_DFL, signal.SIG_IGN)
        # Whatever comes of the signal, this process ends.
        code = OUT_OF_MEMORY if is_oom else status_of_exit(status)
        crash_exit.begin(code, 2 * Settings.from_environ().end_secs if is_handled else 0.0)
        if is_handled:
            signals.tell_itself()


def _is_tokenizer_worker(child: Child) -> bool:
    return titles.role_of(child.title) == "tokenizer_worker"


current: Serving | None = None


def listen() -> Serving:
    """Return what this process knows of its server's processes, which may say from now on that they are there.

    Raises:
        OSError: no descriptor is left.
        RuntimeError: the system gives no thread.
    """
    global current
    serving = _known()
    if serving is None:
        serving = Serving()
        threading.Thread(target=serving.run, name="crashkit-children", daemon=True).start()
        current = serving
    return serving


def _known() -> Serving | None:
    # A forked child's copy is its parent's.
    return current if current is not None and current.pid == os.getpid() else None


@never_raises
def begin(*, follows: bool) -> None:
    """Watch the server's processes in a thread of its own; see `Serving.begin`."""
    listen().begin(handler_pid(), follows=follows)


@never_raises
def register(processes: Iterable[Any]) -> None:
    """Note which of `multiprocessing`'s processes this one started for the server, and tell the crash handler."""
    started = {process.pid: process for process in processes or () if type(getattr(process, "pid", None)) is int}
    stats = [stat for pid in started if (stat := procfs.read_stat(pid)) is not None]
    for first in range(0, len(stats), _MAX_AT_ONCE):
        notify("members", started=[(stat.pid, stat.start_ticks) for stat in stats[first : first + _MAX_AT_ONCE]])
    serving = _known()
    if serving is not None:
        for stat in stats:
            serving.register(stat.pid, "")
            # A stand-in, such as one for a Ray actor, may not support weak references.
            with contextlib.suppress(TypeError):
                serving.started[stat.pid] = started[stat.pid]


def wait_status(child: int) -> int:
    """Return how a child of this process ended; see `pidfd.wait_status_of`."""
    serving = _known()
    return wait_status_of(child, serving.started.get(child) if serving is not None else None)


@never_raises
def join(*, is_ready: bool = False) -> None:
    """Say to the server's main process that this process is there, and what its title is; or that it `is_ready`."""
    path, _space, inode = os.environ.get(MEMBERS_VARIABLE, "").partition(" ")
    # The process may be gone, and its pid another one's.
    try:
        # Looked at before it is opened: to open what is another's may do something.
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except PermissionError:
        logger.warning("crash kit: the server's main process may not be inspected, so it does not know this process")
        return
    except OSError:
        return
    try:
        found = os.fstat(place)
        if S_ISFIFO(found.st_mode) and str(found.st_ino) == inode:
            pipe = os.open(f"/proc/self/fd/{place}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                words = _READY if is_ready else procfs.read_title(os.getpid())
                os.write(pipe, f"{os.getpid()} {words}\n".encode()[: select.PIPE_BUF])
            finally:
                os.close(pipe)
    except OSError:
        # It has ended meanwhile.
        return
    finally:
        os.close(place)


@never_raises
def excuse(pid: int) -> None:
    """Note that this process is about to end the process `pid` and all below it on purpose."""
    serving = _known()
    if serving is not None:
        stats = map(procfs.read_stat, procfs.TreeScanner(pid).scan())
        serving.excused.update({stat.pid: stat.start_ticks for stat in stats if stat is not None})


@never_raises
def end_tokenizer_workers(seconds: float) -> int:
    """Have each tokenizer worker save its requests and end, within so many seconds; return how many there were."""
    serving = _known()
    workers = Supervisor(serving.tokenizer_workers() if serving is not None else [])
    try:
        for worker in workers.children:
            worker.tell()
        workers.wait_for_all(seconds)
    finally:
        workers.close()
    return len(workers.children)
