"""A heartbeat: a page of memory that a process of the server writes to and its crash handler reads.

A scheduler records its activity in it. Other processes that every answer needs record only that they make progress:
each pass of their event loop, or each message, counts as a round, and their words from 3 on are 0.

The page belongs to no file system (see `ring.map_sealed`): stores to a mapped file stall while the kernel writes the
page to a slow disk, and a killed process leaves a segment of ``/dev/shm`` behind.

::

    word 0   magic number and version of this layout
    word 1   PAUSED, BUSY, OFF and WAITING
    word 2   when the process last began a round of its event loop, in seconds
    word 3   when it last began a batch, in seconds, 0 before the first one
    word 4   how many batches it has begun
    word 5   how many requests the last batch has
    word 6   forward mode of the last batch, a number of the release
    word 7   how many input tokens the last batch has, if it is an extend
    word 8   when the current garbage collection of Python began, in seconds, 0 between two
    word 9   how many garbage collections took longer than `LONG_SECS`
    word 10  how long the last one of these took, in seconds
    word 11  when that one ended, in seconds

Words from 1 on are floating-point numbers of 64 bits, which Python makes and stores faster than integers of that size.
Each is stored and loaded by a single instruction and is independent of the others, so a reader needs no lock and never
sees half of a value. Times are of ``CLOCK_MONOTONIC``: all processes of a machine share it, it is never set, and it
stands still while the machine is suspended, as the scheduler does (``CLOCK_BOOTTIME`` goes on; see clock_gettime(2)).
"""

from __future__ import annotations

import mmap
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from sglang_crashkit.memory.ring import RingError, is_sealed, map_sealed

NAME = "sglang-crashkit-heartbeat"

FLAGS, LOOP_TIME, BATCH_TIME, BATCHES, REQUESTS, MODE, TOKENS = range(1, 8)
COLLECTING_SINCE, LONG_COLLECTIONS, COLLECTION_SECS, COLLECTION_ENDED = range(8, 12)
#: A garbage collection that takes longer is recorded as a long one, in seconds.
LONG_SECS = 1.0
#: The interval between two beats of an event loop in a process that is not a scheduler, in seconds.
BEAT_SECS = 1.0
#: The engine was paused by a request.
PAUSED = 1
#: The round handles a request that may take any time, such as an update of the weights.
BUSY = 2
#: The process has stopped its heartbeat.
OFF = 4
#: The process waits for the next message, which may take any time.
WAITING = 8

_VERSION = 3
MAGIC = (0x5347_4B49_5442_0000 | _VERSION).to_bytes(8, sys.byteorder)
BYTES = 96
#: Modes of a batch with input tokens; in other modes the number in word 7 is that of an earlier batch.
_EXTENDS = frozenset({"extend", "mixed", "split_prefill"})


@dataclass(frozen=True)
class Heartbeat:
    """The contents of a heartbeat; see the layout. Times are in seconds of the monotonic clock."""

    loop_at: float
    batch_at: float
    batches: int
    requests: int
    paused: bool
    is_busy: bool
    is_off: bool  # the process has stopped its heartbeat, which does not mean that it hangs
    mode: str = ""  # such as ``extend`` or ``decode``; empty if unknown
    tokens: int = 0
    is_waiting: bool = False  # the process waits for the next message, which may take any time
    #: When the current garbage collection began; 0 between two. Other threads collect garbage too, so this and the
    #: fields below are no sign that the scheduler makes progress.
    collecting_since: float = field(default=0.0, compare=False)
    long_collections: int = field(default=0, compare=False)
    collection_secs: float = field(default=0.0, compare=False)  # how long the last long one took
    collection_ended: float = field(default=0.0, compare=False)

    @property
    def in_batch(self) -> bool:
        """Whether a batch began in the last round; the round may be waiting for something else by now."""
        return self.batch_at > self.loop_at

    @property
    def at(self) -> float:
        """When the process last beat, in seconds of the monotonic clock."""
        return max(self.loop_at, self.batch_at)

    @property
    def doing(self) -> str:
        """The activity of the scheduler at its last beat, in words."""
        if self.in_batch:
            more = f" ({self.mode}{f' of {self.tokens:,} tokens' if self.tokens else ''})" if self.mode else ""
            return f"batch {self.batches}, of {self.requests} request{'' if self.requests == 1 else 's'}{more}"
        if self.is_busy:
            return "a control request"
        return "the event loop, paused" if self.paused else "the event loop, without a batch"


class HeartbeatWriter:
    """The writer's end of a heartbeat: the process stores to `words`, one at a time; a reader gets `fd`.

    Raises:
        RingError: the kernel gives no memory or no descriptor.
    """

    def __init__(self) -> None:
        self.fd, self._map = map_sealed(BYTES, NAME, MAGIC, BYTES)
        self.words = memoryview(self._map).cast("d")
        self.words[LOOP_TIME] = time.monotonic()

    def close(self) -> None:
        """Unmap the memory and close its descriptor."""
        self.words.release()
        self._map.close()
        os.close(self.fd)


class HeartbeatReader:
    """The crash handler's end of a `descriptor`, which stays open; `modes` names the forward modes by number.

    Raises:
        RingError: it is not a heartbeat, has another layout, or is not sealed, so that it may shrink while it is read.
    """

    def __init__(self, descriptor: int, modes: Mapping[int, str] | None = None) -> None:
        self._modes = modes or {}
        if not is_sealed(descriptor, BYTES, MAGIC):
            raise RingError("it is not a heartbeat, or it has another layout")
        self._map = mmap.mmap(descriptor, BYTES, prot=mmap.PROT_READ)
        self._words = memoryview(self._map).cast("d")

    def read(self) -> Heartbeat:
        """Return the current contents of the heartbeat; any contents of the memory are valid."""
        said = [time_or_zero(word) for word in self._words]
        flags, batches = int(said[FLAGS]), int(said[BATCHES])
        mode = self._modes.get(int(said[MODE]), "") if batches else ""
        return Heartbeat(
            loop_at=said[LOOP_TIME],
            batch_at=said[BATCH_TIME],
            batches=batches,
            requests=int(said[REQUESTS]),
            paused=bool(flags & PAUSED),
            is_busy=bool(flags & BUSY),
            is_off=bool(flags & OFF),
            is_waiting=bool(flags & WAITING),
            collecting_since=said[COLLECTING_SINCE],
            long_collections=int(said[LONG_COLLECTIONS]),
            collection_secs=said[COLLECTION_SECS],
            collection_ended=said[COLLECTION_ENDED],
            mode=mode,
            tokens=int(said[TOKENS]) if mode in _EXTENDS else 0,
        )

    def close(self) -> None:
        """Unmap the memory."""
        self._words.release()
        self._map.close()


def time_or_zero(seconds: float) -> float:
    """Return a time of the monotonic clock, or a count; 0 in place of an impossible value."""
    return seconds if 0 <= seconds < 2**33 else 0.0
