"""GPU cores as the CUDA driver writes them, made up without a GPU, which NVIDIA's own cuda-gdb opens.

The layout is that of NVIDIA's cudacoredump.h. What cuda-gdb asks for: version 7 of the OS ABI, a section named
``.strtab``, contexts and modules with rows that the kernels name, a row for each thread of a warp, registers of the
thread that it looks at first, and a cubin whose symbols have addresses for values.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
SECTION = struct.Struct("<IIQQQQIIQQ")
PROGBITS, SYMTAB, STRTAB = 1, 2, 3
REGS, CUBIN, DEVICES, CONTEXTS, SMS, GRIDS, BLOCKS, WARPS, LANES, MODULES = (
    0x80000000 + number for number in (5, 7, 9, 10, 11, 12, 13, 14, 15, 16)
)
CONTEXT, FUNCTION, MODULE = 0x100, 0x200, 0x300
#: Where the made-up kernels are on the made-up GPU.
SPIN, COPY = 0x7FFF_D000_0000, 0x7FFF_D000_1000
FUNCTIONS = {"_Z11spin_kernelPVi": (SPIN, 0x400), "_Z11copy_kernelPKfPfi": (COPY, 0x200)}


@dataclass
class Part:
    """One section to be written."""

    name: str
    kind: int
    data: bytes
    link: int = 0
    info: int = 0
    row_size: int = 0
    address: int = 0


@dataclass
class Warp:
    """A warp of 32 threads, all at one place, alone on the SM of its number."""

    sm: int
    entry: int  # of the kernel that it runs
    pc: int
    failed: Mapping[int, int] = field(default_factory=dict)  # exceptions of threads, by their number
    error: int | None = None  # where that was triggered


def elf_bytes(parts: Sequence[Part], kind: int = 4, *, many_sections: bool = False) -> bytes:
    """Return an ELF file; `many_sections` numbers its sections as where there are more than the header can say."""
    names, rows, body = bytearray(b"\0"), [], bytearray()
    for part in (*parts, Part(".shstrtab", STRTAB, b"")):
        name = len(names)
        names += part.name.encode() + b"\0"
        data = part.data if part.name != ".shstrtab" else bytes(names)
        where = (6 if part.address else 0, part.address, HEADER.size + len(body), len(data))
        rows.append(SECTION.pack(name, part.kind, *where, part.link, part.info, 1, part.row_size))
        body += data
    count, last = len(rows) + 1, len(rows)
    first = SECTION.pack(0, 0, 0, 0, 0, count if many_sections else 0, last if many_sections else 0, 0, 0, 0)
    numbers = (64, 0, 0, 64, 0 if many_sections else count, 0xFFFF if many_sections else last)
    identity = bytes([0x7F, *b"ELF", 2, 1, 1, 0x33, 7]).ljust(16, b"\0")
    header = HEADER.pack(identity, kind, 190, 1, 0, 0, HEADER.size + len(body), 0, *numbers)
    return header + bytes(body) + first + b"".join(rows)


def cubin_bytes() -> bytes:
    """Return a relocated cubin with `FUNCTIONS`."""
    strings, symbols, texts = bytearray(b"\0"), [bytes(24)], []
    for index, (name, (address, size)) in enumerate(FUNCTIONS.items(), 1):
        texts.append(Part(f".text.{name}", PROGBITS, bytes(size), address=address))
        symbols.append(struct.pack("<IBBHQQ", len(strings), 0x12, 0x10, index, address, size))
        strings += name.encode() + b"\0"
    table = Part(".symtab", SYMTAB, b"".join(symbols), link=len(texts) + 2, info=1, row_size=24)
    return elf_bytes([*texts, table, Part(".strtab", STRTAB, bytes(strings))], 2)


def core_parts(devices: Sequence[Sequence[Warp]]) -> list[Part]:
    """Return the sections of a core with these warps on each GPU; the first one becomes section 1."""
    parts: list[Part] = []

    def add(kind: int, rows: Sequence[bytes], link: int = 0, info: int = 0) -> int:
        parts.append(Part(f".cudbg.{len(parts)}", kind, b"".join(rows), link, info, len(rows[0]) if rows else 1))
        return len(parts)

    texts = b"\0NVIDIA H200\0GH100\0sm_90\0"
    at = (1, texts.index(b"GH100"), texts.index(b"sm_90"))
    numbers = (8, 64, 32, 255, 7, 9, 0, 16, 0, 63, 7, 16, 0)
    rows = [struct.pack("<3Q16I", *at, device, 0x1B + device, 0, *numbers) for device in range(len(devices))]
    device_table = add(DEVICES, rows)
    for device, warps in enumerate(devices):
        context = struct.pack("<4Q2I", CONTEXT + device, 0x7FFF_F400_0000, 0x7FFF_F200_0000, 0, device, 4711)
        modules = add(MODULES, [struct.pack("<Q", MODULE)], add(CONTEXTS, [context], device_table, device))
        add(CUBIN, [cubin_bytes()], modules)
        entries = sorted({warp.entry for warp in warps})
        rows = [
            struct.pack(
                "<7Q20I",
                *(7 + number, CONTEXT + device, FUNCTION, entry, MODULE, 0, 0x210, 1, 0, 2, 32),
                *(2, 1, 1, 32, 1, 1, 0, 4711, *([0] * 8)),
            )
            for number, entry in enumerate(entries)
        ]
        add(GRIDS, rows, device_table, device)
        rows = [struct.pack("<4IQ4I", warp.sm, 0, 0, 0, 0, 0, 0, 0, 0) for warp in warps]
        sms = add(SMS, rows, device_table, device)
        for row, warp in enumerate(warps):
            grid = 7 + entries.index(warp.entry)
            blocks = add(BLOCKS, [struct.pack("<Q12I", grid, 1, *([0] * 11))], sms, row)
            mask, is_failed = 0xFFFF_FFFF, warp.error is not None
            data = struct.pack("<Q14I", warp.error or 0, 3, mask, mask, 0, is_failed, 0, 32, *([0] * 7))
            its = add(WARPS, [data], blocks)
            rows = [
                struct.pack("<2Q10I", warp.pc, 0, lane, lane, 0, 0, warp.failed.get(lane, 0), *([0] * 5))
                for lane in range(32)
            ]
            lanes = add(LANES, rows, its)
            add(REGS, [bytes(4)] * 32, lanes, min(warp.failed, default=0))
    return [*parts, Part(".strtab", STRTAB, texts)]


def core_bytes(*devices: Sequence[Warp]) -> bytes:
    """Return a core as the driver writes it."""
    return elf_bytes(core_parts(devices))


def hung_core() -> bytes:
    """Return the core of a GPU on which one kernel spins."""
    return core_bytes([Warp(0, SPIN, SPIN + 0x110)])


def failed_core() -> bytes:
    """Return the core of a GPU whose kernel read an illegal address."""
    return core_bytes([Warp(2, COPY, COPY + 0x40, dict.fromkeys(range(32), 14), COPY + 0x20)])
