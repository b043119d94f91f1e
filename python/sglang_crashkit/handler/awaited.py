"""What the incident at hand waits for: an announcement, the server's answer, the end of its dump."""

from __future__ import annotations

import time

#: A soft exit is a shutdown when it is announced within this time, in seconds.
_SOFT_HOLD_SECS = 1.0
#: A rank that raised tells the server itself; after this time, in seconds, the handler does.
_EXCEPTION_GRACE_SECS = 0.5
#: The server answers SIGQUIT by saving its requests; this long is waited for it to begin, in seconds.
ANSWER_SECS = 5.0


class Awaited:
    """What one incident waits for; times are by the monotonic clock.

    Attributes:
        observed: the server goes on, so that what comes next is another incident.
        may_end: upstream may end it for what happened, which would then belong to the same incident.
        pardonable: the server was asked to end before, and it is no incident where it goes on or ends in good order.
    """

    def __init__(self) -> None:
        self.observed = False
        self.may_end = False
        self.pardonable = False
        self._soft_since: float | None = None
        self._quit_due: float | None = None
        self._answer_due: float | None = None
        self._observed_due: float | None = None
        self._dump_begun = False
        self._dumping: set[int] = set()

    def hold(self) -> None:
        """Judge the exits a moment later: they may be a shutdown whose announcement is on its way."""
        self._soft_since = time.monotonic()

    def harden(self) -> None:
        """Take it for what it is: no shutdown would say this."""
        self._soft_since = None

    @property
    def may_be_shutdown(self) -> bool:
        """Whether nothing but exits that an announcement would explain was seen."""
        return self._soft_since is not None and not self._dump_begun

    def await_server(self, *, soft: bool) -> None:
        """Expect the server to notice an exit; tell it at once, or where the exit is soft in a moment."""
        self._quit_due = time.monotonic() + (_SOFT_HOLD_SECS if soft else 0.0)

    def await_exception(self) -> None:
        """Expect the rank that raised to tell the server."""
        self._quit_due = time.monotonic() + _EXCEPTION_GRACE_SECS

    def await_answer(self) -> None:
        """Expect the server, which was told of a death, to begin to save its requests."""
        self._answer_due = time.monotonic() + ANSWER_SECS

    def await_dump(self, pid: int) -> None:
        """Expect process `pid` to say when it has saved its requests."""
        self._dump_begun = True
        self.observed = False
        self._observed_due = None
        self._dumping.add(pid)
        self._quit_due = self._answer_due = self._soft_since = None

    def end_dump(self, pid: int) -> bool:
        """Note that process `pid` saves its requests no longer; say whether nobody else does."""
        self._dumping.discard(pid)
        return not self._dumping

    def is_dumping(self, pid: int) -> bool:
        """Say whether process `pid` saves its requests."""
        return pid in self._dumping

    def observe(self, seconds: float) -> None:
        """Note that the incident tells of a server that goes on, unless more comes within so many seconds."""
        self.observed = True
        self._observed_due = time.monotonic() + seconds

    def let_go(self) -> None:
        """Wait for nothing any more but the end of what was told to end."""
        self._quit_due = self._answer_due = self._observed_due = None

    # -- time

    def next_due(self) -> float | None:
        """Return when something of it is due, None where nothing is."""
        soft_due = None if self._soft_since is None else self._soft_since + _SOFT_HOLD_SECS
        dues = [due for due in (self._quit_due, self._answer_due, self._observed_due, soft_due) if due is not None]
        return min(dues, default=None)

    def take_quit(self) -> bool:
        """Say once whether the server is to be told of a death by now; nobody is told while it may be a shutdown."""
        now = time.monotonic()
        if self._soft_since is not None and now >= self._soft_since + _SOFT_HOLD_SECS:
            self._soft_since = None
        if self._quit_due is None or now < self._quit_due or self._soft_since is not None:
            return False
        self._quit_due = None
        return True

    @property
    def is_observed_long_enough(self) -> bool:
        """Whether an incident of a server that goes on is whole."""
        return self._observed_due is not None and time.monotonic() >= self._observed_due

    @property
    def has_no_answer(self) -> bool:
        """Whether the server should have begun to save its requests by now."""
        return self._answer_due is not None and time.monotonic() >= self._answer_due
