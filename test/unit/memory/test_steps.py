from __future__ import annotations

import json
import math
import mmap
import os
import struct
import tracemalloc
from collections.abc import Iterator, Sequence
from typing import Any
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_crashkit.memory import steps as module
from sglang_crashkit.memory.steps import (
    DECISIONS,
    MAX_REQUESTS,
    SIZE,
    STEPS,
    LastSteps,
    StepReader,
    StepWriter,
)
from sglang_crashkit.model.step import MAX_RID
from unit.support.waiting import LONG, child

MODES = {1: "extend", 2: "decode", 5: "target_verify"}
EXTEND, DECODE, VERIFY = MODES

#: Writes steps of ten requests as fast as it can.
WRITE = """
from itertools import count
from sglang_crashkit.memory.steps import StepWriter
writer = StepWriter()
ready(writer.fd)
for number in count(1):
    rids = [f"{number // 3}-{place}" for place in range(10)]
    writer.begin_round(number, float(number))
    writer.schedule(number, float(number), 2, rids, [number] * 10, None, 10, {"abort": number}, 0)
    writer.begin_pass(2)
    writer.end(number, number + 0.5)
"""


@pytest.fixture
def writer() -> Iterator[StepWriter]:
    made = StepWriter()
    yield made
    made.close()


def read(writer: StepWriter) -> LastSteps:
    return StepReader(writer.fd, MODES).read()


def run(
    writer: StepWriter,
    number: int,
    rids: Sequence[str],
    lengths: Sequence[int],
    tokens: Sequence[int] | None = None,
    **changed: Any,
) -> None:
    writer.begin_round(number, float(number))
    given: dict[str, Any] = {
        **{"mode": DECODE if tokens is None else EXTEND, "total": sum(tokens or [1] * len(rids))},
        **{"decisions": {}, "agreed": 0, **changed},
    }
    writer.schedule(number, float(number), rids=rids, lengths=lengths, tokens=tokens, **given)


def test_a_step_is_read_as_it_was_written(writer: StepWriter) -> None:
    decided = {name: place + 2**63 for place, name in enumerate(DECISIONS)}
    run(writer, 7, ["ab12", "é" * 60], [40, 5], [37, 5], decisions=decided)
    writer.begin_pass(VERIFY)
    (step,) = read(writer).steps
    assert step.to_json() == {
        **{"number": 7, "began": 7.0, "ended": None, "phase": "forward_begun", "mode": "extend"},
        "requests": [{"rid": "ab12", "tokens": 37, "length": 40}, {"rid": "é" * 60, "tokens": 5, "length": 5}],
        **{"size": 2, "tokens": 42, "decisions": decided},
        **{"agreed_hash": step.agreed_hash, "forward": "target_verify"},
    }
    writer.end(7, 8.25)
    (ended,) = read(writer).steps
    assert (ended.phase, ended.ended) == ("processed", 8.25)


def test_a_step_that_goes_on_is_read_and_compared_as_one_that_is_written_out(writer: StepWriter) -> None:
    other = StepWriter()
    for number in range(1, 600):
        lengths = [number + 40, number + 4]
        run(other, number, ["ab", "c"], lengths)
        writer.begin_round(number, float(number))
        if number == 1 or not writer.schedule_again(number, float(number)):
            run(writer, number, ["ab", "c"], lengths)
    assert read(writer) == read(other)
    other.close()


def test_of_a_long_id_start_end_and_length_are_kept(writer: StepWriter) -> None:
    run(writer, 1, ["x" * MAX_RID, "y" * 1_000_000, "", "\ud800"], [1, 2, 3, 4])
    (step,) = read(writer).steps
    rids = ["x" * MAX_RID, "y" * 96 + "..." + "y" * 16 + "/1000000", "", "\\xed\\xa0\\x80"]
    assert [(one.rid, one.length) for one in step.requests] == list(zip(rids, [1, 2, 3, 4], strict=True))


