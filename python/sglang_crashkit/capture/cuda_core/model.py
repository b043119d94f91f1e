"""What a core says, as data, and its form as JSON."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

SCHEMA_VERSION = 1

#: cudadebugger.h of CUDA 13.1, ``CUDBGException_t``.
_EXCEPTIONS = {
    1: "lane illegal address",
    2: "lane user stack overflow",
    3: "device hardware stack overflow",
    4: "warp illegal instruction",
    5: "warp out-of-range address",
    6: "warp misaligned address",
    7: "warp invalid address space",
    8: "warp invalid PC",
    9: "warp hardware stack overflow",
    10: "device illegal address",
    11: "lane misaligned address",
    12: "warp assert",
    13: "lane syscall error",
    14: "warp illegal address",
    15: "non-migratable system-scoped atomic access",
    16: "lane invalid system atomic",
    17: "cluster out of range address",
    18: "cluster target block not present",
    19: "warp stack canary",
    20: "warp tensor memory access check",
    21: "warp tensor memory leak",
    22: "warp call requires a newer driver",
    23: "warp misaligned PC",
    24: "warp PC overflow",
    25: "warp misaligned register",
    26: "warp illegal instruction encoding",
    27: "warp illegal instruction parameter",
    28: "warp out-of-range register",
    29: "warp invalid constant address",
    30: "warp MMU fault",
    31: "warp barrier arrival error",
    32: "cluster poison",
    33: "warp API stack error",
    34: "warp block not present",
    35: "warp user stack overflow",
    36: "TMA syscall error",
}
#: Those that cuda-gdb 12.4 calls the same.
CHECKED_EXCEPTIONS = frozenset({*range(1, 11), 12, 13, 14, 15, 17, 18})
#: cudadebugger.h, ``CUDBGGridStatus``.
_STATUSES = {1: "pending", 2: "active", 3: "sleeping", 4: "terminated", 5: "pending or terminated"}

Dimensions = tuple[int, int, int]


def exception_in_words(code: int) -> str:
    """Return what an exception of the hardware is called."""
    return _EXCEPTIONS.get(code, f"exception {code}")


@dataclass(frozen=True)
class Device:
    """A GPU that the process saw.

    Attributes:
        number: CUDA's number of it in this process, which the rest refers to.
        name: as it is called, empty where the core does not say.
        sm_type: its instruction set, such as ``sm_90``, empty where the core does not say.
        pci_bus: the number of its PCI bus.
        sms: how many SMs it has.
        warps_per_sm: how many warps each of them holds.
        lanes_per_warp: how many threads each of those has.
        sm_major: major version of its SMs.
        sm_minor: minor version of its SMs.
    """

    number: int
    name: str
    sm_type: str
    pci_bus: int
    sms: int
    warps_per_sm: int
    lanes_per_warp: int
    sm_major: int
    sm_minor: int


@dataclass(frozen=True)
class Place:
    """Where in the code something was.

    Attributes:
        address: on the GPU.
        function: whose code that is, demangled, inferred from the symbols of the cubins; None where none has that
            address.
        offset: how far from the function's beginning it is, in bytes; None where that is not known.
        symbol: the function as the compiler has it.
    """

    address: int
    function: str | None = None
    offset: int | None = None
    symbol: str | None = None


@dataclass(frozen=True)
class Kernel:
    """A kernel on a GPU: a grid, in NVIDIA's words.

    Attributes:
        device: see `Device.number`.
        grid_id: what no other launch of the process has.
        entry: where its code begins; the function there is its name.
        grid: how many blocks it has.
        block: how many threads each block has.
        status: ``active`` and the like; empty where the core has none that is known here.
        host_thread: the thread of the process that launched it, as the kernel of the host numbers them.
        parent_grid_id: the kernel that launched it from the GPU, 0 without one.
        blocks: how many of its blocks were on an SM.
        warps: how many of its warps were on an SM.
    """

    device: int
    grid_id: int
    entry: Place
    grid: Dimensions
    block: Dimensions
    status: str
    host_thread: int
    parent_grid_id: int
    blocks: int
    warps: int

    @property
    def name(self) -> str | None:
        """Its name, inferred from the symbols of the cubins; None where none has its address."""
        return self.entry.function


@dataclass(frozen=True)
class Fault:
    """Something that the hardware raised an exception for.

    Attributes:
        device: see `Device.number`.
        sm: the SM's number.
        code: what it was; see `exception_in_words`.
        exception: the same in words.
        place: where in the code, None where the core does not say.
        warp: the warp's number, None where only the SM is known: the warps may have ended since.
        grid_id: its kernel, None where only the SM is known.
        block_index: its block, None where only the SM is known.
        lanes: how many threads of the warp, None where only the SM is known.
    """

    device: int
    sm: int
    code: int
    exception: str
    place: Place | None
    warp: int | None = None
    grid_id: int | None = None
    block_index: Dimensions | None = None
    lanes: int | None = None


@dataclass(frozen=True)
class Warp:
    """What one warp was doing.

    Attributes:
        device: see `Device.number`.
        sm: the SM's number.
        number: the warp's number on the SM.
        grid_id: its kernel.
        block_index: its block.
        pcs: where its threads were, and how many of them, by address.
        error: where it failed, None where it did not.
    """

    device: int
    sm: int
    number: int
    grid_id: int
    block_index: Dimensions
    pcs: tuple[tuple[int, int], ...]
    error: int | None = None


@dataclass(frozen=True)
class CudaCore:
    """All that is read of a core.

    Attributes:
        devices: the GPUs.
        kernels: what ran on them.
        faults: what failed.
        warps: what each warp was doing.
        hot: where the most warps were, and how many, most first: a few places.
        driver: version of the GPU driver that wrote it, empty where it does not say.
        cuda: version of CUDA that this driver has, empty where it does not say.
        seconds: when it was written, since the epoch; None where it does not say.
        has_all_warps: whether each table of warps and threads could be read.
        notes: what could not be read, in words.
        unchecked: what is reported of this core that no real core and no reader of NVIDIA's has confirmed, in words.
    """

    devices: tuple[Device, ...]
    kernels: tuple[Kernel, ...]
    faults: tuple[Fault, ...]
    warps: tuple[Warp, ...]
    hot: tuple[tuple[Place, int], ...]
    driver: str
    cuda: str
    seconds: int | None
    has_all_warps: bool
    notes: tuple[str, ...]
    unchecked: tuple[str, ...]

    def to_json(self, *, warps: bool = True) -> dict[str, Any]:
        """Return it as JSON values.

        Args:
            warps: with every single warp, which may be thousands.
        """
        document = {"schema_version": SCHEMA_VERSION, **asdict(self)}
        document["hot"] = [{**asdict(place), "warps": count} for place, count in self.hot]
        if not warps:
            del document["warps"]
        return document


def status_in_words(code: int) -> str:
    """Return what the status of a grid is called, empty where it has no name."""
    return _STATUSES.get(code, "")


def most_frequent(warps: tuple[Warp, ...], most: int) -> list[tuple[int, int]]:
    """Return where the most warps were: addresses, each with the number of warps that had a thread there."""
    counts = Counter(pc for warp in warps for pc, _lanes in warp.pcs)
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:most]
