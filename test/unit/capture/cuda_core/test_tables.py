from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_crashkit.capture.cuda_core import tables
from sglang_crashkit.capture.cuda_core.sections import ElfPart, Kind
from sglang_crashkit.capture.cuda_core.source import CudaCoreError, Source
from sglang_crashkit.capture.cuda_core.tables import Rows
from unit.synthetic_core import SM_ROW, SMTBL, Part, elf_bytes

Write = Callable[[bytes], Path]


def rows_of(path: Path) -> list[tables.Row]:
    with Source(path) as source:
        part = ElfPart(source)
        rows = Rows(part)
        return [row for section in part.sections((Kind.SMS,)) for row in rows.of(section, tables.SMS)]


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
    ],
)
def test_rows_that_cannot_be_are_refused(write: Write, size: int, data: bytes, words: str) -> None:
    with pytest.raises(CudaCoreError, match=words):
        rows_of(write(elf_bytes([Part(".cudbg.smtbl", SMTBL, data, row_size=size)])))


def test_an_empty_table_has_no_rows(write: Write) -> None:
    assert rows_of(write(elf_bytes([Part(".cudbg.smtbl", SMTBL, b"")]))) == []


def test_a_compressed_table_is_not_unpacked(write: Write) -> None:
    part = Part(".cudbg.smtbl", SMTBL, bytes(24), row_size=8, flags=1 << 11)
    with pytest.raises(CudaCoreError, match="is compressed"):
        rows_of(write(elf_bytes([part])))


def test_all_tables_together_have_a_limit(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "MOST_ROWS", 10)
    parts = [Part(".cudbg.smtbl", SMTBL, bytes(48), row_size=8)] * 2
    with pytest.raises(CudaCoreError, match="have more than 10 rows"):
        rows_of(write(elf_bytes(parts)))


def test_a_long_table_is_read_in_pieces(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "_BYTES_AT_A_TIME", 30)
    data = b"".join(number.to_bytes(8, "little") for number in range(100))
    rows = rows_of(write(elf_bytes([Part(".cudbg.smtbl", SMTBL, data, row_size=8)])))
    assert [row["sm"] for row in rows] == list(range(100))
