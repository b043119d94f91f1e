"""A file that is whole by what its ELF headers say, as a GPU core of the CUDA driver's, and holds nothing to read."""

from __future__ import annotations

import struct

HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
SECTION = struct.Struct("<IIQQQQIIQQ")
PROGBITS = 1


def core_bytes(payload: int = 4096, *, many_sections: bool = False) -> bytes:
    """Return one; `many_sections` numbers its sections as where there are more than the header can say."""
    first = SECTION.pack(0, 0, 0, 0, 0, 2 if many_sections else 0, 0, 0, 0, 0)
    section = SECTION.pack(0, PROGBITS, 0, 0, HEADER.size, payload, 0, 0, 1, 0)
    identity = bytes([0x7F, *b"ELF", 2, 1, 1, 0x33, 7]).ljust(16, b"\0")
    numbers = (64, 0, 0, 64, 0 if many_sections else 2, 0)
    header = HEADER.pack(identity, 4, 190, 1, 0, 0, HEADER.size + payload, 0, *numbers)
    return header + b"g" * payload + first + section