def test_the_requests_of_the_newest_steps_are_there_whatever_comes(writer: StepWriter) -> None:
    # More ids and lengths than there is room for, then steps that share one list.
    for number in range(1, 1500):
        rids = ["stays", *(f"{number}-{place}" for place in range(200))]
        run(writer, number, rids, [number * 7 % 100] * 201)
    found = read(writer).steps
    assert len(found) == STEPS
    for step in found:
        rids = ["stays", *(f"{step.number}-{place}" for place in range(200))]
        assert [one.rid for one in step.requests] == (rids if step.requests or step.number > 1200 else [])
    for number in range(1500, 4000):
        run(writer, number, rids, [number] * 201)
    for step in read(writer).steps[-300:]:
        assert [(one.rid, one.length) for one in step.requests] == [(rid, step.number) for rid in rids]
    for number in range(4000, 10_000):
        run(writer, number, [str(number) * 100], [1])
        run(writer, number, [str(number)], [1])
    tracemalloc.start()
    for number in range(10_000, 16_000):
        run(writer, number, [str(number) * 100], [1])
        run(writer, number, [str(number)], [1])
    grown, _peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # These ids alone would take half a megabyte.
    assert grown < 300_000


def test_more_requests_than_there_is_room_for_are_counted(writer: StepWriter) -> None:
    count = MAX_REQUESTS + 5
    run(writer, 1, [str(place) for place in range(count)], [1] * count, [2] * count)
    (step,) = read(writer).steps
    assert (step.size, len(step.requests), step.requests[-1].tokens) == (count, MAX_REQUESTS, 2)


def test_the_hash_agrees_until_something_differs_and_never_again() -> None:
    def hashes(odd: dict[str, Any] | None) -> list[int]:
        writer = StepWriter()
        for number in range(1, 6):
            changed: dict[str, Any] = {"rids": ["a", "b"], "lengths": [number, 9 + number]}
            changed |= odd if odd and number == 3 else {}
            run(writer, number, **changed)
        found = [step.agreed_hash for step in read(writer).steps]
        writer.close()
        return found

    same = hashes(None)
    assert hashes(None) == same
    assert len(set(same)) == 5
    for odd in (
        *({"rids": ["b", "a"]}, {"rids": ["a"], "lengths": [3]}, {"lengths": [3, 13]}, {"tokens": [1, 1]}),
        *({"lengths": [5, 12]}, {"mode": EXTEND}, {"agreed": 1}),
        *({"decisions": {"abort": 0}}, {"decisions": {"retract": 0}}),
    ):
        other = hashes(odd)
        assert other[:2] == same[:2]
        assert not set(other[2:]) & set(same[2:]), odd


@pytest.mark.parametrize("have_arrived", [False, True])
def test_the_step_that_a_scheduler_is_in(writer: StepWriter, have_arrived: bool) -> None:
    def now() -> tuple[int, str, list[str]] | None:
        step = read(writer).current
        return step and (step.number, step.phase, [one.rid for one in step.requests])

    assert now() is None
    writer.begin_round(0, 1.0)
    assert now() is None
    writer.begin_round(1, 2.0)
    assert now() == (1, "received", [])
    writer.receive(1, 2.0, ["a"], [5])
    assert now() == (1, "received", ["a"])
    run(writer, 1, ["a"], [5], [5])
    assert now() == (1, "scheduled", ["a"])
    writer.begin_pass(EXTEND)
    # As with overlap scheduling: the next batch is launched before the results of this one are processed.
    run(writer, 2, ["a", "b"], [6, 1])
    assert now() == (2, "scheduled", ["a", "b"])
    writer.begin_results(1) if have_arrived else writer.wait_for_results(1)
    assert now() == (1, "forward_done" if have_arrived else "forward_begun", ["a"])
    writer.end(1, 3.0)
    assert now() == (2, "scheduled", ["a", "b"])
    writer.begin_round(3, 4.0)
    assert now() == (2, "scheduled", ["a", "b"])
    writer.end(2, 5.0)
    assert now() == (3, "received", [])
    run(writer, 3, ["a"], [7])
    writer.end(3, 6.0)
    assert now() is None
    writer.begin_round(4, 6.5)
    run(writer, 4, ["a"], [8])
    assert now() == (4, "scheduled", ["a"])
    writer.begin_round(0, 7.0)
    assert now() is None


