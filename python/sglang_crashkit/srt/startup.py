"""Wait in place of upstream until every rank of a server is ready, and report which rank fails, and why.

The launching process and the data-parallel controller do this.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

from sglang_crashkit.kernel import procfs, titles
from sglang_crashkit.kernel.pidfd import ExitStatus
from sglang_crashkit.settings import Settings
from sglang_crashkit.srt import crash_exit
from sglang_crashkit.srt.hooks import never_raises
from sglang_crashkit.srt.redaction import redact
from sglang_crashkit.srt.supervisor import STATUS_SECS, TITLE_SECS, Child, Clock, Supervisor, read_title

logger = logging.getLogger(__name__)

#: Ranks that die of the same cause die together: after the first death, wait this long for others, in seconds.
_SETTLE_SECS = 0.02
#: The kernel closes a dying process's pipes this long before it reports the process's end, in seconds, at most.
_DYING_SECS = 0.2
#: Time limit for the rest of a message that has begun to arrive, in seconds.
_MESSAGE_SECS = 10.0
_RECEIVING_SECS = 0.05
_FIRST_REPORT_SECS, _MAX_REPORT_SECS = 30.0, 600.0
_MAX_MESSAGE = 4000
_MAX_CHILDREN = 16


class StartupError(RuntimeError):
    """A rank will not get ready; `children` are the processes that failed or are late, the first one noticed first.

    `event` is the event that reports this to the crash handler.
    """

    def __init__(self, children: Sequence[Child], message: str, event: str = "launch_failed") -> None:
        super().__init__(message)
        self.children = tuple(children)
        self.event = event


class Startup(Supervisor):
    """One wait until all children have reported that they are ready; it began `waited_secs` ago.

    The list of children may grow until `all_known` returns true. An exception of `all_known` ends the wait.
    """

    def __init__(
        self,
        children: Sequence[Child],
        all_known: Callable[[], bool] = lambda: True,
        waited_secs: float = 0.0,
        clock: Clock | None = None,
    ) -> None:
        super().__init__(children, clock)
        self._all_known = all_known
        self._timeout_secs = Settings.from_environ().startup_timeout_secs
        self._interval = _FIRST_REPORT_SECS
        self.began = self.clock.now() - waited_secs
        self._report_due = self.clock.now() + self._interval
        self._receiving: dict[Child, _Receipt] = {}

    def run(self) -> list[Any]:
        """Return the report of each child with a pipe, in order; log meanwhile which children are not ready.

        Raises:
            StartupError: a child died, closed its pipe, sent another message, failed, or the time limit has passed.
        """
        try:
            while not (self._all_known() and all(child.ready for child in self.children)):
                for child in list(self.children):
                    child.hold()
                    child.look_up_title()
                readers = {
                    child.reader.fileno(): child
                    for child in list(self.children)
                    if not child.ready and child not in self._receiving
                }
                for descriptor in self.wait(self._patience(), readers):
                    child = readers[descriptor]
                    self._receiving[child] = _Receipt(child.reader, self.clock.now())
                for child, receipt in list(self._receiving.items()):
                    self._take(child, receipt)
                self._raise_deaths()
                self._act_on_time()
            self.wait(0.0)
            self._raise_deaths()
        except StartupError as error:
            # Log it at once: a signal may end this process before a caller logs the error.
            logger.error("crash kit: %s", error)
            raise
        finally:
            self.close()
        return [child.info for child in self.children if child.reader is not None]

    def deaths(self) -> StartupError | None:
        """Return the error that `run` would raise now for ranks that ended; for a signal handler that interrupts `run`.

        A rank that fails because another one died may send its signal before `run` has seen that death.
        """
        self.wait(0.0)
        try:
            self._raise_deaths()
        except StartupError as error:
            logger.error("crash kit: %s", error)
            return error
        return None

    def _patience(self) -> float:
        """Return the time until the next check is due, in seconds."""
        now = self.clock.now()
        dues = [self._report_due - now]
        if self._timeout_secs:
            dues.append(self.began + self._timeout_secs - now)
        if self._receiving:
            dues.append(_RECEIVING_SECS)
        if not self._all_known() or any(not child.has_title for child in list(self.children)):
            dues.append(TITLE_SECS)
        return max(0.0, min(dues))

    def _take(self, child: Child, receipt: _Receipt) -> None:
        if receipt.thread.is_alive():
            self.clock.join(receipt.thread, _RECEIVING_SECS)
        if receipt.thread.is_alive():
            if self.clock.now() < receipt.began + _MESSAGE_SECS:
                return
            raise _failure(child, f"began a message and did not finish it within {_MESSAGE_SECS:g} s")
        del self._receiving[child]
        child.look_up_title()
        error, data = receipt.error, receipt.data
        if isinstance(error, (EOFError, ConnectionError)):
            if not self.ended():
                self.wait(_DYING_SECS)
            self._raise_deaths()
            rest = ", and its process lives" if child.pid is not None else "; its process is not known"
            raise _failure(child, f"closed its pipe before it was ready{rest}")
        if error is not None:
            text = f"sent a message that cannot be read ({type(error).__name__}: {str(error)[:200]})"
            raise _failure(child, text)
        if not isinstance(data, dict) or "status" not in data:
            raise _failure(child, f"sent a message without a status, of type {type(data).__name__}")
        if data["status"] != "ready":
            words = "Initialization failed. Please see the error messages above. "
            raise _failure(child, f"reported status {str(data['status'])[:200]!r}", words)
        child.info, child.ready = data, True

    def _raise_deaths(self) -> None:
        dead = self.ended()
        if not dead:
            return
        deadline = self.clock.now() + _SETTLE_SECS
        while any(child.pid is not None for child in self.living()) and (left := deadline - self.clock.now()) > 0:
            self.wait(left)
        dead = self.ended()
        self.learn_exits(dead, STATUS_SECS)
        names, times = [_short(child) for child in dead], [child.ended_at for child in dead]
        codes = ", ".join(str(_exit_code(child.exit)) for child in dead)
        subject = " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
        lines = [f"{subject} died during initialization (exit code: {codes})."]
        for child, when in zip(dead, times, strict=True):
            order = ""
            if len(dead) > 1 and when == times[0]:
                order = ", first" if times.count(when) == 1 else ", at the same moment as the first"
            waited = when - self.began
            lines.append(f"{child.label()} {child.how_it_ended()}, {waited:.1f} s after the wait began{order}.")
        living = self.living()
        if any(child.reader is not None for child in living):
            lines.append(f"Ready: {_names(living, ready=True)}; not ready: {_names(living, ready=False)}.")
        raise StartupError(dead, " ".join(lines))

    def _act_on_time(self) -> None:
        now, children = self.clock.now(), list(self.children)
        silent = [child for child in children if not child.ready]
        if silent and self._timeout_secs and now >= self.began + self._timeout_secs:
            limit = f"{self._timeout_secs:g} s (SGLANG_CRASHKIT_STARTUP_TIMEOUT_SECS)"
            states = " ".join(f"{child.label()}: {_state(child)}." for child in silent)
            late, ready = _names(children, ready=False), _names(children, ready=True)
            words = f"{late} not ready within {limit}. {states} Ready: {ready}."
            raise StartupError(silent, words, "startup_timeout")
        if silent and now >= self._report_due:
            self._interval = min(self._interval * 2, _MAX_REPORT_SECS)
            self._report_due = now + self._interval
            total = sum(child.reader is not None for child in children)
            states = "; ".join(f"{child.label()}: {_state(child)}" for child in silent)
            words = f"not ready after {now - self.began:.0f} s: {len(silent)} of {total} ({states})"
            logger.warning("crash kit: %s; ready: %s", words, _names(children, ready=True))


def _failure(child: Child, text: str, words: str = "") -> StartupError:
    return StartupError([child], f"{words}{child.label()} {text}.")


class _Receipt:
    """A message that is being received, by a separate thread: an incomplete message blocks its reader."""

    def __init__(self, reader: Any, began: float) -> None:
        self._reader = reader
        self.began = began
        self.data: Any = None
        self.error: Exception | None = None
        self.thread = threading.Thread(target=self._read, name="crashkit-startup", daemon=True)
        try:
            self.thread.start()
        except RuntimeError:
            # The system gives no thread. Read in this thread, as upstream does.
            self._read()

    def _read(self) -> None:
        try:
            self.data = self._reader.recv()
        except Exception as error:  # noqa: BLE001 - unpickling may raise anything
            self.error = error


def readers_of(children: Iterable[Child]) -> list[Any]:
    """Return the pipes of `children` for another reader; a pipe that was read is replaced by its message."""
    return [
        SimpleNamespace(recv=lambda child=child: child.info) if child.ready else child.reader
        for child in children
        if child.reader is not None
    ]


def can_watch(readers: Iterable[Any], processes: Iterable[Any]) -> bool:
    """Return whether all of these are real pipes and processes, not stand-ins such as those for Ray actors."""
    try:
        descriptors = [reader.fileno() for reader in readers] + [process.sentinel for process in processes]
    except (AttributeError, OSError, TypeError, ValueError):
        return False
    return all(type(descriptor) is int for descriptor in descriptors)


@never_raises
def report(error: StartupError) -> dict[str, Any] | None:
    """Report `error` to the crash handler, wait until the incident is complete, and return the answer or None.

    Waits at most ``SGLANG_CRASHKIT_BUDGET_SECS``, or longer if the handler asks for more time.
    """
    named = [child for child in error.children if child.pid is not None]
    names = {str(child.pid): child.title or child.name or _short(child) for child in named}
    # `multiprocessing` may have reaped a child before the crash handler looked for the first time.
    codes = {str(child.pid): _exit_code(child.exit) for child in named if child.exit.known}
    words = redact(str(error)[:_MAX_MESSAGE])
    return crash_exit.report(error.event, message=words, titles=names, exit_codes=codes)


def _short(child: Child) -> str:
    """Return the child's label without the part in parentheses."""
    return child.label().partition(" (")[0]


