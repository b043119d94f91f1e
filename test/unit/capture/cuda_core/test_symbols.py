from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_crashkit.capture.cuda_core.core_file import ElfPart, Kind, open_source
from sglang_crashkit.capture.cuda_core.symbols import Symbols
from unit.capture.cuda_core.synthetic_core import (
    EXECUTABLE,
    PROGBITS,
    RELFIMG,
    STRTAB,
    SYMBOL,
    SYMTAB,
    Part,
    cubin_bytes,
    elf_bytes,
)

Write = Callable[[bytes], Path]
FUNCTIONS = {"first": (0x7000, 0x100), "second": (0x8000, 0x80)}


def names_at(path: Path, *addresses: int) -> tuple[list[str | None], list[str]]:
    with open_source(path) as source:
        part = ElfPart(source)
        symbols = Symbols(part, list(part.sections((Kind.RELOCATED_IMAGE,))))
        found = [symbols.at(address) for address in addresses]
        return [function.name if function else None for function in found], symbols.problems


def core_with(*images: bytes) -> bytes:
    return elf_bytes([Part(".cudbg.relfimg.dev0.ctx0", RELFIMG, image) for image in images])


@pytest.mark.parametrize("symbols", [True, False])
def test_an_address_has_the_function_it_lies_in(write: Write, symbols: bool) -> None:
    path = write(core_with(cubin_bytes({"other": (0x100, 8)}), cubin_bytes(FUNCTIONS, symbols=symbols)))
    names, problems = names_at(path, 0x7000, 0x70FF, 0x7100, 0x8010, 0x6FFF, 0, 1 << 63)
    assert names == ["first", "first", None, "second", None, None, None]
    assert problems == []


@pytest.mark.parametrize("absolute", [False, True])
def test_functions_that_share_a_section_are_told_apart(write: Write, absolute: bool) -> None:
    strings = b"\0kernel\0called\0"
    base = 0x7000 if absolute else 0
    rows = [
        SYMBOL.pack(0, 0, 0, 0, 0, 0),
        SYMBOL.pack(1, 0x12, 0x10, 1, base, 0x40),
        SYMBOL.pack(8, 0x02, 0, 1, base + 0x40, 0x40),
        # Not a function.
        SYMBOL.pack(1, 0x01, 0, 1, base + 0x80, 0x40),
    ]
    image = elf_bytes(
        [
            Part(".text.kernel", PROGBITS, bytes(0x100), address=0x7000),
            Part(".symtab", SYMTAB, b"".join(rows), link=3, row_size=SYMBOL.size),
            Part(".strtab", STRTAB, strings),
        ],
        EXECUTABLE,
    )
    assert names_at(write(core_with(image)), 0x7010, 0x7050, 0x7090)[0] == ["kernel", "called", "kernel"]


def test_a_broken_cubin_does_not_spoil_the_others(write: Write) -> None:
    path = write(core_with(b"no ELF file", b"", cubin_bytes(FUNCTIONS)))
    names, problems = names_at(path, 0x7000)
    assert names == ["first"]
    assert len(problems) == 2
    assert all("the cubin in section" in problem for problem in problems)


def test_looking_up_addresses_is_bounded(write: Write) -> None:
    with open_source(write(core_with(cubin_bytes(FUNCTIONS))), max_bytes=100_000) as source:
        part = ElfPart(source)
        symbols = Symbols(part, list(part.sections((Kind.RELOCATED_IMAGE,))))
        assert [symbols.at(address) for address in range(1000)] == [None] * 1000
        assert 0 < len(symbols.problems) <= 10
        assert "take more than is read of a core" in symbols.problems[0]


def test_a_broken_symbol_table_is_told_of_once(write: Write) -> None:
    image = elf_bytes(
        [
            Part(".text.kernel", PROGBITS, bytes(0x100), address=0x7000),
            # Linked to nothing: there are no strings.
            Part(".symtab", SYMTAB, bytes(48), link=9, row_size=SYMBOL.size),
        ],
        EXECUTABLE,
    )
    names, problems = names_at(write(core_with(image)), 0x7000, 0x7000, 0x7020)
    assert names == ["kernel"] * 3
    assert len(problems) == 1
    assert "refers to a section 9, and there is none" in problems[0]


def test_a_packed_symbol_table_is_not_unpacked(write: Write) -> None:
    # ELF's header of packed data says zlib, and that it comes to a terabyte.
    packed = struct.pack("<IIQQ", 1, 0, 1 << 40, 1) + zlib.compress(bytes(1 << 20))
    packed += bytes(-len(packed) % SYMBOL.size)
    image = elf_bytes(
        [
            Part(".text.kernel", PROGBITS, bytes(0x100), address=0x7000),
            Part(".symtab", SYMTAB, packed, link=3, row_size=SYMBOL.size, flags=1 << 11),
            Part(".strtab", STRTAB, packed, flags=1 << 11),
        ],
        EXECUTABLE,
    )
    assert names_at(write(core_with(image)), 0x7000)[0] == ["kernel"]
