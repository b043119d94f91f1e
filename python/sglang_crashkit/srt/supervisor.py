"""Watch the processes that this process started for its server: identify them, and wait until any of them ends.

Nothing else in SGLang's processes waits for these ends. Each process is identified by pid and start time. What an end
means depends on the phase: `startup.Startup`, `entrypoints.engine.Following`, `Serving`.

A title does not prove that a process belongs to the server. The launch registers the schedulers that it started. Each
worker announces itself (`join`); the main process accepts it only if ``/proc`` shows that the server started it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import select
import signal
import threading
import time
import weakref
from _thread import allocate_lock, start_new_thread
from collections.abc import Callable, Collection, Iterable, Sequence
from multiprocessing import connection
from stat import S_ISFIFO
from typing import Any

from sglang_crashkit import protocol
from sglang_crashkit.incident.exit_status import FATAL_SIGNALS, is_orderly, status_of_exit
from sglang_crashkit.kernel import procfs, signals, titles
from sglang_crashkit.kernel.pidfd import ExitStatus, ProcessHandle, wait_status_of
from sglang_crashkit.policy import Mode
from sglang_crashkit.settings import MODE_VARIABLE, SOCKET_VARIABLE, Settings, published, socket_of
from sglang_crashkit.srt import crash_exit
from sglang_crashkit.srt.hooks import before, handler_pid, never_raises, notify, say_line

logger = logging.getLogger(__name__)

#: Names the pipe on which workers announce themselves to the main process: path below ``/proc``, space, inode.
MEMBERS_VARIABLE = "SGLANG_CRASHKIT_MEMBERS"

#: Interval at which children without a descriptor, and all else that causes no event, are polled, in seconds.
LOOK_SECS = 1.0
#: The longest wait for a child's exit status after its end, in seconds.
STATUS_SECS = 1.0
#: Interval at which a title that is not set yet is read again, in seconds.
TITLE_SECS = 0.25
#: Time limit for reading a title, in seconds: the read blocks on a process whose driver hangs.
_READ_SECS = 1.0
_NEVER = float("inf")
#: What a scheduler sends in place of its title once its event loop runs.
_READY = "ready"
#: Delay before a worker's death by a fatal signal ends the server, in seconds: its killer may also kill this process.
_HARD_HOLD_SECS = 0.05
#: Delay before an exit with an error status ends the server, in seconds: a shutdown may yet be announced.
_SOFT_HOLD_SECS = 2.0
#: The capacity of a pipe, in bytes.
_PIPE_BYTES = 1 << 16


class Clock:
    """The clock and all waits; tests replace it."""

    def now(self) -> float:
        """Return the time by the monotonic clock, in seconds."""
        return time.monotonic()

    def wait(self, descriptors: Collection[int], seconds: float | None) -> set[int]:
        """Wait until a descriptor is readable, for at most `seconds` (None: no limit); return the readable ones."""
        return set(connection.wait(list(descriptors), seconds))  # type: ignore[arg-type]

    def join(self, thread: threading.Thread, seconds: float) -> None:
        """Wait for the end of a thread."""
        thread.join(seconds)


class Child:
    """A watched process.

    `name` is for example ``Rank 1 scheduler``, or empty if only `title` identifies it. `process` is a
    `multiprocessing.Process`, the pid of another process's child, or None if unknown. `reader` is the connection on
    which the process reports that it is `ready`; None if no report is expected. `info` is that report. `ended_at` is
    the time when the end of the process was noticed.
    """

    def __init__(self, name: str = "", process: Any = None, reader: Any = None, title: str = "") -> None:
        self.name, self.reader, self.title = name, reader, title
        self.process = None if isinstance(process, int) else process
        self.pid: int | None = process if isinstance(process, int) else getattr(process, "pid", None)
        stat = procfs.read_stat(self.pid) if self.pid is not None else None
        self.start_ticks = stat.start_ticks if stat is not None else 0
        self.info: Any = None
        self.ready = reader is None
        self.exit, self.ended_at = ExitStatus(), _NEVER
        self._is_held = self._gave_up_title = False
        self.handle: ProcessHandle | None = None

    def hold(self) -> bool:
        """Open a pidfd once, if the kernel gives one; return whether the process was found, running or a zombie."""
        if not self._is_held and self.pid is not None and self.stat() is not None:
            self._is_held = True
            with contextlib.suppress(OSError):
                self.handle = ProcessHandle(self.pid)
            if self.handle is not None and self.handle.start_ticks != self.start_ticks:
                self.close()
        return self._is_held

    def close(self) -> None:
        """Close the pidfd."""
        if self.handle is not None:
            self.handle.close()
            self.handle = None

    def descriptors(self) -> list[int]:
        """Return the descriptors that become readable when the process ends: its sentinel and pidfd, if any."""
        sentinel = [self.process.sentinel] if self.process is not None else []
        return sentinel + ([self.handle.fd] if self.handle is not None else [])

    def stat(self) -> procfs.ProcStat | None:
        """Return the process's stat line, also that of a zombie; None if the process is gone."""
        return procfs.read_stat(self.pid, self.start_ticks) if self.pid is not None else None

    def has_ended(self) -> bool:
        """Return whether a process without descriptors has ended, reaped or not."""
        stat = self.stat()
        return stat is None or (stat.state in "ZX" and stat.threads <= 1)

    def learn_exit(self) -> ExitStatus:
        """Return how the process ended, if known, without reaping it: the crash handler reads the zombie."""
        if not self.exit.known and self.pid is not None:
            try:
                self.exit = ExitStatus.from_wait_status(wait_status_of(self.pid, self.process))
            except ChildProcessError:
                if self.handle is not None:
                    self.exit = self.handle.exit_status()
            except ValueError:
                # Its end is noticed a moment before the kernel reports its exit status.
                pass
        return self.exit

    @property
    def has_title(self) -> bool:
        """Whether the title is known, or cannot be read."""
        return bool(self.title) or self.pid is None or self._gave_up_title

    def look_up_title(self) -> None:
        """Read the title: SGLang sets it some seconds after the start, and it is lost when the process ends."""
        stat = None if self.has_title else self.stat()
        if stat is not None and stat.comm.startswith(titles.PREFIX):
            title = read_title(stat.pid)
            self._gave_up_title = title is None
            self.title = title if title is not None and title.startswith(titles.PREFIX) else ""

    def label(self) -> str:
        """Return the name, title and pid, as far as they are known."""
        if self.pid is None:
            return self.name
        pid = f"pid {self.pid}"
        if self.name and titles.role_of(self.title) in ("scheduler", "helper"):
            return f"{self.name} ({f'{self.title}, ' if self.title else ''}{pid})"
        return f"{self.title or 'a process of the server'} ({pid})"

    def how_it_ended(self) -> str:
        """Return how the process ended, in words."""
        if not self.exit.known:
            return "ended with an unknown exit status"
        if self.exit.signal is None:
            return f"ended with exit status {self.exit.code}"
        return f"was killed by {self.exit.signal}{', the kernel wrote a core file' if self.exit.core_dumped else ''}"


