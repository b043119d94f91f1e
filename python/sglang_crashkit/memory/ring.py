"""A bounded ring of records in memory that outlives the process that writes it.

The memory belongs to no file system (memfd_create(2)), and is there as long as somebody, such as a crash handler, holds
a descriptor of it. SIGKILL of the writer loses nothing of it but the record that was being written. No store ends in
SIGBUS: it is sealed against a change of its size, and reserved step by step, so that memory that is not there is an
error.

Records are framed and lie one behind the other; the newest overwrite the oldest::

    memory  header (one page: magic, version, capacity, mark, checksum) | data (`capacity` bytes)
    record  mark | sequence number, length, records lost so far | checksum | payload      at a multiple of 32 bytes

A reader needs no pointer that could be torn: it looks for the ring's *mark*, which is random, so that no payload can
forge it, and believes a record with the right checksum. A payload that meets the end of the data goes on at its
beginning.

A record may be *held*: it is written again before it would be overwritten, as long as what is held fits in seven
sixteenths of the ring. What is held beyond that is lost in the end, and counted.

The last log records of a process are kept in such a ring, too.
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

#: Another one wherever a frame or a record in it changes: a server's kit may be newer than its crash handler.
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
#: The longest payload: to copy it takes well under a millisecond.
_MAX_PAYLOAD = 1 << 20
#: The kernel clears so much memory in about a tenth of a millisecond.
_STEP_BYTES = 256 * 1024
#: A reader has so much of the ring in its memory at a time, and looks at so many times as much as the ring holds.
_BLOCK_BYTES, _MAX_LOOKS = 1 << 20, 3
#: Where a writer is killed, or goes on, few records are torn; of more the ring is not the kit's.
MAX_MISSES = 4096
#: Of the name of a logger and what it said so many bytes are kept. More records are not: a ring of them takes 21 MB.
MAX_LOG_BYTES, _MAX_LOG_RECORDS = 2048, 10_000
LOG_HEAD = struct.Struct("<dH")  # seconds since the epoch, level
#: A text that is passed on in memory, as it is longer than a datagram takes, is no longer than this, in bytes.
MAX_BLOB_BYTES = 1 << 20
#: Of ``linux/fcntl.h``, which a Python that was built on an older system lacks; see `kernel.private_files`.
_F_ADD_SEALS, _F_GET_SEALS = 1033, 1034
SEALS = 0x1 | 0x2 | 0x4  # against more seals, shrinking, growing


class RingError(CrashkitError):
    """There is no memory for a ring, a heartbeat or steps, or what was opened has another layout."""


class RingWriter:
    """Creates a ring of `size` bytes, with this `name` for the kernel, and appends to it; for one thread.

    It takes no more memory than was written to it. A reader gets `fd`, which is closed with the ring. `lost` counts the
    held records that were lost.

    Raises:
        RingError: the kernel gives no memory or no descriptor; nothing is left behind.
    """

    def __init__(self, size: int, name: str = NAME) -> None:
        self.capacity = max(size - _HEADER_BYTES, _MIN_CAPACITY) // _ALIGNMENT * _ALIGNMENT
        self.max_payload = min(self.capacity // 16, _MAX_PAYLOAD) - FRAME_BYTES
        #: A held record is written again when the head is so many bytes ahead of it.
        self._renewed_after = self.capacity - self.capacity // 8 * 3
        self.lost = 0
        self._mark = os.urandom(_MARK_BYTES)
        self._sequence = 0
        #: Where the next record goes, and where a held one lies, counted on over the end of the data.
        self._head = 0
        #: By the number of the hold, oldest first: where, bytes of the payload, its checksum.
        self._held: dict[int, tuple[int, int, int]] = {}
        self._held_bytes = 0
        #: Up to here no held record is due.
        self._none_due_until = 0
        self._reserved = min(_STEP_BYTES, self.capacity)
        head = HEADER.pack(MAGIC, self.capacity, self._mark)
        head += CHECKSUM.pack(zlib.crc32(head))
        self.fd, self._map = map_sealed(_HEADER_BYTES + self.capacity, name, head, _HEADER_BYTES + self._reserved)
        # A ring that is not closed goes with its writer.
        self._close_fd = weakref.finalize(self, os.close, self.fd)

    def append(self, payload: bytes, *, hold: int | None = None) -> None:
        """Write a record; `hold` is a number by which it is held until it is released, one that is not held now.

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
        """Let a held record be overwritten when its turn comes; one that is not held is no error."""
        held = self._held.pop(hold, None)
        if held is not None:
            self._held_bytes -= _frame_size(held[1])

    def invalidate(self) -> None:
        """Make it a ring that is not read any more: what it says would not be true from now on."""
        self._map[:_HEADER_BYTES] = bytes(_HEADER_BYTES)

    def close(self) -> None:
        """Give the memory back, unless somebody else holds it."""
        self._map.close()
        self._close_fd()

    def _renew_held(self, room: int) -> None:
        """Write the oldest held records again while there is time, before `room` bytes are written.

        Of them twice as much is written, and the rest of the last one: with three eighths of the ring as the distance,
        a row of held records of seven sixteenths of the ring is out of the way when the head arrives.
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
        # What is held from now on lies no further back.
        self._none_due_until = oldest + self._renewed_after

    def _write(self, payload: bytes, checksum: int, hold: int | None) -> None:
        begin, length = self._head, len(payload)
        end = begin + _frame_size(length)
        if end > self._reserved < self.capacity:
            # In whole steps, or to the capacity.
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
    """A record that was whole when it was looked at."""

    sequence: int  # its number; later ones have higher ones
    lost: int  # how many held records had been lost when it was written
    offset: int  # where it begins, in bytes from the beginning of the data
    payload: bytes


class RingReader:
    """Reads a ring, also while it is written or after it was damaged, and little of it at a time.

    It is read and not mapped: a page that was never written takes no memory then. The `descriptor` must stay open. What
    the writer says of sizes is not believed: no more than `_MAX_LOOKS` times the ring is looked at, no record of more
    than `max_payload` bytes, and nothing after the `deadline`, by the monotonic clock. `records` counts the `torn`
    ones, and says whether it `is_cut`: ended early, for that or as too much was torn.

    Raises:
        RingError: it cannot be read, by each method too, or it is no ring.
    """

    def __init__(self, descriptor: int, max_payload: int = _MAX_PAYLOAD, deadline: float = math.inf) -> None:
        self._fd = descriptor
        self._capacity, self._mark = _read_header(descriptor)
        self._max_payload, self._deadline = max_payload, deadline
        self._bytes_left = _MAX_LOOKS * self._capacity
        self.torn, self.is_cut = 0, False

    def records(self) -> Iterator[Record]:
        """Yield the records that are whole, in the order in which they lie, which is not that of their numbers."""
        self.torn, self.is_cut, self._bytes_left = 0, False, _MAX_LOOKS * self._capacity
        position = misses = 0
        while position < self._capacity:
            block = self._pread(position, min(_BLOCK_BYTES, self._capacity - position))
            if not block:
                break
            # Of records that the one before goes on over, none begins in this block.
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
        """Return what the record of that number holds; None when it was overwritten meanwhile."""
        frame = self._pread(offset, FRAME_BYTES)
        record = self._read(offset, memoryview(frame)) if len(frame) == FRAME_BYTES else None
        return record.payload if record is not None and record.sequence == sequence else None

    def _read(self, offset: int, known: memoryview) -> Record | None:
        """Return the record at `offset`, of which the beginning is `known`; None where there is no whole one."""
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
    """What was logged, at so many seconds since the epoch; `level` is as `logging` numbers them."""

    seconds: float
    level: int
    logger: str
    text: str


class LogWriter(RingWriter):
    """Notes the log records of this process, at least so many, each as long as it may be; for one thread at a time.

    Raises:
        RingError: there is no memory for it.
    """

    def __init__(self, records: int) -> None:
        longest = LOG_HEAD.size + MAX_LOG_BYTES + FRAME_BYTES + _ALIGNMENT
        super().__init__(_HEADER_BYTES + min(records, _MAX_LOG_RECORDS) * longest, "sglang-crashkit-log")

    def note(self, seconds: float, level: int, logger: str, text: str) -> None:
        """Note a record, as `append` does; what is longer than `MAX_LOG_BYTES` is cut."""
        said = f"{logger}\0{text}".encode(errors="backslashreplace")
        self.append(LOG_HEAD.pack(seconds, level) + said[:MAX_LOG_BYTES])


def read_log(descriptor: int, most: int, deadline: float = math.inf) -> list[LogRecord]:
    """Return the last records of a ring of log records, `most` of them, oldest first.

    No more is in memory at a time, whatever the ring holds. Nothing is read after `deadline`, by the monotonic clock.

    Raises:
        RingError: it cannot be read or is no ring.
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
    """Say whether a descriptor is of memory that is sealed as a ring's is; reading that cannot block."""
    try:
        return fcntl.fcntl(descriptor, _F_GET_SEALS) & SEALS == SEALS
    except OSError:
        # A file, a pipe, a device.
        return False


