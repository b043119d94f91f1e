"""A bounded ring of records in memory that outlives the process that writes it.

The memory belongs to no file system (memfd_create(2)), and exists as long as a process, such as the crash handler,
holds a descriptor of it. If the writer is killed, only the record that it was writing is lost. No store raises SIGBUS:
the memory is sealed against changes of its size, and allocated step by step, so that a lack of memory is an error.

Records are framed and follow one another; the newest overwrite the oldest::

    memory  header (one page: magic, version, capacity, mark, checksum) | data (`capacity` bytes)
    record  mark | sequence number, length, records lost so far | checksum | payload      at a multiple of 32 bytes

A reader needs no pointer, which could be torn. It searches for the ring's *mark*, which is random so that no payload
can forge it, and accepts a record if its checksum is right. A payload that reaches the end of the data continues at
the beginning.

A record may be *held*: it is written again before it would be overwritten, as long as all held records fit in seven
sixteenths of the ring. Held records beyond that are lost in the end, and counted.

The last log records of a process are kept in a ring, too.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import math
import mmap
import os
import struct
import time
import weakref
import zlib
from collections.abc import Iterator
from typing import NamedTuple

from sglang_crashkit.errors import CrashkitError
from sglang_crashkit.kernel.private_files import create_in_memory

NAME = "sglang-crashkit-journal"

#: Changes with the layout of a frame or of a record in it: a server's kit may be newer than its crash handler.
MAGIC = b"SGLCKJ04"
_HEADER_BYTES = 4096
HEADER = struct.Struct("<8sQ8s")  # magic, capacity, mark; a checksum of these follows
_ALIGNMENT = 32
COVERED = struct.Struct("<QII")  # sequence number, length of the payload, records lost so far
CHECKSUM = struct.Struct("<I4x")
_MARK_BYTES = 8
FRAME = struct.Struct("<8sQIII4x")  # mark, the covered fields, checksum
FRAME_BYTES = FRAME.size
_MIN_CAPACITY = 64 * 1024
_MAX_CAPACITY = 1 << 30
#: The maximum length of a payload, in bytes: copying it takes well under a millisecond.
_MAX_PAYLOAD = 1 << 20
#: Memory is allocated in steps of this size, in bytes, each of which the kernel clears in about 0.1 ms.
_STEP_BYTES = 256 * 1024
#: How many bytes of the ring a reader has in memory at a time; how many times the ring's capacity it reads at most.
_BLOCK_BYTES, _MAX_LOOKS = 1 << 20, 3
#: The maximum number of torn records. A writer that is killed or goes on tears few; a ring with more is not the kit's.
MAX_MISSES = 4096
#: The maximum length of a logger's name and message, in bytes; the maximum number of records: their ring takes 21 MB.
MAX_LOG_BYTES, _MAX_LOG_RECORDS = 2048, 10_000
LOG_HEAD = struct.Struct("<dH")  # seconds since the epoch, level
#: The maximum length of a text that is passed in memory because it does not fit in a datagram, in bytes.
MAX_BLOB_BYTES = 1 << 20
#: From ``linux/fcntl.h``; a Python that was built on an older system lacks them; see `kernel.private_files`.
_F_ADD_SEALS, _F_GET_SEALS = 1033, 1034
SEALS = 0x1 | 0x2 | 0x4  # against more seals, shrinking, growing


class RingError(CrashkitError):
    """There is no memory for a ring, a heartbeat or steps, or the opened memory has another layout."""


class RingWriter:
    """Creates a ring of `size` bytes, which the kernel shows as `name`, and appends to it; for one thread.

    It takes no more memory than was written to it. A reader gets `fd`, which is closed with the ring. `lost` is the
    number of held records that were lost.

    Raises:
        RingError: the kernel gives no memory or no descriptor; nothing is left behind.
    """

    def __init__(self, size: int, name: str = NAME) -> None:
        self.capacity = max(size - _HEADER_BYTES, _MIN_CAPACITY) // _ALIGNMENT * _ALIGNMENT
        self.max_payload = min(self.capacity // 16, _MAX_PAYLOAD) - FRAME_BYTES
        #: A held record is written again when the head is this many bytes ahead of it.
        self._renewed_after = self.capacity - self.capacity // 8 * 3
        self.lost = 0
        self._mark = os.urandom(_MARK_BYTES)
        self._sequence = 0
        #: The position of the next record. This and the positions of held records count on beyond the end of the data.
        self._head = 0
        #: The held records by the number of the hold, oldest first: position, bytes of the payload, its checksum.
        self._held: dict[int, tuple[int, int, int]] = {}
        self._held_bytes = 0
        #: No held record is due before the head is beyond this position.
        self._none_due_until = 0
        self._reserved = min(_STEP_BYTES, self.capacity)
        head = HEADER.pack(MAGIC, self.capacity, self._mark)
        head += CHECKSUM.pack(zlib.crc32(head))
        self.fd, self._map = map_sealed(_HEADER_BYTES + self.capacity, name, head, _HEADER_BYTES + self._reserved)
        # Closes the descriptor of a ring that is not closed when its writer is deleted.
        self._close_fd = weakref.finalize(self, os.close, self.fd)

    def append(self, payload: bytes, *, hold: int | None = None) -> None:
        """Write a record, and hold it until `release` if `hold` is a number, which must not be in use.

        Raises:
            ValueError: the payload is too long, or the ring is closed.
            RingError: the kernel gives no more memory.
        """
        if len(payload) > self.max_payload:
            raise ValueError(f"a record of {len(payload)} bytes is over {self.max_payload}")
        if self._head + _frame_size(len(payload)) > self._none_due_until:
            self._renew_held(_frame_size(len(payload)))
        self._write(payload, zlib.crc32(payload), hold)

    def release(self, hold: int) -> None:
        """Let a held record be overwritten when its turn comes; do nothing if it is not held."""
        held = self._held.pop(hold, None)
        if held is not None:
            self._held_bytes -= _frame_size(held[1])

    def invalidate(self) -> None:
        """Make the ring unreadable, because its contents would not be true any more."""
        self._map[:_HEADER_BYTES] = bytes(_HEADER_BYTES)

    def close(self) -> None:
        """Free the memory, unless another process holds it."""
        self._map.close()
        self._close_fd()

    def _renew_held(self, room: int) -> None:
        """Write the oldest held records again, if the head is near them, before `room` bytes are written.

        It writes twice `room` bytes of them, and the rest of the last record. It begins when the head is three eighths
        of the ring away, so that a run of held records of seven sixteenths of the ring is moved before it arrives.
        """
        left = 2 * room
        while self._held:
            hold, (position, length, checksum) = next(iter(self._held.items()))
            size = _frame_size(length)
            is_lost = position + self.capacity < self._head + room
            is_due = position + self._renewed_after < self._head
            if not is_lost and (not is_due or left <= 0 or self._held_bytes > self.capacity // 2):
                break
            self.release(hold)
            if is_lost:
                self.lost += 1
            else:
                left -= size
                start = (position + FRAME_BYTES) % self.capacity
                until_end = min(length, self.capacity - start)
                payload = self._map[_HEADER_BYTES + start : _HEADER_BYTES + start + until_end]
                payload += self._map[_HEADER_BYTES : _HEADER_BYTES + length - until_end]
                self._write(payload, checksum, hold)
        oldest = next(iter(self._held.values()), (self._head,))[0]
        # A record that is held from now on lies at no earlier position.
        self._none_due_until = oldest + self._renewed_after

    def _write(self, payload: bytes, checksum: int, hold: int | None) -> None:
        begin, length = self._head, len(payload)
        end = begin + _frame_size(length)
        if end > self._reserved < self.capacity:
            # Allocate whole steps, or up to the capacity.
            reserved = min(-(-end // _STEP_BYTES) * _STEP_BYTES, self.capacity)
            try:
                os.posix_fallocate(self.fd, _HEADER_BYTES + self._reserved, reserved - self._reserved)
            except OSError as error:
                raise _no_memory(error) from error
            self._reserved = reserved
        self._head = end
        place = begin % self.capacity
        data, start, rest = self._map, _HEADER_BYTES + place, place + FRAME_BYTES + length - self.capacity
        if rest <= 0:
            data[start + FRAME_BYTES : start + FRAME_BYTES + length] = payload
        else:
            data[start + FRAME_BYTES : _HEADER_BYTES + self.capacity] = payload[: length - rest]
            data[_HEADER_BYTES : _HEADER_BYTES + rest] = payload[length - rest :]
        of_all = zlib.crc32(COVERED.pack(self._sequence, length, self.lost), checksum)
        FRAME.pack_into(data, start, self._mark, self._sequence, length, self.lost, of_all)
        self._sequence += 1
        if hold is not None:
            self._held[hold] = begin, length, checksum
            self._held_bytes += end - begin


class Record(NamedTuple):
    """A record that was complete when it was read."""

    sequence: int  # its number; later records have higher numbers
    lost: int  # how many held records had been lost when it was written
    offset: int  # where it begins, in bytes from the beginning of the data
    payload: bytes


class RingReader:
    """Reads a ring, a part of it at a time, also while it is written or after it was damaged.

    The ring is not mapped, so that a page that was never written takes no memory. The `descriptor` must stay open.
    Sizes in the ring are not trusted: at most `_MAX_LOOKS` times its capacity is read, no record of more than
    `max_payload` bytes, and nothing after the `deadline`, by the monotonic clock. `records` sets `torn`, the number of
    torn records, and `is_cut`: whether it ended early, by one of these limits or because too many records are torn.

    Raises:
        RingError: it is not a ring; or it cannot be read, which each method raises, too.
    """

    def __init__(self, descriptor: int, max_payload: int = _MAX_PAYLOAD, deadline: float = math.inf) -> None:
        self._fd = descriptor
        self._capacity, self._mark = _read_header(descriptor)
        self._max_payload, self._deadline = max_payload, deadline
        self._bytes_left = _MAX_LOOKS * self._capacity
        self.torn, self.is_cut = 0, False

    def records(self) -> Iterator[Record]:
        """Yield the complete records in the order of their offsets, which is not that of their numbers."""
        self.torn, self.is_cut, self._bytes_left = 0, False, _MAX_LOOKS * self._capacity
        position = misses = 0
        while position < self._capacity:
            block = self._pread(position, min(_BLOCK_BYTES, self._capacity - position))
            if not block:
                break
            # The next block begins behind this one, or behind a record that extends beyond it.
            found, end = block.find(self._mark), len(block)
            while found != -1:
                if self._bytes_left <= 0 or misses > MAX_MISSES or time.monotonic() > self._deadline:
                    self.is_cut = True
                    return
                offset, size, record = position + found, _MARK_BYTES, None
                if offset % _ALIGNMENT == 0 and len(block) - found >= FRAME_BYTES:
                    record = self._read(offset, memoryview(block)[found:])
                    self.torn += record is None
                if record is not None:
                    size = _frame_size(len(record.payload))
                    end = max(end, found + size)
                    yield record
                misses += record is None
                found = block.find(self._mark, found + size)
            position += end

    def payload(self, offset: int, sequence: int) -> bytes | None:
        """Return the payload of the record with this offset and number; None if it has been overwritten."""
        frame = self._pread(offset, FRAME_BYTES)
        record = self._read(offset, memoryview(frame)) if len(frame) == FRAME_BYTES else None
        return record.payload if record is not None and record.sequence == sequence else None

    def _read(self, offset: int, known: memoryview) -> Record | None:
        """Return the record at `offset`, whose first bytes are `known`; None if there is no complete record."""
        mark, sequence, length, lost, checksum = FRAME.unpack_from(known)
        if mark != self._mark or length > min(self._max_payload, self._capacity - FRAME_BYTES):
            return None
        self._bytes_left -= _frame_size(length)
        if len(known) >= FRAME_BYTES + length:
            payload = bytes(known[FRAME_BYTES : FRAME_BYTES + length])
        else:
            begin = (offset + FRAME_BYTES) % self._capacity
            size = min(length, self._capacity - begin)
            payload = self._pread(begin, size)
            if size < length:
                payload += self._pread(0, length - size)
        covered = known[_MARK_BYTES : _MARK_BYTES + COVERED.size]
        is_whole = len(payload) == length and zlib.crc32(covered, zlib.crc32(payload)) == checksum
        return Record(sequence, lost, offset, payload) if is_whole else None

    def _pread(self, offset: int, size: int) -> bytes:
        try:
            return os.pread(self._fd, size, _HEADER_BYTES + offset)
        except OSError as error:
            raise RingError(f"cannot be read: {error.strerror}") from error


class LogRecord(NamedTuple):
    """A log record; its time is in seconds since the epoch, and `level` is a number as in `logging`."""

    seconds: float
    level: int
    logger: str
    text: str


class LogWriter(RingWriter):
    """Keeps the last log records of this process, at least `records`, even if all are long; for one thread at a time.

    Raises:
        RingError: there is no memory for it.
    """

    def __init__(self, records: int) -> None:
        longest = LOG_HEAD.size + MAX_LOG_BYTES + FRAME_BYTES + _ALIGNMENT
        super().__init__(_HEADER_BYTES + min(records, _MAX_LOG_RECORDS) * longest, "sglang-crashkit-log")

    def note(self, seconds: float, level: int, logger: str, text: str) -> None:
        """Append a log record; its name and text are cut at `MAX_LOG_BYTES`. Raises what `append` does."""
        said = f"{logger}\0{text}".encode(errors="backslashreplace")
        self.append(LOG_HEAD.pack(seconds, level) + said[:MAX_LOG_BYTES])


def read_log(descriptor: int, most: int, deadline: float = math.inf) -> list[LogRecord]:
    """Return the last `most` records of a ring of log records, oldest first.

    At most that many are in memory at a time. Nothing is read after `deadline`, by the monotonic clock.

    Raises:
        RingError: it cannot be read or is not a ring.
    """
    found = []
    records = RingReader(descriptor, LOG_HEAD.size + MAX_LOG_BYTES, deadline).records()
    newest = heapq.nlargest(min(most, _MAX_LOG_RECORDS), records, key=lambda record: record.sequence)
    for record in reversed(newest):
        if len(record.payload) >= LOG_HEAD.size:
            seconds, level = LOG_HEAD.unpack_from(record.payload)
            logger, _, text = record.payload[LOG_HEAD.size :].decode(errors="replace").partition("\0")
            found.append(LogRecord(seconds if 0 <= seconds < 2**33 else 0.0, level, logger, text))
    return found


def is_ring(descriptor: int) -> bool:
    """Return whether a descriptor refers to memory that is sealed like a ring's, which can be read without blocking."""
    try:
        return fcntl.fcntl(descriptor, _F_GET_SEALS) & SEALS == SEALS
    except OSError:
        # A file, a pipe, a device.
        return False