def read_title(pid: int) -> str | None:
    """Return a process's title, empty if the process is gone; None if the title is not read in time."""
    found, is_read = [""], allocate_lock()
    is_read.acquire()

    def read() -> None:
        found[0] = procfs.title_of(procfs.read_cmdline(pid), "")
        is_read.release()

    try:
        # Not threading.Thread: its start waits for a lock, which the code that a signal interrupted may hold.
        start_new_thread(read, ())
    except RuntimeError:
        return None
    return found[0] if is_read.acquire(timeout=_READ_SECS) else None


class Supervisor:
    """A list of children, which may grow, and one wait for the end of any of them."""

    def __init__(self, children: Sequence[Child] = (), clock: Clock | None = None) -> None:
        self.children = children
        self.clock = clock or Clock()
        for child in children:
            child.hold()

    def living(self) -> list[Child]:
        """Return the children whose end has not been noticed."""
        return [child for child in self.children if child.ended_at == _NEVER]

    def ended(self) -> list[Child]:
        """Return the children whose end has been noticed, in the order of their ends."""
        return sorted((child for child in self.children if child.ended_at < _NEVER), key=lambda child: child.ended_at)

    def wait(self, seconds: float | None, others: Iterable[int] = ()) -> set[int]:
        """Wait at most `seconds` for a child's end, which it notes, or for readable `others`; return those."""
        living, others = self.living(), set(others)
        unseen = [child for child in living if child.pid is not None and not child.descriptors()]
        if unseen:
            gone = any(child.has_ended() for child in unseen)
            seconds = 0.0 if gone else min(LOOK_SECS, LOOK_SECS if seconds is None else seconds)
        readable = self.clock.wait(others | {sign for child in living for sign in child.descriptors()}, seconds)
        now = self.clock.now()
        for child in living:
            if readable.intersection(child.descriptors()) or (child in unseen and child.has_ended()):
                child.ended_at = now
        return others & readable

    def learn_exits(self, children: Iterable[Child], seconds: float) -> None:
        """Read how `children` ended, for at most `seconds`: the kernel reports it a moment after the end."""
        deadline = self.clock.now() + seconds
        for child in children:
            while not child.learn_exit().known and self.clock.now() < deadline:
                self.clock.wait((), 0.001)

    def close(self) -> None:
        """Close all pidfds."""
        for child in self.children:
            child.close()


