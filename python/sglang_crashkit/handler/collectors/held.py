"""Rings that processes of the server passed on: held here, so that they outlive every process of it."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import ClassVar

from sglang_crashkit.handler.processes import TrackedProcess
from sglang_crashkit.memory.ring import is_ring

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Held:
    """A ring: who writes it, or wrote it, and the descriptor by which it is held."""

    process: TrackedProcess
    descriptor: int

    @property
    def is_of_dead(self) -> bool:
        """Whether nobody writes it any more."""
        return self.process.exited_at is not None


class HeldRings:
    """The rings of one kind, of the server at hand.

    Attributes:
        held: all of them.
        taken: those of dead processes that the incident at hand has.
        dropped: how many were given back before any incident had them.
    """

    #: What is in them, for messages; and so many of dead processes are held, and of each living one. A tokenizer worker
    #: that ends by itself is started anew for ever, and a program may make one engine after the other.
    what: ClassVar[str]
    most_of_dead: ClassVar[int] = 4
    most_of_one: ClassVar[int] = 4

    def __init__(self) -> None:
        self.held: list[Held] = []
        self.taken: list[Held] = []
        self.dropped = 0

    def follow(self, process: TrackedProcess, descriptor: int | None) -> None:
        """Hold the ring of a process, which passed it on as `descriptor`, of this process; that stays open."""
        if descriptor is None or not is_ring(descriptor):
            logger.warning("%s (pid %d) passed on no %s", process.title, process.pid, self.what)
            return
        self.held.append(Held(process, os.dup(descriptor)))
        self._drop_oldest([held for held in self.held if held.is_of_dead], self.most_of_dead)
        self._drop_oldest([held for held in self.held if held.process is process], self.most_of_one)

    def remove_taken(self) -> None:
        """Give back what dead processes left and the incident holds, which is on the disk by now.

        A server that starts killed tokenizer workers anew would keep a ring of each, and tell of it again.
        """
        for held in self.taken:
            self._give_back(held)
        self.taken = []
        self.dropped = 0

    def keep(self) -> None:
        """Hold on to all: the incident could not be written."""
        self.taken = []

    def close(self) -> None:
        """Give all of them back."""
        for held in list(self.held):
            self._give_back(held)

    def _drop_oldest(self, held: list[Held], most: int) -> None:
        for oldest in held[: len(held) - most] if len(held) > most else ():
            self._give_back(oldest)
            self.dropped += 1
            logger.warning("the %s of %s (pid %d) is dropped", self.what, oldest.process.title, oldest.process.pid)

    def _give_back(self, held: Held) -> None:
        self.held.remove(held)
        os.close(held.descriptor)
