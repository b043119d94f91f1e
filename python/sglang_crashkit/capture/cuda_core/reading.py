"""Read a core: its tables, joined, with the names of the functions; also in a process of its own.

Every table belongs to a row of another one: ``sh_link`` is that one's section, ``sh_info`` the row. A link to anything
but the kind of table that belongs there is an error, so that no chain of links is longer than the format's.

The crash handler must neither wait nor grow for a core. For it this module is a program with limits of memory and time,
that is killed when its time is over: run with the core's path and the time in seconds, it writes one JSON object, what
`Reading` has or ``error``.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from sglang_crashkit.capture.cuda_core import core_file as tables
from sglang_crashkit.capture.cuda_core.core_file import (
    MAX_SECONDS,
    CudaCoreError,
    ElfPart,
    Kind,
    Layout,
    Row,
    Section,
    Source,
    open_source,
)
from sglang_crashkit.capture.cuda_core.demangle import demangle
from sglang_crashkit.capture.cuda_core.model import (
    CHECKED_EXCEPTIONS,
    CudaCore,
    Device,
    Dimensions,
    Fault,
    Kernel,
    Place,
    Warp,
    exception_in_words,
    most_frequent,
    status_in_words,
)
from sglang_crashkit.capture.cuda_core.symbols import Symbols
from sglang_crashkit.capture.cuda_core.text import brief
from sglang_crashkit.capture.tools import BackgroundTool, ToolRun

_Known = TypeVar("_Known")

_TABLES = frozenset(kind for kind in Kind if kind is not Kind.SYMTAB)
_STRINGS = ".strtab"
#: The places where the most warps were; a hang has one or two.
MAX_HOT = 8
#: An exception of every warp of a GPU of 148 SMs is as many.
MAX_FAULTS = 10_000
#: Notes beyond that say the same.
MAX_NOTES = 20
#: The bits of a warp's mask; cudacoredump.h, ``validLanesMask``.
_MAX_LANES = 32
#: Python with a core of a whole GPU takes 100 MB of address space and 30 MB of memory.
MAX_MEMORY = 1 << 30
#: What an incident keeps of a core: so many kernels and exceptions.
MAX_KEPT = 256
MAX_OUTPUT = 16 << 20
#: After its deadline the process has this long to end by itself, in seconds, if its starter is gone.
_GRACE_SECS = 5


def read_cuda_core(path: Path, *, max_seconds: float = MAX_SECONDS) -> CudaCore:
    """Return what a core, not a link to one, says.

    What can be told without them, is told without the threads, and without the names, where those cannot be read; then
    the notes say so.

    Raises:
        CudaCoreError: it is no core of the CUDA driver's, is damaged, or is more than is read of one.
    """
    with open_source(path, max_seconds=max_seconds) as source:
        return _Reading(source).result()


class _Reading:
    """One core while it is read."""

    def __init__(self, source: Source) -> None:
        self._core = ElfPart(source)
        self._core.check_is_core()
        self._sections: dict[int, list[Section]] = {kind: [] for kind in _TABLES}
        for section in self._core.sections(_TABLES):
            self._sections[section.kind].append(section)
        self._notes: list[str] = []
        self._strings = self._find_strings()
        self._devices: list[Device] = []
        self._kernels: list[Kernel] = []
        self._faults: list[Fault] = []
        #: By section and row: what is below refers to them so.
        self._numbers: dict[tuple[int, int], int] = {}
        self._sms: dict[tuple[int, int], tuple[int, int]] = {}
        self._blocks: dict[tuple[int, int], tuple[int, int, int, Dimensions]] = {}
        #: Each with the mask of its valid threads.
        self._warps: dict[tuple[int, int], tuple[Warp, int]] = {}

    def result(self) -> CudaCore:
        self._read_devices()
        self._read_kernels()
        self._read_sms()
        has_all_warps = True
        try:
            self._read_blocks()
            self._read_warps()
            self._read_lanes()
        except CudaCoreError as error:
            # Which kernels there are, and what failed, is known by now.
            has_all_warps = False
            self._note(f"not all warps were read: {error.message}")
        driver, cuda, seconds = self._read_meta()
        self._count()
        warps = tuple(warp for warp, valid in self._warps.values() if valid)
        places = self._name_places(most_frequent(warps, MAX_HOT))
        return CudaCore(
            devices=tuple(self._devices),
            kernels=tuple(self._kernels),
            faults=tuple(self._faults),
            warps=warps,
            hot=places,
            driver=driver,
            cuda=cuda,
            seconds=seconds,
            has_all_warps=has_all_warps,
            notes=tuple(self._notes),
            unchecked=self._unchecked(bool(driver or seconds)),
        )

    def _read_devices(self) -> None:
        found = self._sections[Kind.DEVICES]
        if len(found) != 1:
            raise self._core.source.error(
                f"it has {len(found)} tables of devices, and a core has one", "wait until the driver has written it"
            )
        for index, row in enumerate(self._core.rows(found[0], tables.DEVICES)):
            self._numbers[found[0].index, index] = row["device"]
            same = ("pci_bus", "sms", "warps_per_sm", "lanes_per_warp", "sm_major", "sm_minor")
            name, sm_type = self._string(row["name"]), self._string(row["sm_type"])
            self._devices.append(Device(row["device"], name, sm_type, *(row[field] for field in same)))

    def _read_kernels(self) -> None:
        for section in self._sections[Kind.GRIDS]:
            device = self._parent(section, tables.GRIDS, self._numbers)
            for row in self._core.rows(section, tables.GRIDS):
                kernel = Kernel(
                    device=device,
                    grid_id=row["grid"],
                    entry=Place(row["entry"]),
                    grid=(row["grid_x"], row["grid_y"], row["grid_z"]),
                    block=(row["block_x"], row["block_y"], row["block_z"]),
                    status=status_in_words(row["status"]),
                    host_thread=row["host_thread"],
                    parent_grid_id=row["parent"],
                    blocks=0,
                    warps=0,
                )
                self._kernels.append(kernel)

    def _read_sms(self) -> None:
        for section in self._sections[Kind.SMS]:
            device = self._parent(section, tables.SMS, self._numbers)
            for index, row in enumerate(self._core.rows(section, tables.SMS)):
                self._sms[section.index, index] = (device, row["sm"])
                if code := row.get("exception", 0):
                    place = Place(row["error_pc"]) if row.get("error_pc_valid") and "error_pc" in row else None
                    self._faults.append(Fault(device, row["sm"], code, exception_in_words(code), place))

    def _read_blocks(self) -> None:
        for section in self._sections[Kind.BLOCKS]:
            device, sm = self._parent(section, tables.BLOCKS, self._sms)
            for index, row in enumerate(self._core.rows(section, tables.BLOCKS)):
                self._blocks[section.index, index] = (device, sm, row["grid"], (row["x"], row["y"], row["z"]))

    def _read_warps(self) -> None:
        for section in self._sections[Kind.WARPS]:
            device, sm, grid, block = self._parent(section, tables.WARPS, self._blocks)
            for index, row in enumerate(self._core.rows(section, tables.WARPS)):
                error = row["error_pc"] if row["error_pc_valid"] else None
                warp = Warp(device, sm, row["warp"], grid, block, (), error)
                self._warps[section.index, index] = warp, row["valid_lanes"]

    def _read_lanes(self) -> None:
        for section in self._sections[Kind.LANES]:
            warp, valid = self._parent(section, tables.LANES, self._warps)
            pcs: Counter[int] = Counter()
            failed: Counter[tuple[int, int]] = Counter()
            for row in self._core.rows(section, tables.LANES):
                if row["lane"] >= _MAX_LANES or not valid >> row["lane"] & 1:
                    # The driver writes rows of threads that there are not, too.
                    continue
                pcs[row["pc"]] += 1
                if row["exception"]:
                    failed[row["exception"], row["pc"] if warp.error is None else warp.error] += 1
            self._warps[section.link, section.info] = replace(warp, pcs=tuple(sorted(pcs.items()))), valid
            for (code, address), lanes in sorted(failed.items()):
                where = (warp.number, warp.grid_id, warp.block_index, lanes)
                if len(self._faults) < MAX_FAULTS:
                    fault = Fault(warp.device, warp.sm, code, exception_in_words(code), Place(address), *where)
                    self._faults.append(fault)

    def _read_meta(self) -> tuple[str, str, int | None]:
        try:
            rows = [row for section in self._sections[Kind.META] for row in self._core.rows(section, tables.META)]
        except CudaCoreError as error:
            self._note(error.message)
            return "", "", None
        if not rows:
            return "", "", None
        return _version(rows[0], "driver"), _version(rows[0], "cuda"), rows[0]["seconds"] or None

    def _count(self) -> None:
        """Tell each kernel how much of it was on the GPU."""
        blocks = Counter((device, grid) for device, _sm, grid, _index in self._blocks.values())
        warps = Counter((warp.device, warp.grid_id) for warp, valid in self._warps.values() if valid)
        for position, kernel in enumerate(self._kernels):
            key = (kernel.device, kernel.grid_id)
            self._kernels[position] = replace(kernel, blocks=blocks[key], warps=warps[key])

    def _name_places(self, hot: list[tuple[int, int]]) -> tuple[tuple[Place, int], ...]:
        """Name the functions of kernels and faults, and of the places where the most warps were, which are returned."""
        symbols = Symbols(self._core, self._sections[Kind.RELOCATED_IMAGE])
        if not self._sections[Kind.RELOCATED_IMAGE]:
            self._note("it holds no relocated cubin, so that no function has a name")
        addresses = {kernel.entry.address for kernel in self._kernels} | {address for address, _warps in hot}
        addresses |= {fault.place.address for fault in self._faults if fault.place is not None}
        functions = {address: function for address in sorted(addresses) if (function := symbols.at(address))}
        for problem in symbols.problems:
            self._note(f"not all functions have names: {problem}")
        demangled, problem = demangle(function.name for function in functions.values())
        if problem:
            self._note(f"names are as the compiler has them: {problem}")

        def named(place: Place) -> Place:
            function = functions.get(place.address)
            if function is None:
                return place
            name = demangled.get(function.name, function.name)
            return Place(place.address, name, place.address - function.start, function.name)

        self._kernels = [replace(kernel, entry=named(kernel.entry)) for kernel in self._kernels]
        self._faults = [
            replace(fault, place=None if fault.place is None else named(fault.place)) for fault in self._faults
        ]
        return tuple((named(Place(address)), count) for address, count in hot)

    def _unchecked(self, has_meta: bool) -> tuple[str, ...]:
        of_sm = any(fault.warp is None for fault in self._faults)
        without_warps = not all(kernel.is_checked for kernel in self._kernels)
        newer = {fault.code for fault in self._faults} - CHECKED_EXCEPTIONS
        found = {
            "exceptions of an SM alone": of_sm,
            f"what exception {', '.join(map(str, sorted(newer)))} is called": bool(newer),
            "kernels without a warp": without_warps,
            "its metadata": has_meta,
        }
        return tuple(what for what, is_told in found.items() if is_told)

    def _parent(self, section: Section, layout: Layout, known: Mapping[tuple[int, int], _Known]) -> _Known:
        try:
            return known[section.link, section.info]
        except KeyError:
            raise self._core.source.error(
                f"the table of {layout.what} (section {section.index}) belongs to row {section.info} of section "
                f"{section.link}, and there is no such row"
            ) from None

    def _find_strings(self) -> Section | None:
        try:
            for section in self._sections[Kind.STRTAB]:
                if self._core.name_of(section) == _STRINGS:
                    return section
        except CudaCoreError as error:
            # What a GPU is called is not what a core is read for.
            self._note(error.message)
        return None

    def _string(self, offset: int) -> str:
        try:
            return "" if self._strings is None else self._core.string(self._strings, offset)
        except CudaCoreError as error:
            self._note(error.message)
            return ""

    def _note(self, words: str) -> None:
        if len(self._notes) < MAX_NOTES:
            self._notes.append(words)


def _version(row: Row, what: str) -> str:
    major, minor = row[f"{what}_major"], row[f"{what}_minor"]
    return f"{major}.{minor}" if major else ""


@dataclass(frozen=True)
class Reading:
    """What came of reading a core."""

    #: What `CudaCore.to_json` gives, without the single warps; None where it could not be read.
    core: dict[str, Any] | None
    brief: list[str] = field(default_factory=list)  # the same in a few lines
    reason: str = ""  # why it could not be read; empty where it could


class CoreReader(BackgroundTool[Reading]):
    """Reads the core at `path` within so many seconds.

    Raises:
        RuntimeError: the system gives no thread.
    """

    def __init__(self, path: Path, seconds: float) -> None:
        command = [sys.executable, "-m", __name__, str(path), str(seconds)]
        super().__init__("core reader", command, seconds, _reading_of, MAX_OUTPUT)


def _reading_of(run: ToolRun) -> Reading:
    if run.reason:
        return Reading(None, reason=f"its reader: {run.reason}")
    try:
        answer = json.loads(run.text)
        if "error" in answer:
            return Reading(None, reason=str(answer["error"]))
        return Reading(dict(answer["core"]), [str(line) for line in answer["brief"]])
    except (ValueError, TypeError, LookupError, RecursionError):
        return Reading(None, reason="its reader wrote no answer")


def _kept(core: CudaCore) -> CudaCore:
    left_out = max(0, len(core.kernels) - MAX_KEPT) + max(0, len(core.faults) - MAX_KEPT)
    notes = (*core.notes, f"{left_out} kernels and exceptions are left out here") if left_out else core.notes
    return replace(core, kernels=core.kernels[:MAX_KEPT], faults=core.faults[:MAX_KEPT], notes=notes)


def main(arguments: Sequence[str]) -> int:
    """Read the core and write what it says."""
    path, seconds = Path(arguments[0]), float(arguments[1])
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.alarm(int(seconds) + _GRACE_SECS)
    answer: dict[str, Any]
    try:
        core = read_cuda_core(path, max_seconds=seconds)
        answer = {"core": _kept(core).to_json(warps=False), "brief": list(brief(core))}
    except CudaCoreError as error:
        answer = {"error": error.message}
    except MemoryError:
        answer = {"error": f"{path}: it takes more memory to read than {MAX_MEMORY >> 20} MiB"}
    sys.stdout.write(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
