"""A core in words."""

from __future__ import annotations

from collections.abc import Iterator

from sglang_crashkit.capture.cuda_core.model import CudaCore, Device, Dimensions, Fault, Kernel, Place
from sglang_crashkit.model.incident import iso_time

#: Templates make names of thousands of characters; the data has them in full.
_MAX_NAME = 160
#: Of a kernel that fails everywhere, so many exceptions say enough.
_MAX_FAULTS = 16
#: In an incident, beside what all other processes did.
_MAX_BRIEF = 4
INFERRED = "names are inferred from the symbols of the cubins in the core"
UNCHECKED = "not checked against a real core"


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
