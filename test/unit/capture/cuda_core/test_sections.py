from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_crashkit.capture.cuda_core import sections
from sglang_crashkit.capture.cuda_core.sections import ElfPart, Kind
from sglang_crashkit.capture.cuda_core.source import CudaCoreError, Source
from unit.synthetic_core import DEVTBL, PROGBITS, STRTAB, Part, elf_bytes

Write = Callable[[bytes], Path]
PARTS = [
    Part(".cudbg.devtbl", DEVTBL, b"abcd", row_size=2),
    Part(".text", PROGBITS, b"code", address=0x1000),
    Part(".strtab", STRTAB, b"\0first\0\xff\0last"),
]


@pytest.mark.parametrize("many_sections", [False, True])
def test_sections_are_found_by_kind_and_by_address(write: Write, many_sections: bool) -> None:
    with Source(write(elf_bytes(PARTS, many_sections=many_sections))) as source:
        part = ElfPart(source)
        part.check_is_core()
        found = list(part.sections((Kind.DEVICES,)))
        assert [(one.index, one.kind, one.size, one.row_size) for one in found] == [(1, Kind.DEVICES, 4, 2)]
        assert part.name_of(found[0]) == ".cudbg.devtbl"
        assert part.read(found[0].offset, 4, "it") == b"abcd"
        assert [one.index for one in part.sections(loaded=True)] == [2]
        strings = next(one for one in part.sections((Kind.STRTAB,)) if part.name_of(one) == ".strtab")
        assert [part.string(strings, offset) for offset in (0, 1, 7, 9)] == ["", "first", "\\xff", "last"]
        with pytest.raises(CudaCoreError, match="a name begins at byte 99 of 13"):
            part.string(strings, 99)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "cannot be read"),
        (b"not an ELF file, but text", "Magic number does not match"),
        (b"\x7fELF\x01\x01".ljust(100, b"\0"), "not of 64 bits"),
        (b"\x7fELF\x02\x02".ljust(100, b"\0"), "not of 64 bits and little-endian"),
        (b"\x7fELF\x02\x01\x01\x33", "cannot be read"),
    ],
)
def test_what_is_no_elf_file_of_64_bits_is_refused(write: Write, data: bytes, words: str) -> None:
    with Source(write(data)) as source, pytest.raises(CudaCoreError, match=words):
        ElfPart(source)


@pytest.mark.parametrize(("kind", "osabi"), [(2, 0x33), (4, 0)])
def test_an_elf_file_that_is_no_core_of_a_gpu_is_refused(write: Write, kind: int, osabi: int) -> None:
    with Source(write(elf_bytes(PARTS, kind, osabi=osabi))) as source:
        part = ElfPart(source)
        with pytest.raises(CudaCoreError, match="no core of the CUDA driver's") as caught:
            part.check_is_core()
        assert "CUDA_COREDUMP_FILE" in str(caught.value)


def test_a_count_that_lies_is_refused(write: Write) -> None:
    data = bytearray(elf_bytes(PARTS, many_sections=True))
    table = int.from_bytes(data[40:48], "little")
    data[table + 32 : table + 40] = (1 << 40).to_bytes(8, "little")
    with Source(write(bytes(data))) as source, pytest.raises(CudaCoreError, match="there are 1099511627776 sections"):
        ElfPart(source)


def test_a_table_beyond_the_end_is_refused(write: Write) -> None:
    data = bytearray(elf_bytes(PARTS))
    data[60:62] = (5000).to_bytes(2, "little")
    with Source(write(bytes(data))) as source, pytest.raises(CudaCoreError, match="beyond the end"):
        list(ElfPart(source).sections((Kind.DEVICES,)))


@pytest.mark.parametrize("size", [8, 60_000])
def test_rows_of_the_table_that_cannot_be_are_refused(write: Write, size: int) -> None:
    data = bytearray(elf_bytes(PARTS))
    data[58:60] = size.to_bytes(2, "little")
    with Source(write(bytes(data))) as source, pytest.raises(CudaCoreError, match=f"has {size} bytes|Too small"):
        ElfPart(source)


def test_a_file_without_sections_has_none(write: Write) -> None:
    data = bytearray(elf_bytes(PARTS))
    # Neither a place, nor a size of its rows.
    data[40:48], data[58:60], data[60:62] = bytes(8), bytes(2), bytes(2)
    with Source(write(bytes(data))) as source:
        assert list(ElfPart(source).sections(loaded=True)) == []


def test_too_many_tables_are_refused(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sections, "MOST_TABLES", 10)
    many = [Part(".cudbg.devtbl", DEVTBL, b"")] * 11
    with Source(write(elf_bytes(many))) as source, pytest.raises(CudaCoreError, match="more than 10 tables"):
        list(ElfPart(source).sections((Kind.DEVICES,)))


def test_a_name_without_an_end_is_cut(write: Write) -> None:
    parts = [Part(".strtab", STRTAB, b"n" * 100_000)]
    with Source(write(elf_bytes(parts))) as source:
        part = ElfPart(source)
        assert len(part.string(next(part.sections((Kind.STRTAB,))), 0)) == sections.MOST_NAME_BYTES
