from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from hashlib import blake2b
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_crashkit.memory import steps as module
from sglang_crashkit.memory.steps import (
    DECISIONS,
    MAX_REPEATS,
    MAX_REQUESTS,
    SIZE,
    STEPS,
    Facts,
    LastSteps,
    NotStepsError,
    StepReader,
    StepWriter,
)
from sglang_crashkit.model.step import SAMPLED_HASH
from unit.support.waiting import LONG, child, descriptors

MODES = {1: "extend", 2: "decode", 5: "target_verify"}
EXTEND, DECODE, VERIFY = MODES
SLOTS = module._SLOTS

#: Writes steps of ten requests as fast as it can.
WRITE = """
from itertools import count
from sglang_crashkit.memory.steps import Facts, StepWriter
writer = StepWriter()
ready(writer.fd)
for number in count(1):
    rids = [f"{number // 3}-{place}" for place in range(10)]
    writer.begin_round(number, float(number))
    lengths = [number] * 10
    if number % 3:
        writer.repeat(number, float(number))
    else:
        facts, decided = Facts(running=number), {"abort": number}
        writer.schedule(number, float(number), 2, rids, lengths, None, 10, facts, decided, 0)
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
        **{"facts": Facts(), "decisions": {}, "agreed": 0, **changed},
    }
    writer.schedule(number, float(number), rids=rids, lengths=lengths, tokens=tokens, **given)


def test_a_step_is_read_as_it_was_written(writer: StepWriter) -> None:
    facts = Facts(running=2, waiting=3, retracted=1, received=4, kv_free=10**10, kv_size=2 * 10**10)
    decided = {name: place + 2**63 for place, name in enumerate(DECISIONS)}
    run(writer, 7, ["ab12", "é" * 60], [40, 5], [37, 5], facts=facts, decisions=decided)
    writer.begin_pass(VERIFY)
    (step,) = read(writer).steps
    hashes = [int.from_bytes(blake2b(rid.encode(), digest_size=8).digest(), "little") for rid in ("ab12", "é" * 60)]
    assert step.to_json() == {
        **{"number": 7, "began": 7.0, "ended": None, "phase": "forward_begun", "mode": "extend"},
        "requests": [
            {"rid": "ab12", "id_hash": hashes[0], "tokens": 37, "length": 40},
            {"rid": "é" * 60, "id_hash": hashes[1], "tokens": 5, "length": 5},
        ],
        **{"size": 2, "tokens": 42, **facts._asdict(), "decisions": decided},
        **{"agreed_hash": step.agreed_hash, "forward": "target_verify"},
    }
    writer.end(7, 8.25)
    (ended,) = read(writer).steps
    assert (ended.phase, ended.ended) == ("processed", 8.25)


def test_what_was_sampled_is_known_once_it_is_processed(writer: StepWriter) -> None:
    def told() -> list[bytes]:
        return [step.sampled for step in read(writer).steps]

    for number, tokens in ((1, (7, 0x1_02_08)), (2, (7, 0x1_02_08)), (3, (7, 0x1_03_08)), (4, ())):
        run(writer, number, ["a", "b"], [5, number])
        writer.end(number, 9.0, tokens)
    first, again, other, unknown = told()
    assert first == again != other
    assert (first[SAMPLED_HASH:], unknown) == (b"\x07\x08", b"")
    assert not any("sampled" in step.to_json() for step in read(writer).steps)
    # The slot still has the tokens of the step that it held before.
    run(writer, 1 + SLOTS, ["a", "b"], [5, 9])
    assert told()[-1] == b""
    writer.end(1 + SLOTS, 9.0)
    assert told()[-1] == b""


def test_of_requests_beyond_the_room_the_hash_tells(writer: StepWriter) -> None:
    rids, found = [str(place) for place in range(300)], []
    for number, last in ((1, 5), (2, 5), (3, 6)):
        run(writer, number, rids, [1] * 300)
        writer.end(number, 9.0, (*range(299), last))
    found = [step.sampled for step in read(writer).steps]
    assert found[0] == found[1] != found[2]
    assert len(found[0]) == SAMPLED_HASH + 56
    assert found[0][SAMPLED_HASH:] == found[2][SAMPLED_HASH:]


def test_an_id_too_long_to_keep_is_told_by_hash(writer: StepWriter) -> None:
    run(writer, 1, ["x" * 1024, "y" * 1025, "z" * 70_000, ""], [1, 2, 3, 4])
    (step,) = read(writer).steps
    assert [one.rid[:3] for one in step.requests] == [
        "xxx",
        *(f"#{one.id_hash:016x}"[:3] for one in step.requests[1:3]),
        "",
    ]
    assert [one.length for one in step.requests] == [1, 2, 3, 4]


def test_what_was_received_is_no_batch(writer: StepWriter) -> None:
    writer.begin_round(1, 0.5)
    writer.receive(1, 0.5, ["a"], [37], 3)
    (step,) = read(writer).steps
    assert (step.phase, step.mode, step.received, step.size, step.tokens) == ("received", "", 3, 1, 0)
    assert (step.agreed_hash, step.requests[0].rid, step.requests[0].tokens, step.requests[0].length) == (0, "a", 0, 37)


def test_what_a_release_does_not_have_is_absent(writer: StepWriter) -> None:
    run(writer, 1, [], [])
    (step,) = read(writer).steps
    assert {getattr(step, name) for name in Facts._fields} == {None}
    assert (step.decisions, step.requests, step.size) == ({}, (), 0)


@given(
    st.lists(
        st.tuples(st.sets(st.integers(0, 12), max_size=12), st.integers(0, 3), st.booleans()), min_size=1, max_size=40
    )
)
def test_steps_that_share_their_requests_are_read_like_any_other(drawn: list[tuple[set[int], int, bool]]) -> None:
    writer = StepWriter()
    expected = {}
    for number, (chosen, grown, is_extend) in enumerate(drawn, 1):
        rids = [f"r{one}" for one in sorted(chosen)]
        lengths = [100 * one + number * grown for one in sorted(chosen)]
        tokens = [one + 1 for one in sorted(chosen)] if is_extend else None
        run(writer, number, rids, lengths, tokens)
        expected[number] = list(zip(rids, lengths, tokens or [1] * len(rids), strict=True))
    found = {step.number: [(one.rid, one.length, one.tokens) for one in step.requests] for step in read(writer).steps}
    writer.close()
    assert found == expected


def test_lengths_that_all_grow_take_no_room(writer: StepWriter) -> None:
    rids = [f"r{place}" for place in range(256)]
    for number in range(1, 2 * STEPS):
        run(writer, number, rids, [number + place for place in range(256)])
    found = read(writer).steps
    assert [step.number for step in found] == list(range(STEPS, 2 * STEPS))
    # As many of the newest as a reader has room for; of the others the rest is there.
    assert [len(step.requests) for step in found] == [0] * (STEPS - 128) + [256] * 128
    assert {step.size for step in found} == {256}
    for step in (found[-128], found[-1]):
        assert [(one.rid, one.length) for one in step.requests] == [
            (rid, step.number + place) for place, rid in enumerate(rids)
        ]
    assert writer._data_head < 10_000


def test_the_requests_of_the_newest_steps_are_there_whatever_comes(writer: StepWriter) -> None:
    # More ids and lengths than there is room for, of requests that stay beside others that come and go.
    for number in range(1, 1500):
        rids = ["stays", *(f"{number}-{place}" for place in range(200))]
        run(writer, number, rids, [number * 7 % 100] * 201)
    found = read(writer).steps
    assert len(found) == STEPS
    for step in found[-15:]:
        assert [one.rid for one in step.requests] == ["stays", *(f"{step.number}-{place}" for place in range(200))]
    for step in found:
        # What was overwritten is absent, and nobody else's.
        assert len(step.requests) in (0, 201)
        assert all(
            one.rid in ("stays", f"#{one.id_hash:016x}", f"{step.number}-{place - 1}")
            for place, one in enumerate(step.requests)
        )
    assert len(writer._known) <= 4 * MAX_REQUESTS + 201


def test_a_request_that_stays_keeps_its_id(writer: StepWriter) -> None:
    for number in range(1, 100):
        writer.receive(number, 0.0, [f"{number}-{place}" for place in range(100)], [5] * 100, 100)
        run(writer, number, ["stays"], [number])
    assert {one.rid for step in read(writer).steps for one in step.requests} == {"stays"}


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
            # The facts need not be the same on all ranks.
            changed |= {"facts": Facts(kv_free=random.randrange(10**6))} | (odd if odd and number == 3 else {})
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


def test_no_difference_of_lengths_hides_another() -> None:
    def hash_with(changes: dict[int, int]) -> int:
        writer = StepWriter()
        run(writer, 1, [str(place) for place in range(128)], [100 + n + changes.get(n, 0) for n in range(128)])
        (step,) = read(writer).steps
        writer.close()
        return step.agreed_hash

    # In a large number some places weigh alike, to the remainder that is its hash.
    changed: list[dict[int, int]] = [{}, {0: 61, 61: -61}, {0: 2, 21: -1}, {3: 1, 4: -1}]
    assert len(set(map(hash_with, changed))) == len(changed)


@pytest.mark.parametrize("have_arrived", [False, True])
def test_a_stage_without_a_batch_may_process_another(writer: StepWriter, have_arrived: bool) -> None:
    run(writer, 1, ["a"], [5])
    writer.begin_round(0, 2.0)
    assert read(writer).current is None
    writer.begin_results(1) if have_arrived else writer.wait_for_results(1)
    assert read(writer).current == read(writer).steps[0]
    writer.end(1, 3.0)
    assert read(writer).current is None


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
    writer.receive(1, 2.0, ["a"], [5], 1)
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
    writer.go_round(6.5)
    assert now() == (4, "received", [])
    writer.repeat(4, 6.5)
    assert now() == (4, "scheduled", ["a"])
    writer.begin_round(0, 7.0)
    assert now() is None


def test_a_step_that_nobody_processed_is_not_current(writer: StepWriter) -> None:
    for number in (1, 2, 3):
        run(writer, number, ["a"], [number])
        writer.begin_results(number)
        if number == 2:
            writer.end(2, 2.5)
    assert (read(writer).current or read(writer).steps[0]).number == 3


def test_a_step_that_was_overwritten_is_not_marked(writer: StepWriter) -> None:
    run(writer, 1, ["old"], [1])
    run(writer, 1 + SLOTS, ["new"], [1])
    writer.begin_results(1)
    writer.end(1, 9.0)
    assert [(step.number, step.phase) for step in read(writer).steps] == [(1 + SLOTS, "scheduled")]


def test_a_step_that_repeats_another_is_read_like_any(writer: StepWriter) -> None:
    facts = Facts(running=2, waiting=3, retracted=1, received=4, kv_free=5, kv_size=6)
    run(writer, 7, ["a", "b"], [40, 5], facts=facts, decisions={"abort": 1})
    for number in (8, 9):
        writer.begin_round(number, number - 0.5)
        writer.repeat(number, number - 0.5)
        assert (read(writer).current or read(writer).steps[0]).number == number
    writer.begin_pass(DECODE)
    writer.end(8, 8.25, (1, 2))
    whole, first, second = read(writer).steps
    # Nothing was received, retracted or decided for it.
    changed = {"retracted": 0, "received": 0, "decisions": {}}
    assert [one.length for one in second.requests] == [42, 7]
    assert first.to_json() == whole.to_json() | changed | {
        **{"number": 8, "began": 7.5, "ended": 8.25, "phase": "processed"},
        "requests": [asdict(replace(one, length=one.length + 1)) for one in whole.requests],
    }
    assert (first.sampled[SAMPLED_HASH:], second.sampled) == (b"\1\2", b"")
    assert (second.number, second.began, second.phase, second.forward) == (9, 8.5, "forward_begun", "decode")


def test_what_repeats_a_lost_step_is_absent(writer: StepWriter) -> None:
    run(writer, 1, ["a"], [1])
    writer.repeat(2, 2.0)
    writer.repeat(4, 4.0)
    assert [step.number for step in read(writer).steps] == [1, 2]
    # More in turn than a reader looks at are no writer's.
    for number in range(2, MAX_REPEATS + 4):
        writer.repeat(number, float(number))
    assert [step.number for step in read(writer).steps] == list(range(1, MAX_REPEATS + 2))


def test_all_of_the_last_steps_are_there(writer: StepWriter) -> None:
    newest = 2 * STEPS + 7
    for number in range(1, newest + 1):
        if number % (MAX_REPEATS + 1):
            writer.repeat(number, float(number))
        else:
            run(writer, number, ["a"], [number])
    found = read(writer).steps
    assert [(step.number, step.began, step.requests[0].length) for step in found] == [
        (number, number, number) for number in range(newest - STEPS + 1, newest + 1)
    ]


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
        assert step.decisions == ({} if number % 3 else {"abort": number})
        assert step.running == number - number % 3
        assert step.ended in (None, number + 0.5)
        for place, request in enumerate(step.requests):
            assert request.length == number
            assert request.rid in (f"{number // 3}-{place}", f"#{request.id_hash:016x}")


@given(st.lists(st.tuples(st.integers(8, SIZE - 1), st.binary(min_size=1, max_size=64)), max_size=30))
def test_whatever_the_memory_holds_something_is_said(damage: list[tuple[int, bytes]]) -> None:
    writer = StepWriter()
    for number in range(1, 5):
        run(writer, number, ["a", "b"], [1, 2 * number])
    for place, text in damage:
        text = text[: SIZE - place]
        writer._map[place : place + len(text)] = text
    for step in StepReader(writer.fd).read().steps:
        assert {one.rid for one in step.requests} <= {"a", "b"} or all(
            "#" in one.rid or one.rid in "ab" for one in step.requests
        )
    writer.close()


def test_it_takes_no_more_than_it_may(writer: StepWriter) -> None:
    assert os.fstat(writer.fd).st_size == SIZE <= 1_500_000


def test_what_is_no_record_is_not_read(writer: StepWriter) -> None:
    other = os.memfd_create("x")
    read_end, write_end = os.pipe()
    for descriptor in (other, read_end):
        with pytest.raises(NotStepsError):
            StepReader(descriptor)
    writer._map[0] = 0
    with pytest.raises(NotStepsError):
        StepReader(writer.fd)
    for descriptor in (other, read_end, write_end):
        os.close(descriptor)


def test_nothing_is_left_where_there_is_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.os, "posix_fallocate", refuse)
    before = descriptors()
    with pytest.raises(OSError, match="No space"):
        StepWriter()
    assert descriptors() == before