class Serving(Supervisor):
    """The server's own processes, as registered in its main process.

    While there is a crash handler, the main process only waits for the handler's end. Without a handler, the end of a
    worker ends the server.

    `excused` maps the pids of processes that the server ends on purpose to their start times. `when_ready` is called
    once, when every known scheduler runs its event loop; it is set if nothing else waits for the ranks.

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
        # Reentrant: a signal handler may take the lock in the thread that holds it.
        self._lock = threading.RLock()
        # A pipe needs no folder and ends with this process. The kernel lets only processes of this user open it.
        self._reader, self._writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._invite()

    def begin(self, handler: int | None, *, follows: bool) -> None:
        """Watch from now on, from any thread; `follows`: rank 0, on another node, tells this node's workers to end."""
        child = Child("", handler)
        child.hold()
        self._has_begun, self._follows, self._next_handler = True, follows, child
        self.when_ready = None
        self._invite()
        # Wake the watching thread. If the pipe is full, the thread is awake.
        with contextlib.suppress(BlockingIOError):
            os.write(self._writer, b"\n")

    def run(self) -> None:
        """Watch in the calling thread until this process ends."""
        while True:
            try:
                self.turn()
            except Exception as error:  # noqa: BLE001 - the next turn may succeed
                say_line(f"the workers could not be checked: {type(error).__name__}: {error}")
                self.clock.wait((), LOOK_SECS)

    def turn(self) -> None:
        """Handle registrations and ends of processes, then wait for the next, or until the next check is due."""
        self.read_registered()
        schedulers = {pid for pid, its in list(self.registered.items()) if titles.role_of(its.title) == "scheduler"}
        if self.when_ready is not None and schedulers and schedulers <= self._ready:
            call, self.when_ready = self.when_ready, None
            call()
        # A launch in another thread may set the next handler meanwhile.
        if (handler := self._next_handler) is not None and handler is not self._handler:
            self._handler.close()
            self._handler = handler
        ends = self._handler.descriptors()
        # Without a descriptor for the handler's end, each `_look` asks whether the handler is there.
        pause = self._look() if self._has_begun and not ends else None
        if self.wait(pause, {self._reader, *ends}).intersection(ends):
            self._handler.close()
            say_line("the crash handler has ended: a crash ends the server, but leaves no incident")

    def register(self, pid: int, title: str) -> None:
        """Register a process with the title that it reports, if this server started it; callable from any thread."""
        child = Child("", pid, title=title)
        with self._lock:
            known = self.registered.get(pid)
            if known is not None and known.start_ticks == child.start_ticks:
                known.title = title or known.title
            elif child.start_ticks and self._is_own(pid):
                self.registered = {pid: its for pid, its in self.registered.items() if its.stat() is not None}
                self.registered[pid] = child

    def read_registered(self) -> None:
        """Register the processes that announced themselves; on return all are, whichever thread read the pipe."""
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
        # Programs other than Python may be in between, for example one that binds memory to a CPU socket.
        while above is not None and above.ppid:
            parent, known = procfs.read_stat(above.ppid), self.registered.get(above.ppid)
            if above.ppid == self.pid or (parent and known and known.start_ticks == parent.start_ticks):
                return True
            if procfs.is_python(above.ppid):
                return False
            above = parent
        return False

    def _look(self) -> float | None:
        """Check the processes; return the seconds until the next check at the latest, None if none is needed."""
        if not crash_exit.ends_with_the_server():
            return None
        if crash_exit.has_begun() or protocol.is_reachable(published(SOCKET_VARIABLE)):
            return LOOK_SECS
        for child in list(self.registered.values()):
            if child not in self.children and not _is_tokenizer_worker(child) and child.hold():
                self.children = [*self.children, child]
        self.wait(0.0)
        pause = LOOK_SECS
        serves = crash_exit.state.started and not crash_exit.state.launching
        for child in self.ended() if serves else ():
            left = self._judge(child, child.learn_exit())
            pause = min(pause, left or pause)
            if left is None:
                child.close()
                self.children = [each for each in self.children if each is not child]
                with self._lock:
                    self.registered = {pid: each for pid, each in self.registered.items() if each is not child}
        return pause

    def _judge(self, child: Child, status: ExitStatus) -> float | None:
        """End the server if a worker's end requires it; return the seconds until that is decided, None if it is."""
        is_excused = child.pid is not None and self.excused.get(child.pid) == child.start_ticks
        is_asked = (status.code == 0 and self._follows) or (crash_exit.state.draining and is_orderly(status))
        if is_excused or is_asked:
            return None
        if status.signal in FATAL_SIGNALS:
            hold_secs = _HARD_HOLD_SECS
        else:
            # If several tokenizer workers tell the schedulers to end, this process learns of it last.
            hold_secs = Settings.from_environ().end_secs if is_orderly(status) else _SOFT_HOLD_SECS
        left = child.ended_at + hold_secs - self.clock.now()
        if left > 0:
            return left
        if crash_exit.has_begun():
            return None
        how = f"by {status.signal}" if status.signal is not None else f"with status {status.code}"
        words = f"process {child.pid} ({child.title or 'a scheduler'}) ended{f' {how}' if status.known else ''}"
        say_line(f"{words} and there is no crash handler; the server ends")
        # Without a handler, SIGQUIT ends this process with a less specific status, or does nothing.
        is_handled = signal.getsignal(signal.SIGQUIT) not in (signal.SIG_DFL, signal.SIG_IGN)
        # This process ends by the deadline, whatever SIGQUIT does.
        crash_exit.begin(status_of_exit(status), 2 * Settings.from_environ().end_secs if is_handled else 0.0)
        if is_handled:
            signals.send_itself_sigquit()
        return None


