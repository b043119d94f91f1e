"""Two cores of one process, taken one after the other: which kernels are stuck, and which go on.

A kernel with the same grid id in both is the same launch. Where all its warps are at the same places, it is stuck;
where others of its blocks are on the GPU, it goes on, because a block leaves only when it is done. In between, warps
that moved within their blocks may be slow, or spin in a loop.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass
from typing import Any, Literal

from sglang_crashkit.capture.cuda_core.model import CudaCore, Dimensions
from sglang_crashkit.capture.cuda_core.text import kernel_name
from sglang_crashkit.errors import UsageError
from sglang_crashkit.model.incident import Level

#: ``stuck``: nothing moved; ``progressing``: something did; ``ended`` and ``started``: it is in one of the two only;
#: ``idle``: no kernel in either; ``unknown``: there are no warps to tell from.
Outcome = Literal["stuck", "progressing", "ended", "started", "idle", "unknown"]

#: Number of the GPU, and grid id.
_Launch = tuple[int, int]
#: Addresses, and how many threads were at each.
_Places = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class KernelComparison:
    """What became of one kernel.

    Attributes:
        device: see `Device.number`.
        grid_id: its launch.
        name: its name, inferred; None where it has none.
        outcome: what became of it.
        level: how well that is supported.
        text: the same in words.
    """

    device: int
    grid_id: int
    name: str | None
    outcome: Outcome
    level: Level
    text: str


@dataclass(frozen=True)
class Comparison:
    """What became of all of them.

    Attributes:
        outcome: ``progressing`` where any kernel moved, ended or started.
        level: that of the kernel that says so with the best evidence, or, where none does, with the least.
        text: the same in words.
        kernels: each one.
    """

    outcome: Outcome
    level: Level
    text: str
    kernels: tuple[KernelComparison, ...]

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
