"""The request journal: what a process of the server was asked to do, in a file that outlives it.

A request is written down when it arrives, with its inputs and sampling parameters, and again, in a few bytes, when it
ends. The file is a `ring`, in which an unfinished request outlives finished ones.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from sglang_crashkit.core.request_record import (
    HEAD_BYTES,
    decode_request,
    encode_begin,
    encode_end,
    read_head,
)
from sglang_crashkit.core.ring import Record, RingReader, RingWriter

#: Of the requests that ended those count that did within this time before the last event, in seconds. SGLang keeps as
#: much in memory (``TokenizerManager.record_request_for_crash_dump``).
KEPT_SECS = 300.0


class JournalWriter:
    """Writes down the requests of this process; for one thread.

    Args:
        path: the file, which must not exist.
        size: how long the file may be, in bytes.

    Raises:
        RingError: the file cannot be made.
    """

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        self._ring = RingWriter(path, size)
        self._number = 0

    @property
    def lost(self) -> int:
        """How many unfinished requests found no room any more."""
        return self._ring.lost

    def begin(self, fields: Mapping[str, Any], text: object = None, input_ids: object = None) -> int:
        """Write down a request that arrived; see `encode_begin`.

        Returns:
            A number for `end`.

        Raises:
            ValueError: the journal is closed.
        """
        self._number += 1
        record = encode_begin(self._number, time.time(), fields, text, input_ids, self._ring.max_payload)
        self._ring.append(record, hold=self._number)
        return self._number

    def end(self, number: int, *, finished: bool) -> None:
        """Write down that a request ended.

        Args:
            number: what `begin` returned.
            finished: whether it was answered, and not dropped.

        Raises:
            ValueError: the journal is closed.
        """
        self._ring.release(number)
        self._ring.append(encode_end(number, time.time(), finished=finished))

    def close(self) -> None:
        """Write no more; the file stays."""
        self._ring.close()


class JournaledRequest:
    """A request that a journal tells of.

    Attributes:
        arrived: when, since the epoch.
        ended: when, since the epoch; None for one that was under way.
        finished: it ended because it was answered, and was not dropped.
    """

    def __init__(self, arrived: float, record: Record) -> None:
        self.arrived = arrived
        self.ended: float | None = None
        self.finished = False
        self.record = record


class JournalReader:
    """Reads the journal of one process, dead or alive.

    Attributes:
        requests: the unfinished ones, oldest first; then those that ended within `KEPT_SECS`, latest first.
        latest: when something was written last, since the epoch; 0 where nothing was.
        lost: how many unfinished ones found no room.
        torn: how many records are cut off.

    Raises:
        RingError: the file cannot be read or is no journal.
    """

    def __init__(self, path: Path) -> None:
        self._ring = RingReader(path, HEAD_BYTES)
        self.torn = self._ring.torn
        self.lost = self._ring.records[-1].lost if self._ring.records else 0
        self.latest = 0.0
        self.requests = self._collect()

    def load(self, request: JournaledRequest) -> dict[str, Any] | None:
        """Return all that is known of a request, see `decode_request`; None where it was overwritten meanwhile."""
        record = self._ring.payload(request.record)
        return None if record is None else decode_request(record)

    def close(self) -> None:
        """Give the file back."""
        self._ring.close()

    def __enter__(self) -> JournalReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _collect(self) -> list[JournaledRequest]:
        requests: dict[int, JournaledRequest] = {}
        for record in self._ring.records:
            head = read_head(record.head)
            if head is None:
                continue
            self.latest = max(self.latest, head.seconds)
            if head.begun:
                requests[head.number] = JournaledRequest(head.seconds, record)
            elif head.number in requests:
                requests[head.number].ended = head.seconds
                requests[head.number].finished = head.finished
        unfinished = [request for request in requests.values() if request.ended is None]
        ended = [r for r in requests.values() if r.ended is not None and r.ended > self.latest - KEPT_SECS]
        return unfinished + sorted(ended, key=lambda request: request.ended or 0.0, reverse=True)
