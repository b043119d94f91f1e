from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from sglang_crashkit.memory.log_ring import LogRecord, LogWriter, read_log


@pytest.fixture
def log() -> Iterator[LogWriter]:
    writer = LogWriter(200)
    yield writer
    writer.close()


@pytest.mark.parametrize("text", ["short", "x" * 5000, "\N{SNOWMAN}" * 2000], ids=["short", "long", "wide"])
def test_the_last_records_are_there_however_long_they_are(log: LogWriter, text: str) -> None:
    for number in range(1000):
        log.note(float(number), logging.INFO, "sglang.srt", f"{number} {text}")
    found = read_log(log.fd, 200)
    assert [(one.seconds, one.text.split()[0]) for one in found] == [(float(n), str(n)) for n in range(800, 1000)]
    assert all(one.text.partition(" ")[2][:500] == text[:500] for one in found)


def test_a_record_is_read_as_it_was_written(log: LogWriter) -> None:
    log.note(1.5, logging.ERROR, "sglang.srt", "what\nhappened \udcff")
    assert read_log(log.fd, 200) == [LogRecord(1.5, logging.ERROR, "sglang.srt", "what\nhappened \\udcff")]
