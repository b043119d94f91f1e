"""A node of a rank above 0: it ends with any of its schedulers, at once.

Upstream waits there for one scheduler after the other, in order and behind a ``/health`` that always answers 200, and
ends with 0 whatever they died of. Its schedulers end with 0 when rank 0, which alone is asked to end, tells them to.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from multiprocessing import connection
from typing import Any

from sglang_crashkit.incident.exit_status import status_of_exit
from sglang_crashkit.settings import Settings
from sglang_crashkit.srt import crash_exit
from sglang_crashkit.srt.hooks import never_raises, notify, request
from sglang_crashkit.srt.startup_report import Member
from sglang_crashkit.srt.utils.common import end_after_crash

logger = logging.getLogger(__name__)

_STATUS_SECS = 1.0


class LocalSchedulers:
    """The schedulers of this node, and its data-parallel controller.

    Args:
        processes: as of `multiprocessing.Process`, all of them ready.
    """

    def __init__(self, processes: Sequence[Any]) -> None:
        self._members = [Member("", process, None) for process in processes]
        self._ended: list[Member] = []
        self._first_end: float | None = None
        self._settings = Settings.from_environ()
        self._lock = threading.Lock()

    def watch(self) -> None:
        """End this process when one of them fails; return when all have ended because they were told to."""
        while self._living() and not self.have_failed():
            signs = [sign for member in self._living() for sign in member.signs_of_death()]
            connection.wait(signs, None if self._first_end is None else self._patience())
        if crash_exit.has_begun():
            end_after_crash()

    def have_failed(self) -> bool:
        """Look at them, and say whether one failed; the incident is whole then.

        To be called before this process does anything that their end may lead to; waits for the crash handler at most
        ``SGLANG_CRASHKIT_BUDGET_SECS``.
        """
        if not self._lock.acquire(timeout=self._settings.exit_secs):
            return crash_exit.has_begun()
        try:
            if not crash_exit.has_begun():
                self._look()
            return crash_exit.has_begun()
        finally:
            self._lock.release()

    def _look(self) -> None:
        for member in self._living():
            member.look_up_title()
        for member in self._living():
            if connection.wait(member.signs_of_death(), 0):
                member.read_exit(_STATUS_SECS)
                self._ended.append(member)
                if member.exit.code != 0:
                    self._fail(member, f"{member.label()} {member.how_it_ended()}")
                    return
                self._note_end()
        if self._first_end is not None and self._living() and self._patience() <= 0:
            first = self._ended[0]
            names = ", ".join(member.label() for member in self._living())
            self._fail(first, f"{first.label()} {first.how_it_ended()}, and this did not follow: {names}")

    def _note_end(self) -> None:
        if self._first_end is None:
            self._first_end = time.monotonic()
            # Told by rank 0: the others are about to follow.
            notify("draining")

    def _fail(self, member: Member, message: str) -> None:
        logger.error("crash kit: %s; this node ends", message)
        crash_exit.begin(status_of_exit(member.exit), self._settings.budget_secs + self._settings.end_secs)
        wait = crash_exit.await_evidence
        crash_exit.learn(request("child_failed", self._settings.budget_secs, on_wait=wait, message=message))

    def _living(self) -> list[Member]:
        return [member for member in self._members if member not in self._ended]

    def _patience(self) -> float:
        assert self._first_end is not None
        return self._first_end + self._settings.end_secs - time.monotonic()


@never_raises
def watch_local_schedulers(processes: Sequence[Any]) -> None:
    """Watch the schedulers of this node from a thread of their own, as long as they run.

    Args:
        processes: see `LocalSchedulers`.
    """
    if not crash_exit.ends_with_the_server():
        return
    schedulers = LocalSchedulers(processes)
    crash_exit.ask_before_the_end(schedulers.have_failed)
    threading.Thread(target=never_raises(schedulers.watch), name="crashkit-follower", daemon=True).start()
