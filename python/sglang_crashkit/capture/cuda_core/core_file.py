"""The file of a core: opened so that nothing else is read instead, its sections, and the rows of its tables.

A core may come from anywhere, and its numbers may lie: every length is checked against the file before memory is taken
for it, and what is read in all is bounded, so that neither overlapping tables nor a name without end cost more than
that. A core of a busy GPU has most of a million sections, registers and predicates of every thread being one each: the
table is gone through in pieces, and only what is asked for becomes objects.

Rows grow with the driver, at their end. ``sh_entsize`` says how long they are: what is longer is read as far as it is
known here, and a field that a shorter one lacks is left out, unless nothing can be said without it. Source:
cudacoredump.h, the ``Cudbg*TableEntry`` structures; the fields that came later are marked there with the driver's
version.

All of it raises `CudaCoreError` where a file is none, lies, is cut off, or is more than is read of one.
"""

from __future__ import annotations

import os
import shlex
import stat
import struct
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path

from sglang_crashkit.errors import CrashkitError

#: Of a core of a whole GPU of 132 SMs, section table and rows take 80 MB; memory that was dumped is never read.
MAX_BYTES = 512 << 20
#: That core takes about 5 s on a slow machine.
MAX_SECONDS = 60.0
#: Four times what a GPU of 148 SMs comes to with all its threads.
MAX_SECTIONS = 4_000_000
#: A table of each block and warp of such a GPU is 20,000, and each thread of it 300,000 rows.
MAX_TABLES, MAX_ROWS = 200_000, 1_000_000
#: The names of kernels that templates make reach some thousand bytes.
MAX_NAME_BYTES = 16 * 1024
#: The longest row of a table has 136 bytes today.
MAX_ROW_BYTES = 4096
#: A small read costs a system call, a section or a row that is kept some memory: they count as so many bytes.
_READ_COST, _SECTION_COST, _ROW_COST = 256, 512, 256
_BYTES_AT_A_TIME = 1 << 20
_COMPRESSED = 1 << 11

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION, _SEGMENT = struct.Struct("<IIQQQQIIQQ"), struct.Struct("<IIQQQQQQ")
#: The type of a section that takes nothing of the file.
_NO_BITS = 8
_MAGIC = b"\x7fELF\x02\x01"
#: ``e_type``, ``e_machine`` and ``EI_OSABI`` of a core; cudacoredump.h, "Overview".
_CORE = (4, 190, 0x33)
#: The header has no room for the number of the section with the names, and the first section says it.
_XINDEX = 0xFFFF


class CudaCoreError(CrashkitError):
    """The file is no core of the CUDA driver's, is damaged, or is more than is read of one."""


class Source:
    """A file that is read in pieces.

    Args:
        path: the file itself; neither a link nor anything but a file is opened.
        max_bytes: how much is read in all, in bytes.
        max_seconds: how long that may take.

    Attributes:
        path: as given.
        size: how long it is, in bytes.
        rows_left: how many rows of tables are read yet.
    """

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES, max_seconds: float = MAX_SECONDS) -> None:
        self.path = path
        self._left = max_bytes
        self.rows_left = MAX_ROWS
        self._deadline = time.monotonic() + max_seconds
        try:
            # Not blocking: the open of a pipe would wait for somebody to write to it.
            self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        except (OSError, ValueError) as error:
            if path.is_symlink():
                raise CudaCoreError(
                    f"{path} is a link", next_step=f"readlink -f {shlex.quote(str(path))}   # names the file itself"
                ) from error
            why = error.strerror if isinstance(error, OSError) else error
            raise CudaCoreError(
                f"{path} cannot be opened: {why}", next_step=f"ls -l {shlex.quote(str(path))}"
            ) from error
        found = os.fstat(self._descriptor)
        if not stat.S_ISREG(found.st_mode):
            self.close()
            raise CudaCoreError(
                f"{path} is no file",
                next_step=f"ls -l {shlex.quote(str(path))}   # wanted is what the CUDA driver wrote",
            )
        self.size = found.st_size

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def error(self, what: str, next_step: str | None = None) -> CudaCoreError:
        """Return the error that says `what` of the file."""
        return CudaCoreError(f"{self.path}: {what}", next_step=next_step)

    def read(self, offset: int, size: int, what: str) -> bytes:
        """Return `size` bytes from `offset` on; errors say `what` lies there."""
        if offset < 0 or size < 0 or offset + size > self.size:
            raise self.error(
                f"{what} reaches to byte {offset + size}, and the file has {self.size}",
                "wait until the driver has written all of it, or take another core",
            )
        self.spend(max(size, _READ_COST))
        data = b""
        try:
            while len(data) < size:
                piece = os.pread(self._descriptor, size - len(data), offset + len(data))
                if not piece:
                    raise self.error(f"{what} was cut off while it was read")
                data = data + piece if data else piece
        except OSError as error:
            raise self.error(f"{what} cannot be read: {error.strerror}") from error
        return data

    def spend(self, size: int = _READ_COST) -> None:
        """Count `size` bytes as read."""
        self._left -= size
        if self._left < 0:
            raise self.error("its tables take more than is read of a core", "read it with cuda-gdb")
        if time.monotonic() > self._deadline:
            raise self.error("it could not be read in time", "read it with cuda-gdb")


