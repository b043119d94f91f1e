"""Cores as the CUDA driver writes them, made up: the layout of NVIDIA's cudacoredump.h as of driver 575, without a GPU.

NVIDIA's own cuda-gdb opens them; `test_against_cuda_gdb` compares what it says. What it asks for, and the kit's reader
does not: version 7 of the OS ABI, contexts and modules with rows that the kernels name, registers of the thread that it
looks at first, and in a relocated cubin symbols whose values are addresses. None of it was compared with a real core.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
SECTION = struct.Struct("<IIQQQQIIQQ")
SYMBOL = struct.Struct("<IBBHQQ")
CORE, EXECUTABLE, MACHINE, OSABI, ABI_VERSION = 4, 2, 190, 0x33, 7
PROGBITS, SYMTAB, STRTAB = 1, 2, 3
USER = 0x80000000
REGS, RELFIMG, DEVTBL, CTXTBL, SMTBL, GRIDTBL, CTATBL, WPTBL, LNTBL, MODTBL, META = (
    *(USER + 5, USER + 7, USER + 9, USER + 10, USER + 11, USER + 12, USER + 13, USER + 14, USER + 15, USER + 16),
    USER + 22,
)
#: Rows in full.
DEVICE_ROW, CONTEXT_ROW, MODULE_ROW, GRID_ROW, SM_ROW, CTA_ROW, WARP_ROW, LANE_ROW, META_ROW = map(
    struct.Struct, ("<3Q16I", "<4Q2I", "<Q", "<7Q20I", "<4IQ4I", "<Q12I", "<Q14I", "<2Q10I", "<Q6I")
)
ACTIVE = 2
#: Handles; a module's is this one and its number.
CONTEXT, FUNCTION, MODULE = 0x100, 0x200, 0x300


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
    flags: int = 0


class Strings:
    """A section of strings."""

    def __init__(self) -> None:
        self.data = bytearray(b"\0")

    def add(self, text: str) -> int:
        offset = len(self.data)
        self.data += text.encode() + b"\0"
        return offset


def elf_bytes(parts: Sequence[Part], kind: int = CORE, *, osabi: int = OSABI, many_sections: bool = False) -> bytes:
    """Return an ELF file of 64 bits; its first section is empty, and the last one has the names.

    Args:
        parts: the sections between those.
        kind: ``e_type``.
        osabi: ``EI_OSABI``.
        many_sections: write the numbers of sections as where there are more than the header can say.
    """
    names = Strings()
    rows, body, at = [], bytearray(), HEADER.size
    for part in (*parts, Part(".shstrtab", STRTAB, b"")):
        name = names.add(part.name)
        data = part.data if part.name != ".shstrtab" else bytes(names.data)
        rows.append(
            SECTION.pack(
                name, part.kind, part.flags, part.address, at, len(data), part.link, part.info, 1, part.row_size
            )
        )
        body += data
        at += len(data)
    count, last = len(rows) + 1, len(rows)
    first = SECTION.pack(0, 0, 0, 0, 0, count if many_sections else 0, last if many_sections else 0, 0, 0, 0)
    numbers = (HEADER.size, 0, 0, SECTION.size, 0 if many_sections else count, 0xFFFF if many_sections else last)
    identity = bytes([0x7F, *b"ELF", 2, 1, 1, osabi, ABI_VERSION]).ljust(16, b"\0")
    header = HEADER.pack(identity, kind, MACHINE, 1, 0, 0, at, 0, *numbers)
    return header + bytes(body) + first + b"".join(rows)


def cubin_bytes(functions: Mapping[str, tuple[int, int]], *, symbols: bool = True, relative: bool = False) -> bytes:
    """Return a relocated cubin in which each function has a section of its own, as nvcc makes it.

    Args:
        functions: address and size of each, in bytes.
        symbols: with a symbol table.
        relative: with the symbols' places in their sections, as in a cubin on disk, instead of their addresses.
    """
    strings = Strings()
    rows = [SYMBOL.pack(0, 0, 0, 0, 0, 0)]
    texts = []
    for index, (name, (address, size)) in enumerate(functions.items(), 1):
        texts.append(Part(f".text.{name}", PROGBITS, bytes(size), address=address, flags=6))
        rows.append(SYMBOL.pack(strings.add(name), 0x12, 0x10, index, 0 if relative else address, size))
    table = Part(".symtab", SYMTAB, b"".join(rows), link=len(texts) + 2, info=1, row_size=SYMBOL.size)
    parts = [*texts, table, Part(".strtab", STRTAB, bytes(strings.data))] if symbols else texts
    return elf_bytes(parts, EXECUTABLE)


@dataclass
class WarpSpec:
    """A warp."""

    number: int  # of it on the SM
    pcs: Sequence[int]  # the address of each thread that there is a row of
    exception: int = 0  # of the first thread
    error: int | None = None  # the warp's error PC
    failed: Mapping[int, int] = field(default_factory=dict)  # threads with an exception, by their number
    valid: int | None = None  # the mask of the threads that there are; of all that have a row by default
    active: int | None = None  # the mask of those that run; the others have diverged. All that there are by default.

    @property
    def valid_mask(self) -> int:
        return (1 << len(self.pcs)) - 1 if self.valid is None else self.valid

    @property
    def active_mask(self) -> int:
        return self.valid_mask if self.active is None else self.active

    def exception_of(self, lane: int) -> int:
        return self.failed.get(lane, 0 if lane else self.exception)

    @property
    def focus(self) -> int:
        """The thread that a debugger looks at first: of those that run, the first that failed, else the first."""
        lanes = [lane for lane in range(len(self.pcs)) if (self.valid_mask & self.active_mask) >> lane & 1] or [0]
        return next((lane for lane in lanes if self.exception_of(lane)), lanes[0])


@dataclass
class BlockSpec:
    """A block of a kernel on an SM."""

    grid_id: int
    index: tuple[int, int, int] = (0, 0, 0)
    warps: Sequence[WarpSpec] = ()


@dataclass
class SmSpec:
    """An SM, its exception if there is one, and its blocks."""

    number: int
    blocks: Sequence[BlockSpec] = ()
    exception: int = 0
    error: int | None = None


@dataclass
class GridSpec:
    """A kernel."""

    grid_id: int
    entry: int
    grid: tuple[int, int, int] = (1, 1, 1)
    block: tuple[int, int, int] = (32, 1, 1)
    status: int = ACTIVE
    host_thread: int = 0
    parent: int = 0


@dataclass
class DeviceSpec:
    """A GPU; its number is its place, where it has none of its own."""

    grids: Sequence[GridSpec] = ()
    sms: Sequence[SmSpec] = ()
    name: str = "NVIDIA H200"
    sm_type: str = "sm_90"
    sm_count: int = 132
    number: int | None = None


@dataclass
class CoreSpec:
    """A core."""

    devices: Sequence[DeviceSpec] = field(default_factory=lambda: [DeviceSpec()])  # the GPUs
    cubins: Sequence[Mapping[str, tuple[int, int]]] = ()  # the functions of each module; see `cubin_bytes`
    grown: int = 0  # by how many bytes each row is longer than today's, for a driver of tomorrow
    old: bool = False  # with the rows of driver 346
    many_sections: bool = False  # write the numbers of sections as where there are more than the header can say
    images: Sequence[bytes] = ()  # further modules, as they are
    relative: bool = False  # with cubins whose symbols are relative to their sections; see `cubin_bytes`


def core_parts(spec: CoreSpec) -> list[Part]:
    """Return the sections of a core; the first one becomes section 1."""
    parts: list[Part] = []
    strings = Strings()

    def table(name: str, kind: int, rows: Sequence[bytes], size: int, baseline: int, link: int, info: int) -> int:
        size = baseline if spec.old else size + spec.grown
        data = b"".join(row[:size].ljust(size, b"\xee") for row in rows)
        parts.append(Part(name, kind, data, link, info, size))
        return len(parts)

    rows = []
    for number, device in enumerate(spec.devices):
        texts = (strings.add(device.name), strings.add("GH100"), strings.add(device.sm_type))
        numbers = (
            number if device.number is None else device.number,
            0x1B,
            0,
            device.sm_count,
            64,
            32,
            255,
            7,
            9,
            0,
            16,
            0,
            63,
            7,
            16,
            0,
        )
        rows.append(DEVICE_ROW.pack(*texts, *numbers))
    devices = table(".cudbg.devtbl", DEVTBL, rows, DEVICE_ROW.size, 72, 0, 0)
    images = [*(cubin_bytes(cubin, relative=spec.relative) for cubin in spec.cubins), *spec.images]
    for number, device in enumerate(spec.devices):
        rows = [CONTEXT_ROW.pack(CONTEXT + number, 0x7FFF_F400_0000, 0x7FFF_F200_0000, 0, number, 4711)]
        contexts = table(
            f".cudbg.ctxtbl.dev{number}", CTXTBL, rows, CONTEXT_ROW.size, CONTEXT_ROW.size, devices, number
        )
        rows = [MODULE_ROW.pack(MODULE + index) for index in range(max(1, len(images)))]
        modules = table(f".cudbg.modtbl.dev{number}.ctx0", MODTBL, rows, MODULE_ROW.size, MODULE_ROW.size, contexts, 0)
        parts += [
            Part(f".cudbg.relfimg.dev{number}.ctx0", RELFIMG, image, modules, index)
            for index, image in enumerate(images)
        ]
        rows = [
            GRID_ROW.pack(
                *(grid.grid_id, CONTEXT + number, FUNCTION, grid.entry, MODULE, grid.parent),
                *(0x210, 1, 0, grid.status, 32),
                *(*grid.grid, *grid.block, 0, grid.host_thread, *([0] * 8)),
            )
            for grid in device.grids
        ]
        table(f".cudbg.gridtbl.dev{number}", GRIDTBL, rows, GRID_ROW.size, 104, devices, number)
        rows = [
            SM_ROW.pack(sm.number, 0, sm.exception, sm.error is not None, sm.error or 0, 0, 0, 0, 0)
            for sm in device.sms
        ]
        sms = table(f".cudbg.smtbl.dev{number}", SMTBL, rows, SM_ROW.size, 8, devices, number)
        for sm_index, sm in enumerate(device.sms):
            _add_blocks(table, f"dev{number}.sm{sm_index}", sm.blocks, sms, sm_index)
    rows = [META_ROW.pack(0, 580, 65, 13, 0, 0x1F, 1_795_000_000)]
    table(".cudbg.meta", META, rows, META_ROW.size, META_ROW.size, 0, 0)
    parts.append(Part(".strtab", STRTAB, bytes(strings.data)))
    return parts


def _add_blocks(table, name: str, blocks: Sequence[BlockSpec], link: int, info: int) -> None:
    rows = [CTA_ROW.pack(block.grid_id, *block.index, *([0] * 9)) for block in blocks]
    section = table(f".cudbg.ctatbl.{name}", CTATBL, rows, CTA_ROW.size, 24, link, info)
    for block_index, block in enumerate(blocks):
        rows = [
            WARP_ROW.pack(
                *(warp.error or 0, warp.number, warp.valid_mask, warp.active_mask),
                *(0, warp.error is not None, 0, 32, *([0] * 7)),
            )
            for warp in block.warps
        ]
        below = f"{name}.cta{block_index}"
        warps = table(f".cudbg.wptbl.{below}", WPTBL, rows, WARP_ROW.size, 32, section, block_index)
        for warp_index, warp in enumerate(block.warps):
            rows = [
                LANE_ROW.pack(pc, 0, lane, lane, 0, 0, warp.exception_of(lane), *([0] * 5))
                for lane, pc in enumerate(warp.pcs)
            ]
            spot = f"{below}.wp{warp_index}"
            lanes = table(f".cudbg.lntbl.{spot}", LNTBL, rows, LANE_ROW.size, 48, warps, warp_index)
            if warp.pcs:
                table(f".cudbg.regs.{spot}.ln{warp.focus}", REGS, [bytes(4)] * 32, 4, 4, lanes, warp.focus)


def core_bytes(spec: CoreSpec) -> bytes:
    """Return a core as the driver writes it."""
    return elf_bytes(core_parts(spec), many_sections=spec.many_sections)


#: Where the made-up kernels are on the made-up GPU.
SPIN, SPIN_SIZE = 0x7FFF_D000_0000, 0x400
SPIN_SYMBOL, COPY_SYMBOL = "_Z11spin_kernelPVi", "_Z11copy_kernelPKfPfi"
SPIN_NAME, COPY_NAME = "spin_kernel(int volatile*)", "copy_kernel(float const*, float*, int)"
CUBIN = {SPIN_SYMBOL: (SPIN, SPIN_SIZE), COPY_SYMBOL: (SPIN + 0x1000, 0x200)}


def hung_core(pc: int = 0x110, grid_id: int = 7, block: int = 0) -> bytes:
    """Return the core of a GPU on which one kernel spins."""
    warp = WarpSpec(3, [SPIN + pc] * 32)
    sm = SmSpec(0, [BlockSpec(grid_id, (block, 0, 0), [warp])])
    device = DeviceSpec([GridSpec(grid_id, SPIN, (2, 1, 1), host_thread=4711)], [sm, SmSpec(1)])
    return core_bytes(CoreSpec([device], [CUBIN]))


def failed_core() -> bytes:
    """Return the core of a GPU whose kernel read an illegal address, and is not there any more."""
    sm = SmSpec(17, exception=10, error=SPIN + 0x1040)
    return core_bytes(CoreSpec([DeviceSpec(sms=[SmSpec(0), sm])], [CUBIN]))