def _is_tokenizer_worker(child: Child) -> bool:
    return titles.role_of(child.title) == "tokenizer_worker"


current: Serving | None = None


def listen() -> Serving:
    """Return this process's `Serving`, after creating it if absent; from then on workers can announce themselves.

    Raises:
        OSError, RuntimeError: no descriptor is left, or the system gives no thread.
    """
    global current
    serving = _known()
    if serving is None:
        serving = Serving()
        threading.Thread(target=serving.run, name="crashkit-children", daemon=True).start()
        current = serving
    return serving


def _known() -> Serving | None:
    # In a forked child, `current` is a copy of its parent's.
    return current if current is not None and current.pid == os.getpid() else None


@never_raises
def begin(*, follows: bool) -> None:
    """Watch the server's processes in a separate thread; see `Serving.begin`."""
    listen().begin(handler_pid(), follows=follows)


@never_raises
def register(processes: Iterable[Any]) -> None:
    """Register the `multiprocessing` processes that this one started for the server, also with the crash handler."""
    started = {process.pid: process for process in processes or () if type(getattr(process, "pid", None)) is int}
    stats = [stat for pid in started if (stat := procfs.read_stat(pid)) is not None]
    if stats:
        notify("members", started=[(stat.pid, stat.start_ticks) for stat in stats])
    serving = _known()
    if serving is not None:
        for stat in stats:
            serving.register(stat.pid, "")
            # A stand-in, such as one for a Ray actor, may not support weak references.
            with contextlib.suppress(TypeError):
                serving.started[stat.pid] = started[stat.pid]
    if os.environ.get(MODE_VARIABLE) == Mode.ELASTIC.value:
        # An elastic server may be told to go on without some ranks. It ends them by one of these methods.
        for process in started.values():
            for name in {"kill", "terminate"} & set(dir(process)) - set(vars(process)):
                # A weak reference: a process in a reference cycle keeps its descriptors until a garbage collection.
                end = functools.partial(_end, weakref.ref(process), getattr(type(process), name))
                setattr(process, name, before(end, functools.partial(_announce_end, process.pid)))


