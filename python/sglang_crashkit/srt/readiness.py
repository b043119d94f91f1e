"""Wait until every rank of a server has said that it is ready, or until one cannot any more.

All pipes and all processes are watched at once, a process by its sentinel and by pidfd, so that any death ends the wait
when it happens, whoever was being read and whoever was ready before.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing import connection
from typing import Any, Literal

from sglang_crashkit.srt import startup_report
from sglang_crashkit.srt.startup_report import Member

Kind = Literal["died", "closed", "garbled", "failed", "timeout"]

#: Ranks that die of the same cause die together; this long, in seconds, the others are given to be seen dead.
_SETTLE_SECS = 0.02
#: The kernel closes a dying process's pipes before it tells of its end; this long, in seconds, at most.
_DYING_SECS = 0.2
_STATUS_SECS = 1.0
#: A message that was begun is whole within this time, in seconds.
_MESSAGE_SECS = 10.0
_FIRST_REPORT_SECS = 30.0
_LAST_REPORT_INTERVAL_SECS = 600.0
_TITLES_SECS = 0.25
_RECEIVING_SECS = 0.05


class StartupError(RuntimeError):
    """A rank will not get ready.

    Attributes:
        kind: ``died``, ``closed`` (its pipe, while it lives), ``garbled`` (its message), ``failed`` (by its own word)
            or ``timeout``.
        members: those that it is about, the one seen first first.
    """

    def __init__(self, kind: Kind, members: Sequence[Member], message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.members = tuple(members)


def no_more_to_come() -> bool:
    """Say that the members of a wait are complete."""
    return True


class Readiness:
    """One wait.

    Args:
        members: who is waited for; may grow while `all_known` is false.
        timeout_secs: after this time, in seconds, silence is an error; 0 for never.
        on_silence: told after 30 s of silence, and again after ever longer intervals, what there is to say.
        all_known: whether `members` is complete; what it raises ends the wait.
        first_report_secs: when `on_silence` is called first, in seconds.
        waited_secs: how long they had been waited for before, in seconds.
    """

    def __init__(
        self,
        members: Sequence[Member],
        *,
        timeout_secs: float = 0.0,
        on_silence: Callable[[str], object] | None = None,
        all_known: Callable[[], bool] = no_more_to_come,
        first_report_secs: float = _FIRST_REPORT_SECS,
        waited_secs: float = 0.0,
    ) -> None:
        self._members = members
        self._timeout_secs = timeout_secs
        self._on_silence = on_silence
        self._all_known = all_known
        self._interval = first_report_secs
        self._began = time.monotonic() - waited_secs
        self._report_due = time.monotonic() + first_report_secs
        self._receiving: dict[int, _Receipt] = {}  # by id of the member

    def wait(self) -> list[Any]:
        """Return what each member with a pipe sent, in order.

        Raises:
            StartupError: one died, closed its pipe, sent something else, failed, or all took too long.
        """
        try:
            while not (self._all_known() and all(member.ready for member in self._members)):
                self._turn()
            dead = self._look_for_dead(list(self._members), 0.0)
            if dead:
                raise self._died(dead)
        finally:
            for member in self._members:
                member.let_go()
        return [member.info for member in self._members if member.reader is not None]

    def _turn(self) -> None:
        members = list(self._members)
        for member in members:
            member.look_up_title()
        reading = {
            member.reader: member for member in members if not member.ready and id(member) not in self._receiving
        }
        objects = [*reading, *(thing for member in members for thing in member.signs_of_death())]
        found = _wait(objects, self._patience(members))
        for reader, member in reading.items():
            if reader in found:
                self._receiving[id(member)] = _Receipt(reader)
        for member in members:
            if id(member) in self._receiving:
                self._take(member)
        dead = self._look_for_dead(members, 0.0)
        if dead:
            raise self._died(dead)
        self._act_on_time(members)

    def _patience(self, members: Sequence[Member]) -> float:
        """Return how long nothing needs to be looked at, in seconds."""
        now = time.monotonic()
        dues = [self._report_due - now]
        if self._timeout_secs:
            dues.append(self._began + self._timeout_secs - now)
        if self._receiving:
            dues.append(_RECEIVING_SECS)
        if not self._all_known() or any(not member.has_title for member in members):
            dues.append(_TITLES_SECS)
        return max(0.0, min(dues))

    def _take(self, member: Member) -> None:
        receipt = self._receiving[id(member)]
        if not receipt.is_done(_RECEIVING_SECS):
            if receipt.age() < _MESSAGE_SECS:
                return
            text = f"began a message and did not finish it within {_MESSAGE_SECS:g} s"
            raise StartupError("garbled", [member], f"{member.label()} {text}.")
        del self._receiving[id(member)]
        member.look_up_title()
        error, data = receipt.error, receipt.data
        if isinstance(error, (EOFError, ConnectionError)):
            dead = self._look_for_dead(list(self._members), _DYING_SECS)
            if dead:
                raise self._died(dead)
            rest = ", and its process lives" if member.process is not None else "; its process is not known"
            text = f"closed its pipe before it was ready{rest}"
            raise StartupError("closed", [member], f"{member.label()} {text}.")
        if error is not None:
            text = f"sent a message that cannot be read ({type(error).__name__}: {str(error)[:200]})"
            raise StartupError("garbled", [member], f"{member.label()} {text}.")
        if not isinstance(data, dict) or "status" not in data:
            text = f"sent a message without a status, of type {type(data).__name__}"
            raise StartupError("garbled", [member], f"{member.label()} {text}.")
        if data["status"] != "ready":
            text = f"reported status {str(data['status'])[:200]!r}"
            message = f"Initialization failed. Please see the error messages above. {member.label()} {text}."
            raise StartupError("failed", [member], message)
        member.info, member.ready = data, True

    def _look_for_dead(self, members: Sequence[Member], patience_secs: float) -> list[Member]:
        found = _wait([thing for member in members for thing in member.signs_of_death()], patience_secs)
        return [member for member in members if any(thing in found for thing in member.signs_of_death())]

    def _died(self, first: list[Member]) -> StartupError:
        dead, now = list(first), time.monotonic()
        seconds = {id(member): now - self._began for member in first}
        deadline = now + _SETTLE_SECS
        while (remaining := deadline - time.monotonic()) > 0:
            others = [member for member in self._members if member not in dead and member.process is not None]
            if not others:
                break
            for member in self._look_for_dead(others, remaining):
                seconds[id(member)] = time.monotonic() - self._began
                dead.append(member)
        for member in dead:
            member.read_exit(_STATUS_SECS)
        living = [member for member in self._members if member not in dead]
        text = startup_report.of_deaths(dead, len(first), [seconds[id(member)] for member in dead], living)
        return StartupError("died", dead, text)

    def _act_on_time(self, members: Sequence[Member]) -> None:
        now = time.monotonic()
        silent = [member for member in members if not member.ready]
        if not silent:
            return
        if self._timeout_secs and now >= self._began + self._timeout_secs:
            ready = [member for member in members if member.ready]
            raise StartupError("timeout", silent, startup_report.of_timeout(silent, ready, self._timeout_secs))
        if now >= self._report_due:
            self._interval = min(self._interval * 2, _LAST_REPORT_INTERVAL_SECS)
            self._report_due = now + self._interval
            if self._on_silence is not None:
                ready = [member for member in members if member.ready and member.reader is not None]
                self._on_silence(startup_report.of_silence(silent, ready, now - self._began))


def _wait(objects: Sequence[Any], seconds: float) -> list[Any]:
    """Return which of `objects` are readable, at once when one is; an object may be named more than once."""
    named: dict[int, list[Any]] = {}
    for thing in objects:
        named.setdefault(thing if isinstance(thing, int) else thing.fileno(), []).append(thing)
    readable = connection.wait(list(named), seconds)
    return [thing for descriptor, things in named.items() if descriptor in readable for thing in things]


class _Receipt:
    """A message on its way: read by a thread of its own, because a message that was only begun blocks its reader."""

    def __init__(self, reader: Any) -> None:
        self._reader = reader
        self._began = time.monotonic()
        self.data: Any = None
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._read, name="crashkit-startup", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            self.data = self._reader.recv()
        except Exception as error:  # noqa: BLE001 - unpickling may raise anything
            self.error = error

    def is_done(self, patience_secs: float) -> bool:
        """Wait for the end of the message."""
        self._thread.join(patience_secs)
        return not self._thread.is_alive()

    def age(self) -> float:
        """Return the seconds since it began."""
        return time.monotonic() - self._began