@contextmanager
def open_source(path: Path, max_bytes: int = MAX_BYTES, max_seconds: float = MAX_SECONDS) -> Iterator[Source]:
    """Yield a file that is read in pieces, and close it; see `Source`."""
    source = Source(path, max_bytes, max_seconds)
    try:
        yield source
    finally:
        source.close()


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
    """One section."""

    index: int  # its place in the section table
    name_offset: int  # where its name begins in the section with the names, in bytes
    kind: int  # its type, a `Kind` where it is one of those
    flags: int  # ``sh_flags``
    address: int  # where it is loaded
    offset: int  # where it begins, in bytes from the beginning of the ELF file
    size: int  # how long it is, in bytes
    link: int  # index of the section that it belongs to
    info: int  # which row of that one, in a core
    alignment: int  # ``sh_addralign``
    row_size: int  # how long each row is, in bytes; 0 where it has none

    @property
    def is_compressed(self) -> bool:
        """Whether its bytes are packed; nothing in a core is, and what is packed is not unpacked."""
        return bool(self.flags & _COMPRESSED)


Row = dict[str, int]


@dataclass(frozen=True)
class Layout:
    """What is used of a row of a table."""

    what: str  # what a row is of, in the plural
    needed: struct.Struct  # the fields of the shortest row that is read, as in the format of `struct`, padding included
    names: tuple[str, ...]  # what the values of `needed` are called
    #: Further fields by name, each with its format and its offset, in bytes; left out of rows that end before.
    later: Mapping[str, tuple[str, int]] = field(default_factory=dict)


def _layout(what: str, form: str, names: str, **later: tuple[str, int]) -> Layout:
    return Layout(what, struct.Struct(form), tuple(names.split()), later)


DEVICES = _layout(
    "devices",
    "<QQQIIIIII4x4xII",
    "name type sm_type device pci_bus pci_device sms warps_per_sm lanes_per_warp sm_major sm_minor",
)
GRIDS = _layout(
    "kernels",
    "<QQQQQQ8xIIIIIIIIIIII",
    "grid context function entry module parent type origin status registers"
    " grid_x grid_y grid_z block_x block_y block_z blocking host_thread",
)
SMS = _layout("SMs", "<I4x", "sm", exception=("<I", 8), error_pc_valid=("<I", 12), error_pc=("<Q", 16))
BLOCKS = _layout("blocks", "<QIII4x", "grid x y z")
WARPS = _layout("warps", "<QIIIII", "error_pc warp valid_lanes active_lanes is_broken error_pc_valid")
LANES = _layout("threads", "<QQIIIII", "pc function_offset lane x y z exception")
META = _layout("metadata", "<QIIIIII", "generator driver_major driver_minor cuda_major cuda_minor flags seconds")


