from __future__ import annotations

import fcntl
import math
import mmap
import os
import struct
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_crashkit.memory import heartbeat as beat
from sglang_crashkit.memory import ring
from sglang_crashkit.memory.heartbeat import Heartbeat, HeartbeatReader, HeartbeatWriter, NotAHeartbeatError
from unit.support.waiting import LONG, child, descriptors

WRITE = """
from sglang_crashkit.memory.heartbeat import HeartbeatWriter
writer = HeartbeatWriter()
ready(writer.fd)
"""


@pytest.fixture
def writer() -> Iterator[HeartbeatWriter]:
    made = HeartbeatWriter()
    yield made
    made.close()


def read(writer: HeartbeatWriter) -> Heartbeat:
    reader = HeartbeatReader(writer.fd)
    try:
        return reader.read()
    finally:
        reader.close()


def reader_of(process: Any) -> HeartbeatReader:
    descriptor = os.open(f"/proc/{process.pid}/fd/{process.first_line}", os.O_RDONLY)
    try:
        return HeartbeatReader(descriptor)
    finally:
        os.close(descriptor)


def test_another_process_reads_what_was_stored() -> None:
    code = WRITE + "writer.words[2], writer.words[3], writer.words[4], writer.words[5] = 7.0, 8.5, 12, 1\npause()"
    with child(code) as process:
        reader = reader_of(process)
        deadline = time.monotonic() + LONG
        while reader.read().requests != 1 and time.monotonic() < deadline:
            time.sleep(0.01)
        found = reader.read()
        assert (found.loop_at, found.batch_at, found.batches, found.requests) == (7.0, 8.5, 12, 1)
        assert found.in_batch
        assert found.at == 8.5
        assert found.doing == "batch 12, of 1 request"
        process.kill()
        process.wait(LONG)
        # The memory is there for as long as the reader holds it.
        assert reader.read() == found
        reader.close()


# -- what is no heartbeat


GOOD = beat.MAGIC.ljust(beat.BYTES, b"\0")


@pytest.mark.parametrize(
    ("content", "seals"),
    [
        (GOOD, 0),
        (GOOD, fcntl.F_SEAL_GROW),
        (b"", ring.SEALS),
        (GOOD[:-8], ring.SEALS),
        (GOOD + b"\0" * 8, ring.SEALS),
        (GOOD[::-1], ring.SEALS),
        (struct.pack("=Q", struct.unpack("=Q", beat.MAGIC)[0] + 1) + GOOD[8:], ring.SEALS),
    ],
    ids=["unsealed", "may shrink", "empty", "short", "long", "magic", "version"],
)
def test_what_is_no_heartbeat_of_this_layout_is_refused(content: bytes, seals: int) -> None:
    fd = os.memfd_create(beat.NAME, os.MFD_ALLOW_SEALING)
    os.write(fd, content)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    before = descriptors()
    try:
        with pytest.raises(NotAHeartbeatError):
            HeartbeatReader(fd)
        assert descriptors() == before
    finally:
        os.close(fd)


@given(st.binary(min_size=beat.BYTES - 8, max_size=beat.BYTES - 8))
def test_whatever_the_words_hold_they_say_something(rest: bytes) -> None:
    made = HeartbeatWriter()
    try:
        with mmap.mmap(made.fd, beat.BYTES) as view:
            view[8:] = rest
        found = read(made)
        assert found.batches >= 0
        assert found.requests >= 0
        assert isinstance(found.doing, str)
        # A stuck heartbeat equals itself, also where it holds what equals nothing.
        assert found == read(made) or any(math.isnan(time) for time in (found.loop_at, found.batch_at))
    finally:
        made.close()
