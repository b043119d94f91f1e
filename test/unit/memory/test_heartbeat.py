from __future__ import annotations

import math
import mmap

from hypothesis import given
from hypothesis import strategies as st

from sglang_crashkit.memory import heartbeat as beat
from sglang_crashkit.memory.heartbeat import HeartbeatReader, HeartbeatWriter


@given(st.binary(min_size=beat.BYTES - 8, max_size=beat.BYTES - 8))
def test_whatever_the_words_hold_they_say_something(rest: bytes) -> None:
    made = HeartbeatWriter()
    reader = HeartbeatReader(made.fd)
    try:
        with mmap.mmap(made.fd, beat.BYTES) as view:
            view[8:] = rest
        found = reader.read()
        assert found.batches >= 0
        assert found.requests >= 0
        assert isinstance(found.doing, str)
        # A stuck heartbeat equals itself, also where it holds what equals nothing.
        assert found == reader.read() or any(math.isnan(time) for time in (found.loop_at, found.batch_at))
    finally:
        reader.close()
        made.close()
