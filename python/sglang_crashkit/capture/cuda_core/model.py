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
    """A GPU that the process saw."""

    number: int  # CUDA's number of it in this process, which the rest refers to
    name: str  # as it is called, empty where the core does not say
    sm_type: str  # its instruction set, such as ``sm_90``, empty where the core does not say
    pci_bus: int  # the number of its PCI bus
    sms: int  # how many SMs it has
    warps_per_sm: int  # how many warps each of them holds
    lanes_per_warp: int  # how many threads each of those has
    sm_major: int  # major version of its SMs
    sm_minor: int  # minor version of its SMs


@dataclass(frozen=True)
class Place:
    """Where in the code something was."""

    address: int  # on the GPU
    #: Whose code that is, demangled, inferred from the symbols of the cubins; None where none has that address.
    function: str | None = None
    offset: int | None = None  # how far from the function's beginning it is, in bytes; None where that is not known
    symbol: str | None = None  # the function as the compiler has it


@dataclass(frozen=True)
class Kernel:
    """A kernel on a GPU: a grid, in NVIDIA's words."""

    device: int  # see `Device.number`
    grid_id: int  # what no other launch of the process has
    entry: Place  # where its code begins; the function there is its name
    grid: Dimensions  # how many blocks it has
    block: Dimensions  # how many threads each block has
    status: str  # ``active`` and the like; empty where the core has none that is known here
    host_thread: int  # the thread of the process that launched it, as the kernel of the host numbers them
    parent_grid_id: int  # the kernel that launched it from the GPU, 0 without one
    blocks: int  # how many of its blocks were on an SM
    warps: int  # how many of its warps were on an SM

    @property
    def name(self) -> str | None:
        """Its name, inferred from the symbols of the cubins; None where none has its address."""
        return self.entry.function

    @property
    def is_checked(self) -> bool:
        """Whether NVIDIA's reader tells of such a kernel, too: it does not of one without a warp."""
        return bool(self.warps)


@dataclass(frozen=True)
class Fault:
    """Something that the hardware raised an exception for."""

    device: int  # see `Device.number`
    sm: int  # the SM's number
    code: int  # what it was; see `exception_in_words`
    exception: str  # the same in words
    place: Place | None  # where in the code, None where the core does not say
    warp: int | None = None  # the warp's number, None where only the SM is known: the warps may have ended since
    grid_id: int | None = None  # its kernel, None where only the SM is known
    block_index: Dimensions | None = None  # its block, None where only the SM is known
    lanes: int | None = None  # how many threads of the warp, None where only the SM is known

    @property
    def is_checked(self) -> bool:
        """Whether NVIDIA's reader tells of such an exception, too, by the same name: it does not of an SM alone."""
        return self.warp is not None and self.code in CHECKED_EXCEPTIONS


@dataclass(frozen=True)
class Warp:
    """What one warp was doing."""

    device: int  # see `Device.number`
    sm: int  # the SM's number
    number: int  # the warp's number on the SM
    grid_id: int  # its kernel
    block_index: Dimensions  # its block
    pcs: tuple[tuple[int, int], ...]  # where its threads were, and how many of them, by address
    error: int | None = None  # where it failed, None where it did not


@dataclass(frozen=True)
class CudaCore:
    """All that is read of a core."""

    devices: tuple[Device, ...]  # the GPUs
    kernels: tuple[Kernel, ...]  # what ran on them
    faults: tuple[Fault, ...]  # what failed
    warps: tuple[Warp, ...]  # what each warp was doing
    hot: tuple[tuple[Place, int], ...]  # where the most warps were, and how many, most first: a few places
    driver: str  # version of the GPU driver that wrote it, empty where it does not say
    cuda: str  # version of CUDA that this driver has, empty where it does not say
    seconds: int | None  # when it was written, since the epoch; None where it does not say
    has_all_warps: bool  # whether each table of warps and threads could be read
    notes: tuple[str, ...]  # what could not be read, in words
    #: What is reported of this core that no real core and no reader of NVIDIA's has confirmed, in words.
    unchecked: tuple[str, ...]

    def to_json(self, *, warps: bool = True) -> dict[str, Any]:
        """Return it as JSON values, with every single warp, of which there may be thousands, or without."""
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
