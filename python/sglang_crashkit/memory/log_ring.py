"""The last log records of a process, in memory that outlives it; see `ring`."""

from __future__ import annotations

import struct
from typing import NamedTuple

from sglang_crashkit.memory.ring import RingReader, RingWriter

#: Of the name of a logger and what it said so many bytes are kept.
MAX_BYTES = 2048
#: More are not kept: a ring of them takes 21 MB.
MAX_RECORDS = 10_000
#: What the ring needs for the frame of a record, at most.
_FRAME_BYTES = 64
_HEAD = struct.Struct("<dH")  # seconds since the epoch, level


class LogRecord(NamedTuple):
    """What was logged, at so many seconds since the epoch; `level` is as `logging` numbers them."""

    seconds: float
    level: int
    logger: str
    text: str


class LogWriter(RingWriter):
    """Notes the log records of this process, at least so many, each as long as it may be; for one thread at a time.

    Raises:
        RingError: there is no memory for it.
    """

    def __init__(self, records: int) -> None:
        size = 4096 + min(records, MAX_RECORDS) * (_HEAD.size + MAX_BYTES + _FRAME_BYTES)
        super().__init__(size, "sglang-crashkit-log")

    def note(self, seconds: float, level: int, logger: str, text: str) -> None:
        """Note a record; what is longer than `MAX_BYTES` is cut.

        Raises:
            ValueError: the ring is closed.
            RingError: there is no more memory.
        """
        said = f"{logger}\0{text}".encode(errors="backslashreplace")
        self.append(_HEAD.pack(seconds, level) + said[:MAX_BYTES])


def read_log(descriptor: int, most: int) -> list[LogRecord]:
    """Return the last records of a ring, `most` of them, oldest first.

    Raises:
        RingError: it cannot be read or is no ring.
    """
    last = sorted(RingReader(descriptor).records(), key=lambda record: record.sequence)[-most:]
    found = []
    for record in last:
        if len(record.payload) >= _HEAD.size:
            seconds, level = _HEAD.unpack_from(record.payload)
            logger, _, text = record.payload[_HEAD.size :].decode(errors="replace").partition("\0")
            found.append(LogRecord(seconds, level, logger, text))
    return found
