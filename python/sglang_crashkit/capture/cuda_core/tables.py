"""The rows of the tables of a core: which fields are used of each, and where they are.

Rows grow with the driver, at their end. ``sh_entsize`` says how long they are: what is longer is read as far as it is
known here, and a field that a shorter one lacks is None, unless nothing can be said without it. Source: cudacoredump.h,
the ``Cudbg*TableEntry`` structures; the fields that came later are marked there with the driver's version.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from sglang_crashkit.capture.cuda_core.sections import ElfPart, Section

#: The longest row of today has 136 bytes.
_MOST_ROW_BYTES = 4096
#: Each thread of a GPU of 148 SMs is 300,000 rows.
MOST_ROWS = 1_000_000
#: What may be kept of a row in memory, in bytes, counts as read.
_ROW_COST = 256
_BYTES_AT_A_TIME = 1 << 20


@dataclass(frozen=True)
class Layout:
    """What is used of a row.

    Attributes:
        what: what a row is of, in the plural.
        needed: the fields of the shortest row that is read, as in the format of `struct`, padding included.
        names: what the values of `needed` are called.
        later: further fields by name, each with its format and its offset, in bytes; None in rows that end before.
    """

    what: str
    needed: struct.Struct
    names: tuple[str, ...]
    later: Mapping[str, tuple[str, int]]


Row = dict[str, int]

DEVICES = Layout(
    "devices",
    struct.Struct("<QQQIIIIII4x4xII"),
    (
        *("name", "type", "sm_type", "device", "pci_bus", "pci_device", "sms", "warps_per_sm", "lanes_per_warp"),
        *("sm_major", "sm_minor"),
    ),
    {},
)
GRIDS = Layout(
    "kernels",
    struct.Struct("<QQQQQQ8xIIIIIIIIIIII"),
    (
        *("grid", "context", "function", "entry", "module", "parent", "type", "origin", "status", "registers"),
        *("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "blocking", "host_thread"),
    ),
    {"cluster_x": ("<I", 104), "cluster_y": ("<I", 108), "cluster_z": ("<I", 112)},
)
SMS = Layout(
    "SMs",
    struct.Struct("<I4x"),
    ("sm",),
    {"exception": ("<I", 8), "error_pc_valid": ("<I", 12), "error_pc": ("<Q", 16)},
)
BLOCKS = Layout("blocks", struct.Struct("<QIII4x"), ("grid", "x", "y", "z"), {})
WARPS = Layout(
    "warps",
    struct.Struct("<QIIIII"),
    ("error_pc", "warp", "valid_lanes", "active_lanes", "is_broken", "error_pc_valid"),
    {},
)
LANES = Layout(
    "threads",
    struct.Struct("<QQIIIII"),
    ("pc", "function_offset", "lane", "x", "y", "z", "exception"),
    {},
)
META = Layout(
    "metadata",
    struct.Struct("<QIIIIII"),
    ("generator", "driver_major", "driver_minor", "cuda_major", "cuda_minor", "flags", "seconds"),
    {},
)


class Rows:
    """Reads tables, and counts what it read.

    Args:
        core: the core.
    """

    def __init__(self, core: ElfPart) -> None:
        self._core = core
        self._left = MOST_ROWS

    def of(self, section: Section, layout: Layout) -> Iterator[Row]:
        """Yield the rows of a table by field; see `Layout`.

        Raises:
            CudaCoreError: it is cut off, its rows are too short, or it is more than is read of a core.
        """
        source, what = self._core.source, f"the table of {layout.what} (section {section.index})"
        if not section.size:
            return
        size = section.row_size
        if section.is_compressed:
            raise source.error(f"{what} is compressed, which a core's tables are not")
        if not layout.needed.size <= size <= _MOST_ROW_BYTES:
            raise source.error(
                f"{what} has rows of {size} bytes, and at least {layout.needed.size} are needed",
                "read it with the cuda-gdb of the driver that wrote it",
            )
        if section.size % size:
            raise source.error(f"{what} has {section.size} bytes, which are no whole rows of {size}")
        self._left -= section.size // size
        if self._left < 0:
            raise source.error(f"{what} and those before have more than {MOST_ROWS} rows")
        later = [
            (name, struct.Struct(form), offset)
            for name, (form, offset) in layout.later.items()
            if offset + struct.calcsize(form) <= size
        ]
        step = _BYTES_AT_A_TIME // size * size
        for start in range(0, section.size, step):
            data = self._core.read(section.offset + start, min(step, section.size - start), what)
            source.spend(len(data) // size * _ROW_COST)
            for at in range(0, len(data), size):
                row = dict(zip(layout.names, layout.needed.unpack_from(data, at), strict=True))
                for name, field, offset in later:
                    row[name] = field.unpack_from(data, at + offset)[0]
                yield row