def is_sealed(descriptor: int, size: int, magic: bytes) -> bool:
    """Return whether a descriptor refers to sealed memory of `size` bytes that begins with `magic`."""
    return is_ring(descriptor) and os.fstat(descriptor).st_size == size and os.pread(descriptor, len(magic), 0) == magic


def map_sealed(size: int, name: str, head: bytes, reserved: int) -> tuple[int, mmap.mmap]:
    """Return a descriptor of memory that begins with `head`, and a mapping of it; no process can change its size.

    The first `reserved` bytes are allocated, so that a lack of memory is an error here, not at the first store. In a
    forked child, private memory replaces the mapping.

    Raises:
        RingError: the kernel gives no memory or no descriptor; nothing is left behind.
    """
    descriptor = -1
    try:
        descriptor = create_in_memory(name)
        os.fchmod(descriptor, 0o600)
        os.ftruncate(descriptor, size)
        fcntl.fcntl(descriptor, _F_ADD_SEALS, SEALS)
        os.posix_fallocate(descriptor, 0, reserved)
        os.pwrite(descriptor, head, 0)
        # If all pages are allocated, map them now. Otherwise the first store to each would be a page fault.
        flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if reserved == size else 0)
        mapping = mmap.mmap(descriptor, size, flags=flags)
    except (OSError, ValueError) as error:
        if descriptor >= 0:
            os.close(descriptor)
        raise _no_memory(error) from error
    _own_maps.add(mapping)
    return descriptor, mapping


