"""A bounded ring of records in a memory-mapped file, written by one process and readable after any death of it.

What a process stored into a shared mapping is the kernel's: SIGKILL loses nothing of it but the record that was being
written. Records are framed and lie one behind the other; the newest overwrite the oldest::

    file    header (one page: magic, version, capacity, mark, checksum) | data (`capacity` bytes)
    record  mark | sequence number, length, records lost so far | checksum | payload      at a multiple of 32 bytes

A reader needs no pointer that could be torn: it looks for the ring's *mark* and believes a record whose checksum is
right. The mark is random, so no payload can hold a record that was made to be believed. A payload that meets the end of
the data goes on at its beginning.

A record may be *held*: it is written again before it would be overwritten, so that it outlives the newer ones, as long
as what is held fits in half of the ring. What is held beyond that is lost in the end, and counted.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from sglang_crashkit.errors import CrashkitError

_MAGIC = b"SGLCKJ01"
_HEADER_BYTES = 4096
_FILE = struct.Struct("<8sQ8s")  # magic, capacity, mark; a checksum of these follows
_ALIGNMENT = 32
_COVERED = struct.Struct("<QII")  # sequence number, length of the payload, records lost so far
_CHECKSUM = struct.Struct("<I4x")
_MARK_BYTES = 8
_FRAME = struct.Struct("<8sQIII4x")  # mark, the covered fields, checksum
_FRAME_BYTES = _FRAME.size
_MIN_CAPACITY = 64 * 1024


class RingError(CrashkitError):
    """The file cannot be made, or it is no ring."""


class RingWriter:
    """Creates a ring and appends to it; for one thread.

    The file has mode 0600, is locked (flock(2)) as long as this process lives, and its blocks are reserved before the
    first byte: a disk that is full gives an error here, and never the SIGBUS of a mapping without blocks.

    Args:
        path: the file, which must not exist.
        size: how long the file may be, in bytes.

    Raises:
        RingError: the disk is full, or the file cannot be created or mapped; nothing is left behind.
    """

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        self.capacity = max(size - _HEADER_BYTES, _MIN_CAPACITY) // _ALIGNMENT * _ALIGNMENT
        self.max_payload = self.capacity // 16 - _FRAME_BYTES
        self.lost = 0
        self._mark = os.urandom(_MARK_BYTES)
        self._sequence = 0
        #: Where the next record goes, and where a held one lies, counted on over the end of the data.
        self._head = 0
        self._held: dict[int, tuple[int, int]] = {}
        self._held_bytes = 0
        self._credit = 0
        self._map = self._create(path)

    def append(self, payload: bytes, *, hold: int | None = None) -> None:
        """Write a record.

        Args:
            payload: at most `max_payload` bytes.
            hold: a number by which the record is held until it is released; one that is not held now.

        Raises:
            ValueError: the payload is too long, or the ring is closed.
        """
        if len(payload) > self.max_payload:
            raise ValueError(f"a record of {len(payload)} bytes is over {self.max_payload}")
        size = _frame_size(len(payload))
        self._credit = min(self._credit + 2 * size, self.capacity // 4)
        self._renew_held()
        self._write(payload, size, hold)

    def release(self, hold: int) -> None:
        """Let a held record be overwritten when its turn comes; one that is not held is no error."""
        held = self._held.pop(hold, None)
        if held is not None:
            self._held_bytes -= held[1]

    def close(self) -> None:
        """Give the mapping and the lock back; the file stays."""
        self._map.close()

    def _create(self, path: Path) -> mmap.mmap:
        length = _HEADER_BYTES + self.capacity
        descriptor = -1
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.posix_fallocate(descriptor, 0, length)
            # The mapping has a descriptor of its own, which keeps the lock.
            mapping = mmap.mmap(descriptor, length)
        except (OSError, ValueError) as error:
            if descriptor >= 0:
                path.unlink(missing_ok=True)
            reason = error.strerror if isinstance(error, OSError) else error
            raise RingError(
                f"{length / 2**20:.0f} MiB cannot be reserved in {path}: {reason}",
                next_step=f"see what is free there: df -h {path.parent}",
            ) from error
        finally:
            if descriptor >= 0:
                os.close(descriptor)
        head = _FILE.pack(_MAGIC, self.capacity, self._mark)
        head += _CHECKSUM.pack(zlib.crc32(head))
        mapping[: len(head)] = head
        return mapping

    def _renew_held(self) -> None:
        """Write the oldest held records again while there is time: twice as much as the new records need.

        With that and three eighths of the ring as the distance, a row of held records of half the ring is out of the
        way when the head arrives, and no single record makes the writer wait for all of them.
        """
        while self._held and self._held_bytes <= self.capacity // 2:
            hold, (position, size) = next(iter(self._held.items()))
            if position + self.capacity - self._head >= self.capacity // 8 * 3 or size > self._credit:
                break
            self._credit -= size
            self.release(hold)
            offset = position % self.capacity
            with memoryview(self._map) as view:
                _mark, _sequence, length, _lost, _checksum = _FRAME.unpack_from(view, _HEADER_BYTES + offset)
                payload = _read_payload(view, offset, length, self.capacity)
            self._write(payload, size, hold)

    def _write(self, payload: bytes, size: int, hold: int | None) -> None:
        begin, self._head = self._head, self._head + size
        while self._held:
            oldest, (position, _size) = next(iter(self._held.items()))
            if position >= self._head - self.capacity:
                break
            self.release(oldest)
            self.lost += 1
        covered = _COVERED.pack(self._sequence, len(payload), self.lost)
        checksum = zlib.crc32(payload, zlib.crc32(covered))
        data = b"".join((self._mark, covered, _CHECKSUM.pack(checksum), payload))
        offset = begin % self.capacity
        start = _HEADER_BYTES + offset
        room = self.capacity - offset
        if len(data) <= room:
            self._map[start : start + len(data)] = data
        else:
            self._map[start : start + room] = data[:room]
            self._map[_HEADER_BYTES : _HEADER_BYTES + len(data) - room] = data[room:]
        self._sequence += 1
        if hold is not None:
            self._held[hold] = (begin, size)
            self._held_bytes += size


class Record(NamedTuple):
    """A record that was whole when it was looked at.

    Attributes:
        sequence: its number; later ones have higher ones.
        lost: how many held records had been lost when it was written.
        offset: where it begins, in bytes from the beginning of the data.
        head: the first bytes of its payload.
    """

    sequence: int
    lost: int
    offset: int
    head: bytes


class RingReader:
    """Reads a ring, also while it is written, cut off or damaged.

    Args:
        path: the file.
        head_bytes: how much of each payload is kept in `Record.head`.

    Attributes:
        records: the records that are whole, oldest first.
        torn: how many begin but are not whole.

    Raises:
        RingError: the file cannot be read, or its header is no ring's.
    """

    def __init__(self, path: Path, head_bytes: int = 0) -> None:
        try:
            with path.open("rb") as file:
                # Beyond the end of the file there would be SIGBUS; nobody makes it shorter.
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise RingError(f"{path} cannot be read: {error}") from error
        try:
            self._capacity, self._mark = _read_file_header(self._map, path)
        except RingError:
            self._map.close()
            raise
        self.torn = 0
        with memoryview(self._map) as view:
            self.records = sorted(self._scan(view, head_bytes))

    def payload(self, record: Record) -> bytes | None:
        """Return what a record holds; None when it was overwritten meanwhile."""
        with memoryview(self._map) as view:
            found = self._read(view, record.offset)
        return found[2] if found is not None and found[0] == record.sequence else None

    def close(self) -> None:
        """Give the mapping back."""
        self._map.close()

    def __enter__(self) -> RingReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _scan(self, view: memoryview, head_bytes: int) -> Iterator[Record]:
        position = _HEADER_BYTES
        while (position := self._map.find(self._mark, position)) != -1:
            offset = position - _HEADER_BYTES
            position += _MARK_BYTES
            if offset % _ALIGNMENT or offset >= self._capacity:
                continue
            found = self._read(view, offset)
            if found is None:
                self.torn += 1
                continue
            sequence, lost, payload = found
            yield Record(sequence, lost, offset, payload[:head_bytes])

    def _read(self, view: memoryview, offset: int) -> tuple[int, int, bytes] | None:
        """Return sequence number, losses and payload of the record at `offset`; None where there is no whole one."""
        start = _HEADER_BYTES + offset
        if start + _FRAME_BYTES > len(view):
            return None
        mark, sequence, length, lost, checksum = _FRAME.unpack_from(view, start)
        if mark != self._mark or length > self._capacity - _FRAME_BYTES:
            return None
        payload = _read_payload(view, offset, length, self._capacity)
        covered = view[start + _MARK_BYTES : start + _MARK_BYTES + _COVERED.size]
        return (sequence, lost, payload) if zlib.crc32(payload, zlib.crc32(covered)) == checksum else None


def _frame_size(length: int) -> int:
    return -(-(_FRAME_BYTES + length) // _ALIGNMENT) * _ALIGNMENT


def _read_payload(view: memoryview, offset: int, length: int, capacity: int) -> bytes:
    """Return the payload of the record at `offset`, which may go on at the beginning of the data."""
    begin = (offset + _FRAME_BYTES) % capacity
    end = min(begin + length, capacity)
    first = view[_HEADER_BYTES + begin : _HEADER_BYTES + end]
    rest = length - (end - begin)
    return b"".join((first, view[_HEADER_BYTES : _HEADER_BYTES + rest])) if rest else bytes(first)


def _read_file_header(data: mmap.mmap, path: Path) -> tuple[int, bytes]:
    head = data[: _FILE.size + _CHECKSUM.size]
    if len(head) == _FILE.size + _CHECKSUM.size:
        magic, capacity, mark = _FILE.unpack_from(head)
        (checksum,) = _CHECKSUM.unpack_from(head, _FILE.size)
        if magic == _MAGIC and zlib.crc32(head[: _FILE.size]) == checksum and capacity >= _MIN_CAPACITY:
            return capacity, mark
    raise RingError(f"{path} is no ring, or its header is damaged")