def _exit_code(status: ExitStatus) -> int | None:
    """Return an exit code as `multiprocessing` writes it, negative for a signal; None if unknown."""
    if status.signal is None:
        return status.code
    number = getattr(signal, status.signal, None)
    return -int(number) if number is not None else -int(status.signal.removeprefix("SIG"))


def _names(children: Iterable[Child], *, ready: bool) -> str:
    # Children without a pipe send no report.
    names = [_short(child) for child in children if child.reader is not None and child.ready is ready]
    return ", ".join(names) or "none"


def _state(child: Child) -> str:
    """Return the process's state from ``/proc``, in words."""
    if child.pid is None:
        return "its process is not known"
    status = procfs.read_status(child.pid)
    if not status:
        return "gone"
    wchan = procfs.read_wchan(child.pid)
    parts = [status.get("State", "?") + (f" in {wchan}" if wchan else "")]
    parts += [f"{name} {status[name]}" for name in ("Threads", "VmRSS") if name in status]
    if titles.role_of(child.title) == "data_parallel_controller":
        found = []
        for below in sorted(procfs.TreeScanner(child.pid).scan() - {child.pid}):
            stat = procfs.read_stat(below)
            # Reading the name never blocks. Reading the title, which has the rank, may.
            if stat is not None and stat.comm.startswith("sglang::schedul"):
                found.append(f"{read_title(below) or stat.comm} (pid {below}, {stat.state})")
        schedulers = ", ".join(found[:_MAX_CHILDREN]) or "no scheduler has its title yet"
        parts.append(f"below it {schedulers}")
    return ", ".join(parts)
