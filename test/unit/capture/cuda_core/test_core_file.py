from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_crashkit.capture.cuda_core import core_file
from sglang_crashkit.capture.cuda_core.core_file import CudaCoreError, ElfPart, Kind, Source, open_source
from unit.capture.cuda_core.synthetic_core import DEVTBL, PROGBITS, SM_ROW, SMTBL, STRTAB, Part, elf_bytes

Write = Callable[[bytes], Path]


def test_it_reads_pieces(tmp_path: Path) -> None:
    path = tmp_path / "core"
    path.write_bytes(b"0123456789")
    with open_source(path) as source:
        assert source.size == 10
        assert source.read(2, 3, "a piece") == b"234"
        assert source.read(10, 0, "nothing") == b""
        with pytest.raises(CudaCoreError, match="a piece reaches to byte 11, and the file has 10"):
            source.read(8, 3, "a piece")
        with pytest.raises(CudaCoreError):
            source.read(-1, 1, "a piece")


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        *((kind, "is no file") for kind in ("fifo", "folder", "device")),
        *((kind, "cannot be opened") for kind in ("none", "nul\0byte")),
    ],
)
def test_what_is_no_file_is_not_read(tmp_path: Path, kind: str, why: str) -> None:
    path = Path("/dev/zero") if kind == "device" else tmp_path / kind
    if kind == "fifo":
        # Nobody writes to it: to open it as a file is would take for ever.
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    with pytest.raises(CudaCoreError, match=why):
        Source(path)


def test_bytes_and_time_are_bounded(tmp_path: Path) -> None:
    path = tmp_path / "core"
    path.write_bytes(bytes(1000))
    with open_source(path, max_bytes=2000) as source:
        source.read(0, 1000, "all")
        source.read(0, 1000, "all")
        with pytest.raises(CudaCoreError, match="take more than is read of a core"):
            source.read(0, 1, "a byte")
    with open_source(path, max_seconds=-1.0) as source, pytest.raises(CudaCoreError, match="in time"):
        source.read(0, 1, "a byte")


PARTS = [
    Part(".cudbg.devtbl", DEVTBL, b"abcd", row_size=2),
    Part(".text", PROGBITS, b"code", address=0x1000),
    Part(".strtab", STRTAB, b"\0first\0\xff\0last"),
]


@pytest.mark.parametrize("many_sections", [False, True])
def test_sections_are_found_by_kind_and_by_address(write: Write, many_sections: bool) -> None:
    with open_source(write(elf_bytes(PARTS, many_sections=many_sections))) as source:
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


def changed(data: bytes, at: int, value: int, size: int) -> bytes:
    """Return a file with another number at a place."""
    return data[:at] + value.to_bytes(size, "little") + data[at + size :]


WHOLE, MANY = elf_bytes(PARTS), elf_bytes(PARTS, many_sections=True)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "is no ELF file"),
        (b"not an ELF file, but text, and longer than the header of one is", "is no ELF file"),
        (b"\x7fELF\x01\x01".ljust(100, b"\0"), "is no ELF file of 64 bits"),
        (b"\x7fELF\x02\x02".ljust(100, b"\0"), "is no ELF file of 64 bits, little-endian"),
        (b"\x7fELF\x02\x01\x01\x33", "is no ELF file"),
        (elf_bytes(PARTS, 2), r"no core of the CUDA driver's.*\n.*CUDA_COREDUMP_FILE"),
        (elf_bytes(PARTS, osabi=0), r"no core of the CUDA driver's.*\n.*CUDA_COREDUMP_FILE"),
        # How many sections there are, by the first one of them, and by the header; how long a row of their table is.
        (changed(MANY, int.from_bytes(MANY[40:48], "little") + 32, 1 << 40, 8), "there are 1099511627776 sections"),
        (changed(WHOLE, 60, 5000, 2), "beyond the end"),
        *((changed(WHOLE, 58, size, 2), f"has {size} bytes") for size in (8, 60_000)),
    ],
)
def test_what_is_no_core_of_a_gpu_is_refused(write: Write, data: bytes, words: str) -> None:
    def read() -> None:
        with open_source(write(data)) as source:
            part = ElfPart(source)
            part.check_is_core()
            list(part.sections((Kind.DEVICES,)))

    with pytest.raises(CudaCoreError, match=words):
        read()


def test_too_many_tables_are_refused(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_file, "MAX_TABLES", 10)
    many = [Part(".cudbg.devtbl", DEVTBL, b"")] * 11
    with open_source(write(elf_bytes(many))) as source, pytest.raises(CudaCoreError, match="more than 10 tables"):
        list(ElfPart(source).sections((Kind.DEVICES,)))


def test_a_name_without_an_end_is_cut(write: Write) -> None:
    parts = [Part(".strtab", STRTAB, b"n" * 100_000)]
    with open_source(write(elf_bytes(parts))) as source:
        part = ElfPart(source)
        assert len(part.string(next(part.sections((Kind.STRTAB,))), 0)) == core_file.MAX_NAME_BYTES


def rows_of(path: Path) -> list[core_file.Row]:
    with open_source(path) as source:
        part = ElfPart(source)
        return [row for section in part.sections((Kind.SMS,)) for row in part.rows(section, core_file.SMS)]


@pytest.mark.parametrize("size", [8, 12, 16, 24, 40, 41, 64, 4096])
def test_rows_are_read_as_far_as_they_reach(write: Write, size: int) -> None:
    full = [SM_ROW.pack(number, 0, 14, 1, 0x7000 + number, 0, 0, 0, 0) for number in (3, 4)]
    data = b"".join(row[:size].ljust(size, b"\xee") for row in full)
    expected = [
        {"sm": number}
        | ({"exception": 14} if size >= 12 else {})
        | ({"error_pc_valid": 1} if size >= 16 else {})
        | ({"error_pc": 0x7000 + number} if size >= 24 else {})
        for number in (3, 4)
    ]
    assert rows_of(write(elf_bytes([Part(".cudbg.smtbl", SMTBL, data, row_size=size)]))) == expected


@pytest.mark.parametrize(
    ("size", "data", "words"),
    [
        (0, b"12345678", "has rows of 0 bytes, and at least 8 are needed"),
        (7, b"1234567", "has rows of 7 bytes"),
        (4097, bytes(4097), "has rows of 4097 bytes"),
        (8, b"123456789", "has 9 bytes, which are no whole rows of 8"),
        (8, bytes(24), "is compressed"),
    ],
)
def test_rows_that_cannot_be_are_refused(write: Write, size: int, data: bytes, words: str) -> None:
    part = Part(".cudbg.smtbl", SMTBL, data, row_size=size, flags=1 << 11 if "compressed" in words else 0)
    with pytest.raises(CudaCoreError, match=words):
        rows_of(write(elf_bytes([part])))


def test_all_tables_together_have_a_limit(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_file, "MAX_ROWS", 10)
    parts = [Part(".cudbg.smtbl", SMTBL, bytes(48), row_size=8)] * 2
    with pytest.raises(CudaCoreError, match="have more than 10 rows"):
        rows_of(write(elf_bytes(parts)))