def _end(process: weakref.ref[Any], end: Callable[[Any], object]) -> object:
    return end(process())


def _announce_end(pid: int, *, whole: bool = True) -> None:
    # Only to this server's handler: the pid of a dead rank may belong to another server by now.
    notify("teardown", pid=pid, whole=whole)
    excuse(pid)


def wait_status(child: int) -> int:
    """Return how a child of this process ended; see `pidfd.wait_status_of`."""
    serving = _known()
    return wait_status_of(child, serving.started.get(child) if serving is not None else None)


@never_raises
def join(*, is_ready: bool = False) -> None:
    """Announce this process to the server's main process, with its title, or that it `is_ready`."""
    path, _space, inode = os.environ.get(MEMBERS_VARIABLE, "").partition(" ")
    # The main process may be gone, and its pid reused.
    try:
        # Checked before it is opened for writing: opening another process's file may have side effects.
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except PermissionError:
        logger.warning("crash kit: this process is not registered: no permission to reach the server's main process")
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
        # The main process has ended meanwhile.
        return
    finally:
        os.close(place)


@never_raises
def announce_teardown(parent_pid: int | None, *, whole: bool) -> None:
    """Announce that this process is about to end a tree, by default its own; if not `whole`, all but the root."""
    pid = os.getpid() if parent_pid is None else parent_pid
    _announce_end(pid, whole=whole)
    if pid != os.getpid():
        # The tree may be another server, which has its own handler.
        path = socket_of(pid)
        if path is not None and str(path) != published(SOCKET_VARIABLE) and path.exists():
            protocol.notify(str(path), "teardown", pid=pid, whole=whole)


@never_raises
def excuse(pid: int) -> None:
    """Note that this process is about to end the process `pid` and its descendants on purpose."""
    serving = _known()
    if serving is not None:
        stats = map(procfs.read_stat, procfs.TreeScanner(pid).scan())
        serving.excused.update({stat.pid: stat.start_ticks for stat in stats if stat is not None})


@never_raises
def end_tokenizer_workers(seconds: float) -> int:
    """Have all tokenizer workers save their requests and end, within `seconds` in total; return their number."""
    serving = _known()
    if serving is None:
        return 0
    serving.read_registered()
    workers = Supervisor([child for child in list(serving.registered.values()) if _is_tokenizer_worker(child)])
    try:
        for worker in workers.children:
            if worker.handle is not None:
                # On SIGQUIT a worker saves its requests and ends.
                signals.send_sigquit(worker.handle)
        deadline = time.monotonic() + seconds
        while workers.living() and (left := deadline - time.monotonic()) > 0:
            workers.wait(left)
    finally:
        workers.close()
    return len(workers.children)
