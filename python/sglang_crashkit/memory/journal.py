"""The request journal: what a process of the server was asked to do, in memory that outlives it.

A request is noted when it arrives, with its inputs and sampling parameters, and again, in a few bytes, when it ends.
The memory is a `ring`, in which an unfinished request outlives finished ones.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from sglang_crashkit.memory.request_record import decode_request, encode_begin, encode_end, read_head
from sglang_crashkit.memory.ring import RingReader, RingWriter

#: Of the requests that ended those count that did within this time before the last event, in seconds. SGLang keeps as
#: much in memory (``TokenizerManager.record_request_for_crash_dump``).
KEPT_SECS = 300.0


class JournalWriter:
    """Notes the requests of this process in so many bytes; for one thread.

    Raises:
        RingError: there is no memory for it.
    """

    def __init__(self, size: int) -> None:
        self._ring = RingWriter(size)
        self._number = 0

    @property
    def fd(self) -> int:
        """The descriptor to be passed on to whoever reads it."""
        return self._ring.fd

    @property
    def lost(self) -> int:
        """How many unfinished requests found no room any more."""
        return self._ring.lost

    def begin(self, fields: Mapping[str, Any] | bytes, text: object = None, input_ids: object = None) -> int:
        """Note a request that arrived; see `encode_begin`.

        Returns:
            A number for `end`.

        Raises:
            ValueError: the journal is closed.
            RingError: there is no more memory.
        """
        self._number += 1
        record = encode_begin(self._number, time.time(), fields, text, input_ids, self._ring.max_payload)
        self._ring.append(record, hold=self._number)
        return self._number

    def end(self, number: int, *, finished: bool) -> None:
        """Note that the request that `begin` gave this number ended: it was answered, or dropped.

        Raises:
            ValueError: the journal is closed.
            RingError: there is no more memory.
        """
        self._ring.release(number)
        self._ring.append(encode_end(number, time.time(), finished=finished))

    def switch_off(self) -> None:
        """Have nobody believe the journal any more, which knows of no end from now on.

        Raises:
            ValueError: the journal is closed.
        """
        self._ring.invalidate()

    def close(self) -> None:
        """Write no more; whoever it was passed to still has it."""
        self._ring.close()


class JournaledRequest(NamedTuple):
    """A request that a journal tells of.

    Attributes:
        arrived, ended: since the epoch; None for the end of one that was under way.
        finished: it ended because it was answered, and was not dropped.
        offset, sequence: where its record lies; see `Record`.
    """

    arrived: float
    ended: float | None
    finished: bool
    offset: int
    sequence: int


class JournalReader:
    """Reads the journal of one process, dead or alive, and little of it at a time; its descriptor must stay open.

    Attributes:
        requests: the unfinished ones, oldest first; then those that ended within `KEPT_SECS`, latest first.
        latest: when something was noted last, since the epoch; 0 where nothing was.
        lost: how many unfinished ones found no room.
        torn: how many records are cut off.

    Raises:
        RingError: it cannot be read or is no journal.
    """

    def __init__(self, descriptor: int) -> None:
        self._ring = RingReader(descriptor)
        self.lost = 0
        self.latest = 0.0
        self.requests = self._collect()
        self.torn = self._ring.torn

    def load(self, request: JournaledRequest) -> dict[str, Any] | None:
        """Return all that is known of a request, see `decode_request`; None where it was overwritten meanwhile.

        Raises:
            RingError: it cannot be read.
        """
        record = self._ring.payload(request.offset, request.sequence)
        return None if record is None else decode_request(record)

    def _collect(self) -> list[JournaledRequest]:
        begun: dict[int, tuple[int, int, float]] = {}
        ends: dict[int, tuple[float, bool]] = {}
        newest = -1
        for record in self._ring.records():
            if record.sequence > newest:
                newest, self.lost = record.sequence, record.lost
            head = read_head(record.payload)
            if head is None:
                continue
            self.latest = max(self.latest, head.seconds)
            if not head.begun:
                ends[head.number] = head.seconds, head.finished
            elif head.number not in begun or begun[head.number][0] < record.sequence:
                # One that was held may be there twice.
                begun[head.number] = record.sequence, record.offset, head.seconds
        since = self.latest - KEPT_SECS
        unfinished, ended = [], []
        for number, (sequence, offset, arrived) in sorted(begun.items()):
            end = ends.get(number)
            if end is None:
                unfinished.append(JournaledRequest(arrived, None, False, offset, sequence))
            elif end[0] > since:
                ended.append(JournaledRequest(arrived, *end, offset, sequence))
        return unfinished + sorted(ended, key=lambda request: request.ended or 0.0, reverse=True)
