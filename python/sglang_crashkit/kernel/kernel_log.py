"""The kernel's log, as far as this process may read it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

KERNEL_LOG = "/dev/kmsg"


def lines_since(since: float, path: str = KERNEL_LOG) -> Iterator[tuple[float, str]]:
    """Yield the time and the text of each line of the kernel's log that is not older than `since` (s since the epoch).

    Each read of ``/dev/kmsg`` returns a record, ``priority,number,microseconds since boot,flags;text``. Raises
    OSError if the log cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    booted = time.time() - time.monotonic()
    try:
        while True:
            try:
                record = os.read(descriptor, 1 << 13)
            except BrokenPipeError:
                # The kernel overwrote the next record before it was read.
                continue
            except BlockingIOError:
                return
            if not record:
                return
            for line in record.decode(errors="replace").splitlines():
                head = line.partition(";")[0].split(",")
                seconds = booted + int(head[2]) / 1e6 if len(head) > 3 and head[2].isdecimal() else 0.0
                if seconds >= since:
                    yield seconds, line.partition(";")[2]
    finally:
        os.close(descriptor)
