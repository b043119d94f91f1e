from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest

from sglang_crashkit.memory.blob import MAX_BYTES, read_blob, write_blob
from sglang_crashkit.memory.log_ring import LogRecord, LogWriter, read_log
from sglang_crashkit.memory.ring import RingError


@pytest.fixture
def log() -> Iterator[LogWriter]:
    writer = LogWriter(200)
    yield writer
    writer.close()


@pytest.mark.parametrize("text", ["short", "x" * 5000, "\N{SNOWMAN}" * 2000], ids=["short", "long", "wide"])
def test_the_last_records_are_there_however_long_they_are(log: LogWriter, text: str) -> None:
    for number in range(1000):
        log.append(float(number), logging.INFO, "sglang.srt", f"{number} {text}")
    found = read_log(log.fd, 200)
    assert [(one.seconds, one.text.split()[0]) for one in found] == [(float(n), str(n)) for n in range(800, 1000)]
    assert all(one.text.partition(" ")[2][:500] == text[:500] for one in found)


def test_a_record_is_read_as_it_was_written(log: LogWriter) -> None:
    log.append(1.5, logging.ERROR, "sglang.srt", "what\nhappened \udcff")
    assert read_log(log.fd, 200) == [LogRecord(1.5, logging.ERROR, "sglang.srt", "what\nhappened \\udcff")]


def test_a_text_is_passed_on_in_memory() -> None:
    descriptor = write_blob(b"text" * 50_000)
    assert read_blob(descriptor) == b"text" * 50_000
    os.close(descriptor)
    with pytest.raises(ValueError, match=str(MAX_BYTES)):
        write_blob(bytes(MAX_BYTES + 1))


def test_what_might_block_is_not_read() -> None:
    reading, writing = os.pipe()
    with pytest.raises(RingError):
        read_blob(reading)
    os.close(reading)
    os.close(writing)
