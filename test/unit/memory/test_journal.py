from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator

import pytest

from sglang_crashkit.memory import journal
from sglang_crashkit.memory.journal import KEPT_SECS, JournalReader, JournalWriter
from sglang_crashkit.memory.ring import RingError
from unit.waiting import LONG, child

SIZE = 2**20


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def time(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(journal, "time", clock)
    return clock


@pytest.fixture
def writer() -> Iterator[JournalWriter]:
    writer = JournalWriter(SIZE)
    yield writer
    writer.close()


def rids(descriptor: int, *, ended: bool) -> list[str]:
    reader = JournalReader(descriptor)
    loaded = [(reader.load(request), request.ended) for request in reader.requests]
    return [request["rid"] for request, end in loaded if request and (end is not None) == ended]


def test_requests_are_told_by_what_became_of_them(writer: JournalWriter, clock: Clock) -> None:
    first = writer.begin({"rid": "first", "stream": True}, text="one")
    clock.now = 1001.0
    second = writer.begin({"rid": "second"}, input_ids=[1, 2, 3])
    third = writer.begin({"rid": "third"})
    clock.now = 1002.0
    writer.end(first, finished=True)
    writer.end(third, finished=False)
    reader = JournalReader(writer.fd)
    told = {str((reader.load(r) or {})["rid"]): (r.arrived, r.ended, r.finished) for r in reader.requests}
    assert (reader.lost, reader.torn) == (0, 0)
    assert reader.load(reader.requests[0]) == {"rid": "second", "input_ids": [1, 2, 3]}
    assert told == {
        "second": (1001.0, None, False),
        "first": (1000.0, 1002.0, True),
        "third": (1001.0, 1002.0, False),
    }
    assert second == 2


def test_what_ended_long_before_the_last_event_is_left_out(writer: JournalWriter, clock: Clock) -> None:
    old, kept = writer.begin({"rid": "old"}), writer.begin({"rid": "kept"})
    writer.begin({"rid": "unfinished"})
    writer.end(old, finished=True)
    clock.now += 1
    writer.end(kept, finished=True)
    # Nothing happened since: all of it is the last that did.
    assert rids(writer.fd, ended=True) == ["kept", "old"]
    clock.now += KEPT_SECS - 0.5
    writer.begin({"rid": "new"})
    assert rids(writer.fd, ended=True) == ["kept"]
    assert rids(writer.fd, ended=False) == ["unfinished", "new"]


def test_an_unfinished_request_outlives_any_number_of_finished_ones(writer: JournalWriter) -> None:
    writer.begin({"rid": "stays"}, text="hung")
    for number in range(500):
        writer.end(writer.begin({"rid": str(number)}, text="x" * 10_000), finished=True)
    reader = JournalReader(writer.fd)
    assert [reader.load(request) for request in reader.requests if request.ended is None] == [
        {"rid": "stays", "text": "hung"}
    ]
    assert writer.lost == 0


def test_unfinished_requests_without_room_are_counted(writer: JournalWriter) -> None:
    for number in range(200):
        writer.begin({"rid": str(number)}, text="x" * 10_000)
    found = rids(writer.fd, ended=False)
    reader = JournalReader(writer.fd)
    assert reader.lost == writer.lost > 0
    assert len(found) + writer.lost == 200
    assert found == [str(number) for number in range(writer.lost, 200)]


def test_a_journal_that_is_switched_off_is_none(writer: JournalWriter) -> None:
    writer.begin({"rid": "answered since"})
    writer.switch_off()
    with pytest.raises(RingError):
        JournalReader(writer.fd)


SERVE = """
from sglang_crashkit.memory.journal import JournalWriter
writer = JournalWriter(2**20)
writer.begin({"rid": "hung"}, text="never answered")
ready(str(writer.fd))
under_way = []
for number in range(10**9):
    ids = list(range(number % 3000))
    under_way.append(writer.begin({"rid": str(number), "length": len(ids)}, text="x" * len(ids), input_ids=ids))
    if len(under_way) > 8:
        writer.end(under_way.pop(0), finished=True)
"""


def test_a_server_that_is_killed_leaves_its_requests() -> None:
    for _ in range(8):
        with child(SERVE) as process:
            descriptor = os.open(f"/proc/{process.pid}/fd/{process.first_line.strip()}", os.O_RDONLY)
            time.sleep(random.random() * 0.1)
            process.send_signal(signal.SIGKILL)
            process.wait(LONG)
        reader = JournalReader(descriptor)
        assert reader.torn <= 1
        assert reader.lost == 0
        loaded = [(reader.load(request), request.ended) for request in reader.requests]
        os.close(descriptor)
        assert any(request == {"rid": "hung", "text": "never answered"} for request, _ended in loaded)
        numbers = []
        for request, ended in loaded:
            assert request is not None
            if request["rid"] != "hung":
                assert request["input_ids"] == list(range(request["length"]))
                assert request["text"] == "x" * request["length"]
                numbers += [int(request["rid"])] if ended is None else []
        # Eight or nine under way, or one fewer where the last record is torn.
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers))) if numbers else True
        assert len(numbers) <= 9