def test_a_step_that_was_overwritten_is_not_marked(writer: StepWriter) -> None:
    run(writer, 1, ["old"], [1])
    run(writer, 1 + STEPS, ["new"], [1])
    writer.begin_results(1)
    writer.end(1, 9.0)
    assert [(step.number, step.phase) for step in read(writer).steps] == [(1 + STEPS, "scheduled")]


def test_a_writer_that_is_killed_leaves_whole_steps() -> None:
    for _turn in range(8):
        with child(WRITE) as process:
            descriptor = os.open(f"/proc/{process.pid}/fd/{int(process.first_line)}", os.O_RDONLY)  # type: ignore[attr-defined]
            reader = StepReader(descriptor, MODES)
            # Also while it is written.
            for _look in range(3):
                check(reader.read())
            process.kill()
            process.wait(LONG)
            check(reader.read())
            os.close(descriptor)


def check(found: LastSteps) -> None:
    for step in found.steps:
        number = step.number
        if step.phase == "received":
            continue
        assert (step.mode, step.size, step.began) == ("decode", 10, number)
        assert step.decisions == {"abort": number}
        assert step.ended in (None, number + 0.5)
        for place, request in enumerate(step.requests):
            assert request.length == number
            assert request.rid == f"{number // 3}-{place}"


@given(st.lists(st.tuples(st.integers(8, SIZE - 1), st.binary(min_size=1, max_size=64)), max_size=30))
def test_whatever_the_memory_holds_something_is_said(damage: list[tuple[int, bytes]]) -> None:
    writer = StepWriter()
    for number in range(1, 5):
        run(writer, number, ["a", "b"], [1, 2 * number])
    for place, text in damage:
        text = text[: SIZE - place]
        os.pwrite(writer.fd, text, place)
    for step in StepReader(writer.fd).read().steps:
        assert {one.rid for one in step.requests} <= {"a", "b"}
        json.dumps(step.to_json(), allow_nan=False)
    writer.close()


@pytest.mark.parametrize(
    ("value", "left"), [(math.nan, [1, 2]), (math.inf, [1, 2]), (-1.0, [1, 2, 3]), (1e300, [1, 2, 3])]
)
def test_a_time_that_cannot_be_costs_one_step_at_most(writer: StepWriter, value: float, left: list[int]) -> None:
    for number in (1, 2):
        run(writer, number, ["a"], [number])
    writer.end(1, value)
    writer.begin_round(3, value)
    writer.schedule(3, value, DECODE, ["a"], [3], None, 1, {}, 0)
    found = read(writer)
    assert [step.number for step in found.steps if step.requests] == left
    json.dumps([step.to_json() for step in found.steps], allow_nan=False)


def craft(writer: StepWriter, count: int, size: int) -> None:
    """Have each step claim a list of its own of so many requests and bytes, all of them in the same data."""
    data = b"\1\0a" * (module.DATA_BYTES // 3)
    memory = mmap.mmap(writer.fd, SIZE)
    memory[module.DATA : module.DATA + len(data)] = data
    for number in range(1, STEPS + 1):
        writer.begin_round(number, 1.0)
        start = 3 * number
        whole = data[start : start + size]
        lengths = data[: 4 * count]
        body = module.BODY.pack(
            *(number, 1.0, 1, 0, start, len(whole), crc32(whole), 0, crc32(lengths), count, count, 1, DECODE, 0),
            *module.NO_DECISIONS,
        )
        place = module.PAGE + number % STEPS * module.SLOT
        module.CHECKED.pack_into(memory, place + module.FIXED, crc32(body), body)
        struct.pack_into("=Q", memory, place, number << module.NUMBER_AT | 1)


@pytest.mark.wide
@pytest.mark.parametrize(("count", "size"), [(2000, 6000), (1, 1_900_000), (60_000, 180_000)])
def test_what_a_writer_claims_does_not_size_the_work(
    writer: StepWriter, monkeypatch: pytest.MonkeyPatch, count: int, size: int
) -> None:
    craft(writer, count, size)
    looked_at = []

    def counting(data: bytes) -> int:
        looked_at.append(len(data))
        return crc32(data)

    monkeypatch.setattr(module, "crc32", counting)
    found = read(writer).steps
    assert len(found) == STEPS
    assert sum(looked_at) <= 3 * SIZE
    assert sum(len(step.requests) for step in found) <= module.MAX_READ
