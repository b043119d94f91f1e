from __future__ import annotations

import math
import mmap
import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_crashkit.memory import heartbeat as beat
from sglang_crashkit.memory.heartbeat import Heartbeat, HeartbeatReader, HeartbeatWriter
from unit.support.waiting import LONG, child

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
