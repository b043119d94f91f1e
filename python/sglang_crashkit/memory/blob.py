"""A text in memory that is passed on by its descriptor: longer than a datagram takes, and on no disk."""

from __future__ import annotations

import os

from sglang_crashkit.memory.ring import RingError, create_sealed, is_ring

#: What is longer is not taken, in bytes.
MAX_BYTES = 1 << 20


def write_blob(data: bytes) -> int:
    """Return a descriptor of memory that holds `data`; the caller closes it.

    Raises:
        ValueError: it is longer than `MAX_BYTES`.
        RingError: the kernel gives no memory or no descriptor.
    """
    if len(data) > MAX_BYTES:
        raise ValueError(f"{len(data)} bytes are over {MAX_BYTES}")
    descriptor = create_sealed(len(data), "sglang-crashkit-launch")
    try:
        os.pwrite(descriptor, data, 0)
    except OSError as error:
        os.close(descriptor)
        raise RingError(f"there is no memory: {error.strerror}") from error
    return descriptor


def read_blob(descriptor: int) -> bytes:
    """Return what the memory holds, of which `MAX_BYTES` at most.

    Raises:
        RingError: it is no such memory; reading anything else might block.
    """
    try:
        if is_ring(descriptor):
            return os.pread(descriptor, MAX_BYTES, 0)
    except OSError as error:
        raise RingError(f"cannot be read: {error.strerror}") from error
    raise RingError("is no sealed memory")
