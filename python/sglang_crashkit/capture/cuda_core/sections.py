"""The section table of a core or of a cubin in it.

A core of a busy GPU has most of a million sections: registers and predicates of every thread are one each. So the
table is gone through in pieces, and only what is asked for becomes objects; the headers are read by pyelftools.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from sglang_crashkit.capture.cuda_core.source import Source, Window, parsing

#: ``EI_OSABI`` and the names that pyelftools has for ``e_machine`` (190) and ``e_type``; cudacoredump.h, "Overview".
_OSABI, _MACHINE, _CORE = 0x33, "EM_CUDA", "ET_CORE"
_ROW = struct.Struct("<IIQQQQIIQQ")
#: Four times what a GPU of 148 SMs comes to with all its threads.
MOST_SECTIONS = 4_000_000
#: A table of each block and warp of such a GPU is 20,000.
MOST_TABLES = 200_000
_ROWS_AT_A_TIME, _MOST_ROW_BYTES = 4096, 1024
#: What one that is kept takes in memory, in bytes, counts as read: many cubins may be made of the same bytes.
_SECTION_COST = 512
#: No more than that is asked from the file for a field of a header.
_BUFFER = 512
#: The names of kernels that templates make reach some thousand bytes.
MOST_NAME_BYTES = 16 * 1024
_COMPRESSED = 1 << 11


class Kind(IntEnum):
    """The types of the sections that are read; cudacoredump.h, ``CudbgSectionHeaderTypes``, and ELF's own."""

    SYMTAB = 2
    STRTAB = 3
    RELOCATED_IMAGE = 0x80000007
    DEVICES = 0x80000009
    SMS = 0x8000000B
    GRIDS = 0x8000000C
    BLOCKS = 0x8000000D
    WARPS = 0x8000000E
    LANES = 0x8000000F
    META = 0x80000016


@dataclass(frozen=True)
class Section:
    """One section.

    Attributes:
        index: its place in the section table.
        kind: its type, a `Kind` where it is one of those.
        flags: ``sh_flags``.
        name_offset: where its name begins in the section with the names, in bytes.
        address: where it is loaded.
        offset: where it begins, in bytes from the beginning of the ELF file.
        size: how long it is, in bytes.
        link: index of the section that it belongs to.
        info: which row of that one, in a core.
        row_size: how long each row is, in bytes; 0 where it has none.
    """

    index: int
    kind: int
    flags: int
    name_offset: int
    address: int
    offset: int
    size: int
    link: int
    info: int
    row_size: int

    @property
    def is_compressed(self) -> bool:
        """Whether its bytes are packed; nothing in a core is, and what is packed is not unpacked."""
        return bool(self.flags & _COMPRESSED)


class ElfPart:
    """An ELF file: a core, or a cubin in it.

    Args:
        source: the core.
        offset: where the ELF file begins in it, in bytes.
        size: how long that is, in bytes; all of the core by default.
        what: what it is, for errors.

    Attributes:
        source: as given.
        elf: the ``ELFFile`` of pyelftools.

    Raises:
        CudaCoreError: it is no ELF file of 64 bits, or its header lies.
    """

    def __init__(self, source: Source, offset: int = 0, size: int | None = None, what: str = "its ELF header") -> None:
        self.source = source
        self._offset = offset
        self._size = source.size - offset if size is None else size
        self._what = what
        with parsing(source, what):
            from elftools.elf.elffile import ELFFile

            window = io.BufferedReader(Window(source, offset, self._size, what), _BUFFER)
            self.elf: Any = ELFFile(window)
            if self.elf.elfclass != 64 or not self.elf.little_endian:
                raise ValueError("it is not of 64 bits and little-endian")
            self._table = int(self.elf["e_shoff"])
            self._row_size = int(self.elf["e_shentsize"])
            self.count = int(self.elf.num_sections())
            self._names = int(self.elf.get_shstrndx())
        if self.count > MOST_SECTIONS:
            raise source.error(f"{what} says that there are {self.count} sections")
        if self.count and not _ROW.size <= self._row_size <= _MOST_ROW_BYTES:
            raise source.error(f"{what} says that a row of the section table has {self._row_size} bytes")

    def check_is_core(self) -> None:
        """Make sure that it is a core of the CUDA driver's.

        Raises:
            CudaCoreError: it is something else.
        """
        found = (self.elf["e_type"], self.elf["e_machine"], self.elf.e_ident_raw[7])
        if found != (_CORE, _MACHINE, _OSABI):
            raise self.source.error(
                f"it is an ELF file, but no core of the CUDA driver's: type {found[0]}, machine {found[1]}, "
                f"OS ABI {found[2]:#x}",
                "name the file that CUDA_COREDUMP_FILE made",
            )

    def sections(self, kinds: Collection[int] | None = None, loaded: bool = False) -> Iterator[Section]:
        """Yield the sections of these kinds in order; those that are loaded somewhere, too, where that is asked for.

        Raises:
            CudaCoreError: the table is cut off, or more than is read of one.
        """
        wanted = frozenset(kinds or ())
        if not self.count:
            return
        row = struct.Struct(f"{_ROW.format}{self._row_size - _ROW.size}x")
        found = 0
        for first in range(0, self.count, _ROWS_AT_A_TIME):
            rows = min(_ROWS_AT_A_TIME, self.count - first)
            data = self.read(self._table + first * row.size, rows * row.size, f"the section table of {self._what}")
            for index, fields in enumerate(row.iter_unpack(data), first):
                name, kind, flags, address, offset, size, link, info, _align, row_size = fields
                if kind in wanted or (loaded and address):
                    found += 1
                    self.source.spend(_SECTION_COST)
                    if found > MOST_TABLES:
                        raise self.source.error(f"{self._what} has more than {MOST_TABLES} tables")
                    yield Section(index, kind, flags, name, address, offset, size, link, info, row_size)

    def read(self, offset: int, size: int, what: str) -> bytes:
        """Return `size` bytes from `offset` of the ELF file on; see `Source.read`."""
        if offset + size > self._size:
            raise self.source.error(f"{what} reaches beyond the end of {self._what}")
        return self.source.read(self._offset + offset, size, what)

    def name_of(self, section: Section) -> str:
        """Return the name of a section.

        Raises:
            CudaCoreError: the section with the names is not there.
        """
        with parsing(self.source, f"the name of section {section.index}"):
            return str(self.elf.get_section(self._names).get_string(section.name_offset))

    def string(self, table: Section, offset: int) -> str:
        """Return the string at `offset` of a section of strings, or as much of it as a name may have.

        Raises:
            CudaCoreError: it begins beyond the end of the section.
        """
        if offset >= table.size:
            raise self.source.error(f"a name begins at byte {offset} of {table.size} in section {table.index}")
        data = self.read(table.offset + offset, min(table.size - offset, MOST_NAME_BYTES), "a name")
        return data.partition(b"\0")[0].decode(errors="backslashreplace")