class ElfPart:
    """An ELF file: a core, or a cubin of `size` bytes at `offset` in it; errors say `what` it is."""

    def __init__(self, source: Source, offset: int = 0, size: int | None = None, what: str = "the file") -> None:
        self.source = source
        self._offset, self._what = offset, what
        self._size = source.size - offset if size is None else size
        header = self.read(0, min(self._size, _HEADER.size), f"the ELF header of {what}")
        if len(header) < _HEADER.size or not header.startswith(_MAGIC):
            raise source.error(f"{what} is no ELF file of 64 bits, little-endian")
        ident, kind, machine, _, _, segments, self._table, _, _, *numbers = _HEADER.unpack(header)
        segment_size, segment_count, row_size, count, names = numbers
        self._segments = (segments, max(0, segment_size - _SEGMENT.size), segment_count if segments else 0)
        self._type = (kind, machine, ident[7])
        if (self._table or count) and not _SECTION.size <= row_size <= MAX_ROW_BYTES:
            raise source.error(f"{what} says that a row of the section table has {row_size} bytes")
        self._row = struct.Struct(f"{_SECTION.format}{max(0, row_size - _SECTION.size)}x")
        # More than the header can say: the first section says how many, and which has the names.
        first = self._section_at(0) if self._table and (not count or names == _XINDEX) else None
        self.count = first.size if first and not count else count
        self._names = first.link if first and names == _XINDEX else names
        if self.count > MAX_SECTIONS:
            raise source.error(f"{what} says that there are {self.count} sections")

    def check_is_core(self) -> None:
        """Make sure that it is a core of the CUDA driver's."""
        if self._type != _CORE:
            kind, machine, osabi = self._type
            raise self.source.error(
                f"it is an ELF file, but no core of the CUDA driver's: type {kind}, machine {machine}, "
                f"OS ABI {osabi:#x}",
                "name the file that CUDA_COREDUMP_FILE made",
            )

    def sections(self, kinds: Collection[int] = (), loaded: bool = False) -> Iterator[Section]:
        """Yield the sections of these kinds in order; those that are loaded somewhere, too, where that is asked for."""
        found = 0
        for index, fields in self._rows(0, self.count):
            if fields[1] in kinds or (loaded and fields[3]):
                found += 1
                self.source.spend(_SECTION_COST)
                if found > MAX_TABLES:
                    raise self.source.error(f"{self._what} has more than {MAX_TABLES} tables")
                yield Section(index, *fields)

    def end(self) -> int:
        """Return where the last of what the headers name ends, in bytes; 0 where they name nothing."""
        end = max((row[4] + row[5] for _index, row in self._rows(0, self.count) if row[1] != _NO_BITS), default=0)
        table, gap, count = self._segments
        data = self.read(table, count * (_SEGMENT.size + gap), f"the segments of {self._what}")
        rows: list[tuple[int, ...]] = list(struct.iter_unpack(f"{_SEGMENT.format}{gap}x", data))
        return max([end, int(self._table) + self.count * self._row.size, *(row[2] + row[5] for row in rows)])

    def section(self, index: int) -> Section:
        """Return the section of a number."""
        if not 0 < index < self.count:
            raise self.source.error(f"{self._what} refers to a section {index}, and there is none")
        return self._section_at(index)

    def _section_at(self, index: int) -> Section:
        return next(Section(index, *fields) for _index, fields in self._rows(index, 1))

    def _rows(self, first: int, count: int) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Yield so many rows of the section table with their numbers."""
        size, end = self._row.size, first + count
        step = max(1, _BYTES_AT_A_TIME // size)
        for begin in range(first, end, step):
            data = self.read(
                self._table + begin * size, min(step, end - begin) * size, f"the section table of {self._what}"
            )
            yield from enumerate(self._row.iter_unpack(data), begin)

    def read(self, offset: int, size: int, what: str) -> bytes:
        """Return `size` bytes from `offset` of the ELF file on; see `Source.read`."""
        if offset + size > self._size:
            raise self.source.error(f"{what} reaches beyond the end of {self._what}")
        return self.source.read(self._offset + offset, size, what)

    def name_of(self, section: Section) -> str:
        """Return the name of a section."""
        return self.string(self.section(self._names), section.name_offset)

    def string(self, table: Section, offset: int) -> str:
        """Return the string at `offset` of a section of strings, or as much of it as a name may have."""
        if offset >= table.size or table.is_compressed:
            raise self.source.error(f"a name begins at byte {offset} of {table.size} in section {table.index}")
        for most in (_READ_COST, MAX_NAME_BYTES):
            data = self.read(table.offset + offset, min(table.size - offset, most), "a name")
            if b"\0" in data:
                break
        return data.partition(b"\0")[0].decode(errors="backslashreplace")

    def rows(self, section: Section, layout: Layout) -> Iterator[Row]:
        """Yield the rows of a table by field; see `Layout`."""
        source, what = self.source, f"the table of {layout.what} (section {section.index})"
        if not section.size:
            return
        size = section.row_size
        if section.is_compressed:
            raise source.error(f"{what} is compressed, which a core's tables are not")
        if not layout.needed.size <= size <= MAX_ROW_BYTES:
            raise source.error(
                f"{what} has rows of {size} bytes, and at least {layout.needed.size} are needed",
                "read it with the cuda-gdb of the driver that wrote it",
            )
        if section.size % size:
            raise source.error(f"{what} has {section.size} bytes, which are no whole rows of {size}")
        source.rows_left -= section.size // size
        if source.rows_left < 0:
            raise source.error(f"{what} and those before have more than {MAX_ROWS} rows")
        later = [
            (name, struct.Struct(form), offset)
            for name, (form, offset) in layout.later.items()
            if offset + struct.calcsize(form) <= size
        ]
        step = _BYTES_AT_A_TIME // size * size
        for start in range(0, section.size, step):
            data = self.read(section.offset + start, min(step, section.size - start), what)
            source.spend(len(data) // size * _ROW_COST)
            for at in range(0, len(data), size):
                row = dict(zip(layout.names, layout.needed.unpack_from(data, at), strict=True))
                for name, form, offset in later:
                    row[name] = form.unpack_from(data, at + offset)[0]
                yield row