#: The mappings that this process writes to and its crash handler reads; private memory replaces them in a forked child.
_own_maps: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()
_map_pages = ctypes.CDLL(None, use_errno=True).mmap
_map_pages.restype = ctypes.c_void_p
_map_pages.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
#: From ``asm-generic/mman.h``: replace the mapping at this address; reserve no memory before it is written to.
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000


def _detach_child() -> None:
    """In a forked child, replace the mappings by private memory: what the child writes is lost."""
    for mapping in _own_maps:
        if not mapping.closed:
            address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED | _MAP_NORESERVE
            _map_pages(address, len(mapping), mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    _own_maps.clear()


os.register_at_fork(after_in_child=_detach_child)


def write_blob(data: bytes) -> int:
    """Return a descriptor of sealed memory that holds `data`; the caller closes it.

    Raises:
        ValueError: it is longer than `MAX_BLOB_BYTES`.
        RingError: the kernel gives no memory or no descriptor.
    """
    if len(data) > MAX_BLOB_BYTES:
        raise ValueError(f"{len(data)} bytes are over {MAX_BLOB_BYTES}")
    descriptor, mapping = map_sealed(len(data), "sglang-crashkit-launch", data, len(data))
    mapping.close()
    return descriptor


def read_blob(descriptor: int) -> bytes:
    """Return the contents of sealed memory, at most `MAX_BLOB_BYTES`.

    Raises:
        RingError: it is not sealed memory, so that reading might block; or it cannot be read.
    """
    try:
        if is_ring(descriptor):
            return os.pread(descriptor, MAX_BLOB_BYTES, 0)
    except OSError as error:
        raise RingError(f"cannot be read: {error.strerror}") from error
    raise RingError("is not sealed memory")


def _no_memory(error: Exception) -> RingError:
    reason = error.strerror if isinstance(error, OSError) else error
    return RingError(f"there is no memory: {reason}", next_step="see what is free: free -m")


def _frame_size(length: int) -> int:
    return (length + FRAME_BYTES + _ALIGNMENT - 1) & -_ALIGNMENT


def _read_header(descriptor: int) -> tuple[int, bytes]:
    try:
        size = os.fstat(descriptor).st_size
        head = os.pread(descriptor, HEADER.size + CHECKSUM.size, 0)
    except OSError as error:
        raise RingError(f"cannot be read: {error.strerror}") from error
    if len(head) == HEADER.size + CHECKSUM.size:
        magic, capacity, mark = HEADER.unpack_from(head)
        (checksum,) = CHECKSUM.unpack_from(head, HEADER.size)
        is_right = magic == MAGIC and zlib.crc32(head[: HEADER.size]) == checksum
        if is_right and _MIN_CAPACITY <= capacity <= min(_MAX_CAPACITY, size - _HEADER_BYTES):
            return capacity, mark
    raise RingError("is not a ring, was switched off, or its header is damaged")
