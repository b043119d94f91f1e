"""A core in words, and two cores of one process, taken one after the other: which kernels are stuck, and which go on.

A kernel with the same grid id in both is the same launch. Where all its warps are at the same places, it is stuck;
where others of its blocks are on the GPU, it goes on, because a block leaves only when it is done. In between, warps
that moved within their blocks may be slow, or spin in a loop.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from sglang_crashkit.capture.cuda_core.model import CudaCore, Device, Dimensions, Fault, Kernel, Place
from sglang_crashkit.errors import UsageError
from sglang_crashkit.model.incident import Level, iso_time

#: Templates make names of thousands of characters; the data has them in full.
_MAX_NAME = 160
#: Of a kernel that fails everywhere, so many exceptions say enough.
_MAX_FAULTS = 16
#: In an incident, beside what all other processes did.
_MAX_BRIEF = 4
INFERRED = "names are inferred from the symbols of the cubins in the core"
UNCHECKED = "not checked against a real core"

#: ``stuck``: nothing moved; ``progressing``: something did; ``ended`` and ``started``: it is in one of the two only;
#: ``idle``: no kernel in either; ``unknown``: there are no warps to tell from.
Outcome = Literal["stuck", "progressing", "ended", "started", "idle", "unknown"]

#: Number of the GPU, and grid id.
_Launch = tuple[int, int]
#: Addresses, and how many threads were at each.
_Places = tuple[tuple[int, int], ...]


def format_core(core: CudaCore) -> Iterator[str]:
    """Yield a core in lines."""
    for device in core.devices:
        yield device_in_words(device)
    written = "" if core.seconds is None else f", written {iso_time(core.seconds)[:19]}Z"
    if core.driver or written:
        yield f"driver {core.driver or 'unknown'}, CUDA {core.cuda or 'unknown'}{written}"
    for kernel in core.kernels:
        yield kernel_in_words(kernel)
        on_gpu = f"{_count(kernel.blocks, 'block')} and {_count(kernel.warps, 'warp')} on the GPU"
        yield f"    grid id {kernel.grid_id}, {on_gpu}, launched by host thread {kernel.host_thread}"
    if not core.kernels:
        yield "no kernel on the GPU"
    for place, warps in core.hot:
        yield f"    {_count(warps, 'warp')} at {place_in_words(place)}"
    yield from (fault_in_words(fault) for fault in core.faults[:_MAX_FAULTS])
    if len(core.faults) > _MAX_FAULTS:
        yield f"{len(core.faults) - _MAX_FAULTS} more exceptions"
    places = [kernel.entry for kernel in core.kernels] + [fault.place for fault in core.faults if fault.place]
    if any(place.function for place in places):
        yield INFERRED
    if core.unchecked:
        yield f"{', '.join(core.unchecked)}: {UNCHECKED}"
    yield from core.notes


def brief(core: CudaCore) -> Iterator[str]:
    """Yield the little of a core that an incident tells of: which kernels, and what failed."""
    for kernel in core.kernels[:_MAX_BRIEF]:
        yield kernel_in_words(kernel) + (", its name inferred" if kernel.name else "") + _mark(kernel.is_checked)
    if len(core.kernels) > _MAX_BRIEF:
        yield f"{len(core.kernels) - _MAX_BRIEF} more kernels"
    if not core.kernels:
        yield "no kernel on the GPU"
    for fault in core.faults[:_MAX_BRIEF]:
        named = fault.place is not None and fault.place.function is not None
        yield fault_in_words(fault) + (", the name inferred" if named else "") + _mark(fault.is_checked)
    if len(core.faults) > _MAX_BRIEF:
        yield f"{len(core.faults) - _MAX_BRIEF} more exceptions"
    yield from core.notes[:1]


def device_in_words(device: Device) -> str:
    """Return what a GPU is."""
    kind = _shortened(device.sm_type) or f"sm_{device.sm_major}{device.sm_minor}"
    return f"GPU {device.number}: {_shortened(device.name) or 'unknown'}, {kind}, {device.sms} SMs"


def kernel_in_words(kernel: Kernel) -> str:
    """Return which kernel it is, and how it was launched."""
    shape = f"grid {_dimensions(kernel.grid)}, block {_dimensions(kernel.block)}"
    status = f", {kernel.status}" if kernel.status else ""
    return f"kernel {kernel_name(kernel)} on GPU {kernel.device}: {shape}{status}"


def kernel_name(kernel: Kernel) -> str:
    """Return what a kernel is called, its address where no cubin has its name."""
    return _shortened(kernel.name) if kernel.name else f"at {kernel.entry.address:#x}"


def fault_in_words(fault: Fault) -> str:
    """Return what failed, and where."""
    warp = "" if fault.warp is None else f", warp {fault.warp}, {_count(fault.lanes or 0, 'thread')}"
    grid = "" if fault.grid_id is None else f", grid id {fault.grid_id}"
    block = "" if fault.block_index is None else f", block {fault.block_index}"
    where = "" if fault.place is None else f" at {place_in_words(fault.place)}"
    return f"exception: {fault.exception}{where} (GPU {fault.device}, SM {fault.sm}{warp}{grid}{block})"


def place_in_words(place: Place) -> str:
    """Return where in the code something was."""
    if place.function is None or place.offset is None:
        return f"{place.address:#x}"
    return f"{_shortened(place.function)}+{place.offset:#x}"


def _mark(is_checked: bool) -> str:
    return "" if is_checked else f", {UNCHECKED}"


def _shortened(name: str) -> str:
    # What a hostile file has for a name must not move the cursor of a terminal.
    name = "".join(character if character.isprintable() else "?" for character in name)
    return name if len(name) <= _MAX_NAME else f"{name[: _MAX_NAME - 3]}..."


def _dimensions(dimensions: Dimensions) -> str:
    return "x".join(map(str, dimensions))


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


@dataclass(frozen=True)
class KernelComparison:
    """What became of one kernel."""

    device: int  # see `Device.number`
    grid_id: int  # its launch
    name: str | None  # its name, inferred; None where it has none
    outcome: Outcome  # what became of it
    level: Level  # how well that is supported
    text: str  # the same in words


@dataclass(frozen=True)
class Comparison:
    """What became of all of them."""

    outcome: Outcome  # ``progressing`` where any kernel moved, ended or started
    level: Level  # that of the kernel that says so with the best evidence, or, where none does, with the least
    text: str  # the same in words
    kernels: tuple[KernelComparison, ...]  # each one

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return asdict(self)


class _Side:
    """One of the two cores: its kernels, and of each the block and the places of every warp, by SM and number."""

    def __init__(self, core: CudaCore) -> None:
        self.has_all_warps = core.has_all_warps
        self.kernels = {(kernel.device, kernel.grid_id): kernel for kernel in core.kernels}
        self.warps: dict[_Launch, dict[tuple[int, int], tuple[Dimensions, _Places]]] = defaultdict(dict)
        for warp in core.warps:
            if warp.pcs:
                self.warps[warp.device, warp.grid_id][warp.sm, warp.number] = (warp.block_index, warp.pcs)


def compare(first: CudaCore, second: CudaCore) -> Comparison:
    """Compare two cores of one process; the one that was written first counts as the earlier one.

    Raises:
        UsageError: they are of different GPUs.
    """
    if [(one.number, one.pci_bus) for one in first.devices] != [(one.number, one.pci_bus) for one in second.devices]:
        raise UsageError("the two cores are of different GPUs", next_step="name two cores of the same process")
    if first.seconds and second.seconds and first.seconds > second.seconds:
        first, second = second, first
    before, after = _Side(first), _Side(second)
    kernels = []
    for key in sorted(before.kernels.keys() | after.kernels.keys()):
        kernel = after.kernels.get(key) or before.kernels[key]
        outcome, level, words = _judge(key, before, after)
        text = f"{kernel_name(kernel)} (grid {kernel.grid_id}) {words}"
        kernels.append(KernelComparison(*key, kernel.name, outcome, level, text))
    return _in_all(kernels)


def _judge(key: _Launch, before: _Side, after: _Side) -> tuple[Outcome, Level, str]:
    if key not in after.kernels:
        return "ended", "established", "ended between the two cores"
    if key not in before.kernels:
        return "started", "established", "started between the two cores"
    old, new = before.warps.get(key), after.warps.get(key)
    if not (old and new and before.has_all_warps and after.has_all_warps):
        return "unknown", "unknown", "is in both cores, and not all its warps are"
    if old == new:
        return "stuck", "supported", f"was at the same places in both cores with all its {len(new)} warps"
    if {block for block, _pcs in old.values()} != {block for block, _pcs in new.values()}:
        return "progressing", "established", "went on: others of its blocks are on the GPU"
    moved = sum(old.get(place) != found for place, found in new.items())
    return "progressing", "supported", f"moved with {moved} of its {len(new)} warps, if only in a loop"


def _in_all(kernels: list[KernelComparison]) -> Comparison:
    moving = [kernel for kernel in kernels if kernel.outcome in ("progressing", "ended", "started")]
    stuck = [kernel for kernel in kernels if kernel.outcome == "stuck"]
    level: Level
    if not kernels:
        return Comparison("idle", "established", "No kernel was on the GPU in either core.", ())
    if moving:
        level = "established" if any(kernel.level == "established" for kernel in moving) else "supported"
        return Comparison("progressing", level, "The GPU goes on.", tuple(kernels))
    if len(stuck) == len(kernels):
        return Comparison("stuck", "supported", "Nothing moved on the GPU between the two cores.", tuple(kernels))
    return Comparison("unknown", "unknown", "The cores do not tell whether the GPU goes on.", tuple(kernels))