def is_sealed(descriptor: int, size: int, magic: bytes) -> bool:
    """Say whether a descriptor is of sealed memory of so many bytes that begins with `magic`."""
    return is_ring(descriptor) and os.fstat(descriptor).st_size == size and os.pread(descriptor, len(magic), 0) == magic


def map_sealed(size: int, name: str, head: bytes, reserved: int) -> tuple[int, mmap.mmap]:
    """Return a descriptor of memory that begins with `head`, and a map of it; no process can make it shorter or longer.

    So many bytes are `reserved`: of them, memory that is not there is missed now and not at the first store. A child
    that this process forks writes elsewhere.

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
        # With all pages where all are there, or each would be looked for at the first store to it.
        flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if reserved == size else 0)
        mapping = mmap.mmap(descriptor, size, flags=flags)
    except (OSError, ValueError) as error:
        if descriptor >= 0:
            os.close(descriptor)
        raise _no_memory(error) from error
    _own_maps.add(mapping)
    return descriptor, mapping


#: What this process writes to and its crash handler reads; a child that it forks writes elsewhere.
_own_maps: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()
_map_pages = ctypes.CDLL(None, use_errno=True).mmap
_map_pages.restype = ctypes.c_void_p
_map_pages.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
#: Of ``asm-generic/mman.h``: in place of what is there, and promised no memory before it is written to.
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000


def _detach_child() -> None:
    """Have a forked child write to private memory: what it writes is lost."""
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
    """Return what the memory holds, of which `MAX_BLOB_BYTES` at most.

    Raises:
        RingError: it is no such memory; reading anything else might block.
    """
    try:
        if is_ring(descriptor):
            return os.pread(descriptor, MAX_BLOB_BYTES, 0)
    except OSError as error:
        raise RingError(f"cannot be read: {error.strerror}") from error
    raise RingError("is no sealed memory")


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
    raise RingError("is no ring, was switched off, or its header is damaged")
