"""The request journals of a server: held in memory since its processes passed them on, and read for an incident."""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass

from sglang_crashkit.handler.incident_run import IncidentRun
from sglang_crashkit.handler.journal_export import export_requests
from sglang_crashkit.handler.tree import TrackedProcess
from sglang_crashkit.memory.ring import is_ring

logger = logging.getLogger(__name__)

#: The longest that an incident waits for its journals, in seconds: a full one of 32 MiB takes about one.
_EXPORT_SECS = 3.0
#: So many journals of dead processes are held, and of each living one. A tokenizer worker that ends by itself is
#: started anew for ever, and a program may make one engine after the other.
_MOST_OF_DEAD, _MOST_OF_ONE = 4, 4


@dataclass(eq=False)
class _Held:
    """A journal: who writes it, or wrote it, and the descriptor by which it is held."""

    process: TrackedProcess
    descriptor: int

    @property
    def is_of_dead(self) -> bool:
        return self.process.exited_at is not None


class RequestJournals:
    """The journals of the server at hand, which outlive every process of it."""

    def __init__(self) -> None:
        self._held: list[_Held] = []
        self._taken: list[_Held] = []
        self._dropped = 0

    def follow(self, process: TrackedProcess, descriptor: int | None) -> None:
        """Hold the journal of a process, which passed it on as `descriptor`, of this process; that stays open."""
        if descriptor is None or not is_ring(descriptor):
            logger.warning("%s (pid %d) passed on no request journal", process.title, process.pid)
            return
        self._held.append(_Held(process, os.dup(descriptor)))
        self._drop_oldest([held for held in self._held if held.is_of_dead], _MOST_OF_DEAD)
        self._drop_oldest([held for held in self._held if held.process is process], _MOST_OF_ONE)

    def add_to(self, run: IncidentRun) -> None:
        """Put what the journals hold now into an incident that is about to be finished."""
        if not self._held:
            return
        # Before they are read: whoever ends meanwhile may have written more.
        dead = [held for held in self._held if held.is_of_dead]
        began = time.time() - (time.monotonic() - run.opened)
        journals = [(held.process.pid, held.descriptor) for held in self._held]
        told = export_requests(journals, run.path, _EXPORT_SECS, run.charge, seconds=began)
        if self._dropped:
            words = f"the journals of {self._dropped} processes that had ended before were dropped"
            told.reason = f"{told.reason}; {words}" if told.reason else words
        run.set_journal(told)
        self._taken = dead

    def remove_taken(self) -> None:
        """Give back what dead processes left and the incident holds, which is on the disk by now.

        A server that starts killed tokenizer workers anew would keep a journal of each, and tell of its requests again.
        """
        for held in self._taken:
            self._give_back(held)
        self._taken = []
        self._dropped = 0

    def keep(self) -> None:
        """Hold on to all: the incident could not be written."""
        self._taken = []

    def close(self) -> None:
        """Give all of them back."""
        for held in list(self._held):
            self._give_back(held)

    def _drop_oldest(self, held: list[_Held], most: int) -> None:
        for oldest in held[: len(held) - most] if len(held) > most else ():
            self._give_back(oldest)
            self._dropped += 1
            logger.warning("the request journal of %s (pid %d) is dropped", oldest.process.title, oldest.process.pid)

    def _give_back(self, held: _Held) -> None:
        self._held.remove(held)
        os.close(held.descriptor)
