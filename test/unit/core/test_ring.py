from __future__ import annotations

import errno
import fcntl
import os
import random
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_crashkit.core.ring import RingError, RingReader, RingWriter
from unit.waiting import child

SIZE = 4096 + 64 * 1024
CAPACITY = 64 * 1024
MAX_PAYLOAD = CAPACITY // 16 - 32
sizes = st.one_of(st.integers(0, 300), st.integers(0, MAX_PAYLOAD))
#: What a writer does: append so many bytes, held or not; or release the held record of that rank, the oldest is 0.
steps = st.lists(st.one_of(sizes, st.tuples(st.just("hold"), sizes), st.tuples(st.just("release"), st.integers(0, 9))))


def content(number: int, size: int) -> bytes:
    return (number.to_bytes(4, "little") * (size // 4 + 1))[:size]


@contextmanager
def new_ring() -> Iterator[RingWriter]:
    with tempfile.TemporaryDirectory() as folder:
        writer = RingWriter(Path(folder) / "test.ring", SIZE)
        yield writer
        writer.close()


def payloads(path: Path) -> list[bytes]:
    with RingReader(path) as reader:
        found = [reader.payload(record) for record in reader.records]
    assert None not in found
    return found  # type: ignore[return-value]


def take(writer: RingWriter, step: object, number: int, held: dict[int, bytes]) -> bytes | None:
    """Do one step and return what was appended."""
    if isinstance(step, tuple) and step[0] == "release":
        if step[1] < len(held):
            hold = list(held)[step[1]]
            writer.release(hold)
            del held[hold]
        return None
    size = step[1] if isinstance(step, tuple) else step
    payload = content(number, size)
    writer.append(payload, hold=number if isinstance(step, tuple) else None)
    if isinstance(step, tuple):
        held[number] = payload
    return payload


@given(st.lists(sizes, max_size=120))
def test_the_newest_records_are_there_in_order_and_nothing_else(written: list[int]) -> None:
    with new_ring() as writer:
        for number, size in enumerate(written):
            writer.append(content(number, size))
        expected, room = [], CAPACITY
        for number, size in reversed(list(enumerate(written))):
            room -= -(-(32 + size) // 32) * 32
            if room < 0:
                break
            expected.insert(0, content(number, size))
        assert payloads(writer.path) == expected
        with RingReader(writer.path, head_bytes=8) as reader:
            assert reader.torn == 0
            assert [record.head for record in reader.records] == [payload[:8] for payload in expected]


@given(steps)
def test_a_held_record_that_is_not_there_is_counted(written: list[object]) -> None:
    with new_ring() as writer:
        held: dict[int, bytes] = {}
        gone = 0
        for number, step in enumerate(written):
            lost_before = writer.lost
            take(writer, step, number, held)
            if writer.lost > lost_before:
                there = set(payloads(writer.path))
                missing = [hold for hold, payload in held.items() if payload not in there]
                assert len(missing) == writer.lost - lost_before
                for hold in missing:
                    del held[hold]
                gone += len(missing)
        assert set(held.values()) <= set(payloads(writer.path))
        assert writer.lost == gone
        with RingReader(writer.path) as reader:
            # What was lost with the last record is said by it.
            assert (reader.records[-1].lost if reader.records else 0) == gone


@given(
    st.lists(sizes, min_size=1, max_size=8), st.integers(2, 4), st.integers(0, 2**32), st.sampled_from([0, 0.01, 0.1])
)
def test_no_held_record_is_lost_while_they_fit_in_half_of_the_ring(
    some: list[int], turns: int, seed: int, released: float
) -> None:
    choose = random.Random(seed)
    with new_ring() as writer:
        held: dict[int, bytes] = {}
        number = written = held_bytes = 0
        while written < turns * CAPACITY:
            size = choose.choice(some)
            payload = content(number, size)
            if held_bytes + size + 64 <= CAPACITY // 2:
                held_bytes += size + 64
                writer.append(payload, hold=number)
                held[number] = payload
            else:
                writer.append(payload)
            if held and choose.random() < released:
                hold = choose.choice(list(held))
                writer.release(hold)
                held_bytes -= len(held.pop(hold)) + 64
            number += 1
            written += size + 32
        assert writer.lost == 0
        assert set(held.values()) <= set(payloads(writer.path))


@given(steps, st.integers(0, SIZE))
def test_a_file_that_is_cut_off_gives_some_of_what_was_written(written: list[object], length: int) -> None:
    with new_ring() as writer:
        held: dict[int, bytes] = {}
        known = {take(writer, step, number, held) for number, step in enumerate(written)}
        before = payloads(writer.path)
        copy = writer.path.with_name("copy.ring")
        copy.write_bytes(writer.path.read_bytes()[:length])
        try:
            after = payloads(copy)
        except RingError:
            assert length < 4096
        else:
            assert set(after) <= known
            # In the order of the whole file.
            rest = iter(before)
            assert all(payload in rest for payload in after)


@given(steps, st.lists(st.tuples(st.integers(0, SIZE - 1), st.binary(min_size=1, max_size=64)), max_size=20))
def test_what_was_damaged_is_never_believed(written: list[object], damage: list[tuple[int, bytes]]) -> None:
    with new_ring() as writer:
        held: dict[int, bytes] = {}
        known = {take(writer, step, number, held) for number, step in enumerate(written)}
        data = bytearray(writer.path.read_bytes())
        for position, noise in damage:
            data[position : position + len(noise)] = noise
        copy = writer.path.with_name("copy.ring")
        copy.write_bytes(data)
        try:
            after = payloads(copy)
        except RingError:
            assert any(position < 28 + 4 for position, _noise in damage)
        else:
            assert set(after) <= known


@given(steps, sizes, st.integers(0, SIZE), st.booleans())
def test_a_record_that_is_torn_costs_no_other(written: list[object], size: int, cut: int, first: bool) -> None:
    with new_ring() as writer:
        held: dict[int, bytes] = {}
        known = {take(writer, step, number, held) for number, step in enumerate(written)}
        lost = writer.lost
        before = writer.path.read_bytes()
        last = content(len(written), size)
        writer.append(last)
        after = writer.path.read_bytes()
        copy = writer.path.with_name("copy.ring")
        copy.write_bytes(after[:cut] + before[cut:] if first else before[:cut] + after[cut:])
        with RingReader(copy) as reader:
            # A held record that is renewed may be torn beside the new one.
            assert reader.torn <= 1 + len(held)
        there = payloads(copy)
        assert set(there) <= known | {last}
        if writer.lost == lost == 0:
            assert set(held.values()) <= set(there)


def test_a_payload_cannot_hold_a_record_that_is_believed(tmp_path: Path) -> None:
    known = RingWriter(tmp_path / "known.ring", SIZE)
    known.append(b"believe me")
    forged = (tmp_path / "known.ring").read_bytes()[4096 : 4096 + 64]
    known.close()
    writer = RingWriter(tmp_path / "test.ring", SIZE)
    writer.append(forged * 60)
    for _ in range(20):
        writer.append(forged * 50)
    found = payloads(writer.path)
    writer.close()
    assert b"believe me" not in found


def test_the_file_is_private_and_has_its_blocks_before_the_first_record(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        writer = RingWriter(tmp_path / "test.ring", 2**20)
    finally:
        os.umask(before)
    status = writer.path.stat()
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_size <= 2**20
    assert status.st_blocks * 512 >= status.st_size
    writer.close()


def test_the_file_never_grows(tmp_path: Path) -> None:
    writer = RingWriter(tmp_path / "test.ring", SIZE)
    for number in range(3000):
        writer.append(content(number, 500), hold=number)
    assert writer.path.stat().st_size == SIZE
    assert writer.lost > 0
    writer.close()


def test_the_lock_is_held_as_long_as_the_writer_is_open(tmp_path: Path) -> None:
    writer = RingWriter(tmp_path / "test.ring", SIZE)
    with writer.path.open("rb") as file:
        with pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        writer.close()
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_file_that_is_there_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "test.ring").write_text("somebody's")
    with pytest.raises(RingError, match="File exists"):
        RingWriter(tmp_path / "test.ring", SIZE)
    assert (tmp_path / "test.ring").read_text() == "somebody's"


def test_a_full_disk_gives_an_error_that_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(*_args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", no_space)
    with pytest.raises(RingError, match=r"1 MiB .*No space left on device\n.*df -h"):
        RingWriter(tmp_path / "test.ring", 2**20)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_a_small_disk_that_is_full_takes_no_ring(tmp_path: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", tmp_path], timeout=30, check=True)
    try:
        with pytest.raises(RingError, match="No space left on device"):
            RingWriter(tmp_path / "test.ring", 2**21)
        assert list(tmp_path.iterdir()) == []
        writer = RingWriter(tmp_path / "test.ring", 2**19)
        with pytest.raises(OSError, match="No space left"):
            (tmp_path / "rest").write_bytes(bytes(2**20))
        # It has its blocks, whatever fills the disk.
        for number in range(3000):
            writer.append(content(number, 1000))
        writer.close()
    finally:
        subprocess.run(["umount", tmp_path], timeout=30, check=True)


def test_too_long_a_record_is_refused(tmp_path: Path) -> None:
    writer = RingWriter(tmp_path / "test.ring", SIZE)
    with pytest.raises(ValueError, match="is over"):
        writer.append(bytes(writer.max_payload + 1))
    writer.append(bytes(writer.max_payload))
    assert payloads(writer.path) == [bytes(writer.max_payload)]
    writer.close()


@pytest.mark.parametrize("data", [b"", b"text", bytes(SIZE), b"SGLCKJ01" + bytes(SIZE)])
def test_another_file_is_no_ring(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "test.ring").write_bytes(data)
    with pytest.raises(RingError):
        RingReader(tmp_path / "test.ring")


def test_a_record_that_is_overwritten_meanwhile_is_not_read(tmp_path: Path) -> None:
    writer = RingWriter(tmp_path / "test.ring", SIZE)
    writer.append(b"first")
    with RingReader(writer.path) as reader:
        assert reader.payload(reader.records[0]) == b"first"
        for number in range(40):
            writer.append(content(number, MAX_PAYLOAD))
        assert reader.payload(reader.records[0]) is None
    writer.close()


WRITE = """
from pathlib import Path
from sglang_crashkit.core.ring import RingWriter
writer = RingWriter(Path(sys.argv[1]), 4096 + 64 * 1024)
writer.append(b"held", hold=0)
ready()
number = 1
while True:
    writer.append(number.to_bytes(4, "little") * (1 + number * 7919 % 1500))
    number += 1
"""


def test_a_writer_that_is_killed_leaves_all_but_the_last_record(tmp_path: Path) -> None:
    for turn in range(12):
        path = tmp_path / f"{turn}.ring"
        with child(WRITE, str(path)) as process:
            time.sleep(random.random() * 0.05)
            process.send_signal(signal.SIGKILL)
            process.wait(timeout=30)
        with RingReader(path) as reader:
            assert reader.torn <= 1
        found = payloads(path)
        assert found.count(b"held") >= 1
        numbers = [int.from_bytes(payload[:4], "little") for payload in found if payload != b"held"]
        assert numbers == list(range(numbers[0], numbers[-1] + 1)) if numbers else True
        for payload in found:
            assert payload == b"held" or len(payload) == 4 * (1 + int.from_bytes(payload[:4], "little") * 7919 % 1500)
