from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import math
import os
import random
import signal
import stat
import time
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_crashkit.memory import ring
from sglang_crashkit.memory.heartbeat import LOOP_TIME, HeartbeatReader, HeartbeatWriter
from sglang_crashkit.memory.ring import (
    MAX_BLOB_BYTES,
    LogWriter,
    RingError,
    RingReader,
    RingWriter,
    is_ring,
    read_blob,
    read_log,
    write_blob,
)
from sglang_crashkit.memory.steps import StepReader, StepWriter
from unit.support.waiting import LONG, child, descriptors

SIZE = 4096 + 64 * 1024
CAPACITY = 64 * 1024
MAX_PAYLOAD = CAPACITY // 16 - 32
sizes = st.one_of(st.integers(0, 300), st.integers(0, MAX_PAYLOAD))


def content(number: int, size: int) -> bytes:
    return (number.to_bytes(4, "little") * (size // 4 + 1))[:size]


@contextlib.contextmanager
def new_ring() -> Iterator[RingWriter]:
    writer = RingWriter(SIZE)
    yield writer
    writer.close()


@contextlib.contextmanager
def copy_of(data: bytes, seals: int = 0) -> Iterator[int]:
    """Give a descriptor of memory that holds these bytes."""
    descriptor = os.memfd_create("copy", os.MFD_ALLOW_SEALING)
    try:
        os.write(descriptor, data)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
        yield descriptor
    finally:
        os.close(descriptor)


def content_of(writer: RingWriter) -> bytes:
    return os.pread(writer.fd, SIZE, 0)


def payloads(descriptor: int) -> list[bytes]:
    reader = RingReader(descriptor)
    found = sorted(reader.records())
    assert [reader.payload(record.offset, record.sequence) for record in found] == [each.payload for each in found]
    return [record.payload for record in found]


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
        assert payloads(writer.fd) == expected
        reader = RingReader(writer.fd)
        list(reader.records())
        assert reader.torn == 0


@given(
    st.lists(sizes, min_size=1, max_size=8), st.integers(2, 4), st.integers(0, 2**32), st.sampled_from([0, 0.01, 0.1])
)
def test_no_held_record_is_lost_while_they_leave_room(some: list[int], turns: int, seed: int, released: float) -> None:
    choose = random.Random(seed)
    with new_ring() as writer:
        held: dict[int, bytes] = {}
        number = written = held_bytes = 0
        while written < turns * CAPACITY:
            size = choose.choice(some)
            payload = content(number, size)
            if held_bytes + size + 64 <= CAPACITY * 7 // 16:
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
        assert set(held.values()) <= set(payloads(writer.fd))


@given(
    st.lists(st.tuples(sizes, st.booleans())),
    st.lists(st.tuples(st.integers(0, SIZE - 1), st.binary(min_size=1, max_size=64)), max_size=20),
)
def test_what_was_damaged_is_never_believed(written: list[tuple[int, bool]], damage: list[tuple[int, bytes]]) -> None:
    with new_ring() as writer:
        known = {content(number, size) for number, (size, _is_held) in enumerate(written)}
        for number, (size, is_held) in enumerate(written):
            writer.append(content(number, size), hold=number if is_held else None)
        data = bytearray(content_of(writer))
        for position, noise in damage:
            data[position : position + len(noise)] = noise
        try:
            with copy_of(data) as copy:
                after = payloads(copy)
        except RingError:
            assert any(position < 28 + 4 for position, _noise in damage)
        else:
            assert set(after) <= known


def test_a_payload_cannot_hold_a_record_that_is_believed() -> None:
    with new_ring() as known, new_ring() as writer:
        known.append(b"believe me")
        forged = content_of(known)[4096 : 4096 + 64]
        writer.append(forged * 60)
        for _ in range(20):
            writer.append(forged * 50)
        assert b"believe me" not in payloads(writer.fd)


@pytest.mark.parametrize("has_function", [True, False])
@pytest.mark.parametrize(
    ("make", "name", "size"),
    [
        (lambda: RingWriter(2**20), "sglang-crashkit-journal", 2**20),
        (HeartbeatWriter, "sglang-crashkit-heartbeat", 96),
        (StepWriter, "sglang-crashkit-steps", 2_200_000),
    ],
)
def test_it_is_private_sealed_and_in_no_file(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[], Any], name: str, size: int, has_function: bool
) -> None:
    if not has_function:
        # As a Python that was built on an older system, such as one of uv's.
        monkeypatch.delattr(os, "memfd_create")
    before = os.umask(0)
    try:
        writer = make()
    finally:
        os.umask(before)
    status = os.fstat(writer.fd)
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_size <= size
    assert Path(f"/proc/self/fd/{writer.fd}").readlink().name.startswith(f"memfd:{name}")
    for length in (0, 2**22):
        with pytest.raises(PermissionError):
            os.ftruncate(writer.fd, length)
    assert not os.get_inheritable(writer.fd)
    assert is_ring(writer.fd)
    writer.close()


def test_it_takes_no_more_memory_than_was_written_to_it() -> None:
    def blocks() -> int:
        return os.fstat(writer.fd).st_blocks * 512

    writer = RingWriter(8 * 2**20)
    assert blocks() <= 2**19
    # To read it takes none either.
    assert list(RingReader(writer.fd).records()) == []
    assert blocks() <= 2**19
    for number in range(100):
        writer.append(content(number, 10_000))
        # It is there before it is stored to: no store may end in SIGBUS.
        assert blocks() >= (number + 1) * 10_000
    assert blocks() <= 100 * 10_048 + 2**19
    for number in range(2000):
        writer.append(content(number, 10_000))
    assert blocks() <= 8 * 2**20
    writer.close()


def test_without_memory_there_is_an_error_and_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = len(list(Path("/proc/self/fd").iterdir()))
    writer = RingWriter(2**20)
    monkeypatch.setattr(os, "posix_fallocate", no_memory)
    for make in (lambda: RingWriter(2**20), HeartbeatWriter, StepWriter):
        with pytest.raises(RingError, match=r"there is no memory: No space left on device\n.*free -m"):
            make()
    with contextlib.suppress(RingError):
        for _ in range(100):
            writer.append(bytes(10_000))
    with pytest.raises(RingError, match="there is no memory"):
        writer.append(bytes(10_000))
    writer.close()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_ring_that_was_switched_off_is_none() -> None:
    with new_ring() as writer:
        writer.append(b"something")
        writer.invalidate()
        with pytest.raises(RingError, match="was switched off"):
            RingReader(writer.fd)


def test_a_record_that_is_overwritten_meanwhile_is_not_read() -> None:
    with new_ring() as writer:
        writer.append(b"first")
        reader = RingReader(writer.fd)
        (first,) = reader.records()
        assert reader.payload(first.offset, first.sequence) == b"first"
        for number in range(40):
            writer.append(content(number, MAX_PAYLOAD))
        assert reader.payload(first.offset, first.sequence) is None


WRITE = """
import os
from sglang_crashkit.memory.ring import RingWriter
writer = RingWriter(4096 + 64 * 1024)
writer.append(b"held", hold=0)
ready(str(writer.fd))
number = 1
while True:
    writer.append(number.to_bytes(4, "little") * (1 + number * 7919 % 1000))
    number += 1
"""


def test_a_killed_writer_leaves_all_but_its_last_record() -> None:
    for _ in range(12):
        with child(WRITE) as process:
            descriptor = os.open(f"/proc/{process.pid}/fd/{process.first_line.strip()}", os.O_RDONLY)
            time.sleep(random.random() * 0.05)
            process.send_signal(signal.SIGKILL)
            process.wait(LONG)
        reader = RingReader(descriptor)
        list(reader.records())
        assert reader.torn <= 1
        found = payloads(descriptor)
        os.close(descriptor)
        assert found.count(b"held") >= 1
        numbers = [int.from_bytes(payload[:4], "little") for payload in found if payload != b"held"]
        assert numbers == list(range(numbers[0], numbers[-1] + 1)) if numbers else True
        for payload in found:
            assert payload == b"held" or len(payload) == 4 * (1 + int.from_bytes(payload[:4], "little") * 7919 % 1000)


def test_a_text_is_passed_on_in_memory() -> None:
    descriptor = write_blob(b"text" * 50_000)
    assert read_blob(descriptor) == b"text" * 50_000
    os.close(descriptor)
    with pytest.raises(ValueError, match=str(MAX_BLOB_BYTES)):
        write_blob(bytes(MAX_BLOB_BYTES + 1))


@pytest.mark.parametrize(
    "read", [read_blob, RingReader, HeartbeatReader, StepReader], ids=["blob", "ring", "heartbeat", "steps"]
)
def test_what_is_not_sealed_is_not_read(tmp_path: Path, read: Callable[[int], object]) -> None:
    # A pipe might block, and what may shrink might end a reader by SIGBUS.
    before = descriptors()
    (tmp_path / "file").write_bytes(bytes(SIZE))
    reading, writing = os.pipe()
    for descriptor in (reading, os.open(tmp_path / "file", os.O_RDONLY), os.memfd_create("x")):
        with pytest.raises(RingError):
            read(descriptor)
        os.close(descriptor)
    os.close(writing)
    assert descriptors() == before


@pytest.mark.parametrize(("make", "read"), [(HeartbeatWriter, HeartbeatReader), (StepWriter, StepReader)])
@pytest.mark.parametrize(
    ("change", "seals"),
    [
        (bytes, 0),
        (bytes, fcntl.F_SEAL_GROW),
        (lambda _whole: b"", ring.SEALS),
        (lambda whole: whole[:-8], ring.SEALS),
        (lambda whole: whole + b"\0" * 8, ring.SEALS),
        (lambda whole: whole[::-1], ring.SEALS),
        (lambda whole: bytes([whole[0] + 1]) + whole[1:], ring.SEALS),
    ],
    ids=["unsealed", "may shrink", "empty", "short", "long", "magic", "version"],
)
def test_what_is_of_another_layout_or_may_be_cut_off_is_refused(
    make: Callable[[], Any], read: Callable[[int], object], change: Callable[[bytes], bytes], seals: int
) -> None:
    writer = make()
    whole = os.pread(writer.fd, os.fstat(writer.fd).st_size, 0)
    writer.close()
    with copy_of(change(whole), seals) as copy:
        before = descriptors()
        with pytest.raises(RingError):
            read(copy)
        assert descriptors() == before


# -- log records


@pytest.fixture
def log() -> Iterator[LogWriter]:
    writer = LogWriter(200)
    yield writer
    writer.close()


@pytest.mark.parametrize(
    "text", ["what\nhappened \udcff", "x" * 5000, "\N{SNOWMAN}" * 2000], ids=["short", "long", "wide"]
)
def test_the_last_records_are_there_however_long_they_are(log: LogWriter, text: str) -> None:
    for number in range(1000):
        log.note(number + 0.5, logging.ERROR, "sglang.srt", f"{number} {text}")
    texts = {n: f"{n} {text}".encode(errors="backslashreplace").decode()[:500] for n in range(800, 1000)}
    expected = [(n + 0.5, logging.ERROR, "sglang.srt", said) for n, said in texts.items()]
    assert [(*one[:3], one.text[:500]) for one in read_log(log.fd, 200)] == expected


def mark_of(writer: RingWriter) -> bytes:
    return ring.HEADER.unpack(os.pread(writer.fd, ring.HEADER.size, 0))[2]


def crafted(capacity: int, step: int, length: int, payload: bytes = b"") -> RingWriter:
    """Return a ring in which a record of that length is claimed at every `step` bytes."""
    writer = RingWriter(capacity)
    checksum = zlib.crc32(ring.COVERED.pack(1, length, 0), zlib.crc32(payload)) if payload else 0
    frame = ring.FRAME.pack(mark_of(writer), 1, length, 0, checksum)
    os.pwrite(writer.fd, (frame + payload)[:step].ljust(step, b"\0") * (writer.capacity // step), 4096)
    return writer


@pytest.mark.wide
@given(
    st.sampled_from([8, 32, 64, 4096]),
    st.one_of(st.integers(0, 2**32 - 1), st.sampled_from([0, MAX_PAYLOAD, 1 << 20, 2**31])),
    st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_what_a_ring_claims_does_not_size_the_work(step: int, length: int, is_whole: bool) -> None:
    payload = bytes(step - ring.FRAME_BYTES) if is_whole and step > 32 else b""
    writer = crafted(4 << 20, step, len(payload) or length, payload)
    read = 0

    def counting(descriptor: int, size: int, offset: int) -> bytes:
        nonlocal read
        read += size
        return os.pread(descriptor, size, offset)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ring, "os", SimpleNamespace(pread=counting, fstat=os.fstat))
        reader = RingReader(writer.fd)
        found = sum(1 for _record in reader.records())
    writer.close()
    assert read <= 5 * (4 << 20) + (1 << 20)
    assert found == (writer.capacity // step if payload else 0)
    assert reader.torn <= ring.MAX_MISSES + 1


def test_a_reader_keeps_its_deadline() -> None:
    writer = crafted(4 << 20, 64, 32, bytes(32))
    reader = RingReader(writer.fd, deadline=time.monotonic())
    assert (list(reader.records()), reader.is_cut) == ([], True)
    writer.close()


@pytest.mark.parametrize(
    ("magic", "capacity"), [(b"SGLCKJ03", CAPACITY), (ring.MAGIC, 1 << 30)], ids=["another kit", "more than there is"]
)
def test_a_header_that_is_not_its_own_makes_no_ring(magic: bytes, capacity: int) -> None:
    with new_ring() as writer:
        head = ring.HEADER.pack(magic, capacity, mark_of(writer))
        os.pwrite(writer.fd, head + ring.CHECKSUM.pack(zlib.crc32(head)), 0)
        with pytest.raises(RingError, match="is not a ring"):
            RingReader(writer.fd)


def test_of_a_large_log_the_newest_records_alone_are_held(log: LogWriter) -> None:
    odd = RingWriter(8 << 20, "log")
    for number in range(1000):
        odd.append(ring.LOG_HEAD.pack(math.nan if number == 998 else number, 20) + b"x" * ring.MAX_LOG_BYTES)
        # Longer than any that the kit writes.
        odd.append(ring.LOG_HEAD.pack(number, 20) + b"y" * 8000)
    assert [record.seconds for record in read_log(odd.fd, 3)] == [997.0, 0.0, 999.0]
    odd.close()


@pytest.fixture
def vast_log() -> Iterator[RingWriter]:
    """Give a ring of log records that is longer than any that the kit makes, and full."""
    writer = RingWriter(96 << 20, "log")
    payload = bytes(ring.LOG_HEAD.size) + b"x" * ring.MAX_LOG_BYTES
    for _ in range(writer.capacity // (len(payload) + ring.FRAME_BYTES)):
        writer.append(payload)
    yield writer
    writer.close()


@pytest.mark.wide
@pytest.mark.parametrize(("most", "expected", "mib"), [(200, 200, 8), (1 << 30, 10_000, 64)])
def test_a_vast_log_takes_no_more_memory_than_the_records_that_are_wanted(
    vast_log: RingWriter, most: int, expected: int, mib: int
) -> None:
    tracemalloc.start()
    try:
        found = read_log(vast_log.fd, most)
        _now, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(found) == expected
    assert peak < mib << 20


def test_a_child_writes_elsewhere() -> None:
    with new_ring() as writer:
        writer.append(b"parent's")
        beat, steps = HeartbeatWriter(), StepWriter()
        steps.schedule(1, 1.0, 2, ["a"], [1], None, 1, {}, 0)
        if (pid := os.fork()) == 0:
            try:
                for _ in range(200):
                    writer.append(b"child's")
                beat.words[LOOP_TIME] = 0.0
                steps.schedule(2, 2.0, 2, ["b"], [1], None, 1, {}, 0)
                os._exit(0 if beat.words[LOOP_TIME] == 0.0 else 1)
            finally:
                os._exit(2)
        assert os.waitpid(pid, 0)[1] == 0
        writer.append(b"parent's, too")
        assert payloads(writer.fd) == [b"parent's", b"parent's, too"]
        assert beat.words[LOOP_TIME] > 0
        assert [step.number for step in StepReader(steps.fd).read().steps] == [1]
        beat.close()
        steps.close()
