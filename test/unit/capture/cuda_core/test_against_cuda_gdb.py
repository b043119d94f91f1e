"""What the kit's reader says of a core, compared with what NVIDIA's own says."""

from __future__ import annotations

import gzip
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from sglang_crashkit.capture.cuda_core.model import CHECKED_EXCEPTIONS, CudaCore, Kernel
from sglang_crashkit.capture.cuda_core.reading import read_cuda_core
from unit.capture.cuda_core.oracle import CORE_SUFFIX, REAL, ask_cuda_gdb
from unit.capture.cuda_core.synthetic_core import (
    CUBIN,
    SPIN,
    BlockSpec,
    CoreSpec,
    DeviceSpec,
    GridSpec,
    SmSpec,
    WarpSpec,
    core_bytes,
)

CUDA_GDB = Path(__file__).parents[4] / ".lanes" / "cuda-gdb" / "cuda-gdb"
DEVICE = re.compile(r"[* ]\s+(\d+)\s+(\w\w):\S+ (.+?)\s+\S+\s+(sm_\d+)\s+(\d+)\s+(\d+)\s+(\d+)\s+\d+\s+0x")
KERNEL = re.compile(r"[* ]\s+(\d+)\s+\S+\s+(\d+)\s+(\d+)\s+(\w+)\s+0x\w+\s+\((\S+)\)\s+\((\S+)\)\s+(.+)\(\)")
LAUNCH = re.compile(r"[* ]\s+(\d+)\s+(\S+)\s+(\d+)\s+(\d+)\s+\w+\s+(0x\w+)\s")
LANE = re.compile(r"[* ]\s+(\d+)\s+(?:active|divergent)\s+(0x\w+)\s+\(\S+\)\s+(\S.*?)\s*$")
WARP = re.compile(r"[* ]\s+(\d+)\s+0x\w+\s+0x\w+\s+\S+\s+(\d+)\s+\((\S+)\)\s+\(")
WHERE = re.compile(r"Device (\d+) SM (\d+)(?: Warp (\d+))?")
FOCUS = re.compile(r"focus set to .* device (\d+), sm (\d+), warp (\d+), lane \d+\]\n#0 +(0x\w+) in (.+?)<<<")
ERROR_PC = re.compile(r"exception was triggered at PC (0x\w+)")
UNKNOWN_TO_IT = "device unknown exception"

pytestmark = [
    pytest.mark.wide,
    pytest.mark.skipif(not CUDA_GDB.is_file(), reason="no cuda-gdb to compare with; scripts/cuda_gdb installs it"),
]

Warp = tuple[int, int, int]
COPY = SPIN + 0x1000
ALL = range(32)
#: The SMs and warps of an H200, each full to a quarter.
_SMS, _WARPS = 132, 16


def _core(warps: Sequence[WarpSpec], grid: GridSpec | None = None, **options: object) -> CoreSpec:
    grid = grid or GridSpec(7, SPIN, (2, 1, 1), (64, 1, 1), host_thread=4711)
    sms = [SmSpec(0, [BlockSpec(grid.grid_id, (1, 0, 0), warps)]), SmSpec(1), SmSpec(2)]
    return CoreSpec([DeviceSpec([grid], sms, sm_count=3)], [CUBIN], **options)  # type: ignore[arg-type]


def _hung(**options: object) -> CoreSpec:
    return _core([WarpSpec(3, [SPIN + 0x110] * 32)], **options)


def _two_gpus() -> CoreSpec:
    one = DeviceSpec([GridSpec(7, SPIN)], [SmSpec(0, [BlockSpec(7, warps=[WarpSpec(3, [SPIN + 8] * 32)])])], sm_count=1)
    failed = WarpSpec(5, [COPY + 0x40] * 32, error=COPY + 0x40, failed=dict.fromkeys(ALL, 6))
    sms = [SmSpec(0), SmSpec(1, [BlockSpec(9, (3, 1, 0), [failed])])]
    other = DeviceSpec(
        [GridSpec(9, COPY, (8, 2, 1), (32, 1, 1))], sms, name="NVIDIA B200", sm_type="sm_100", sm_count=2
    )
    return CoreSpec([one, other], [CUBIN])


def _two_kernels() -> CoreSpec:
    partial = WarpSpec(4, [COPY + 0x10] * 7, valid=0x7F, active=0x0F)
    blocks = [
        BlockSpec(7, (1, 0, 0), [WarpSpec(3, [SPIN + 0x110] * 32)]),
        BlockSpec(8, (0, 0, 0), [partial, WarpSpec(9, [COPY + 0x90] * 32)]),
    ]
    grids = [GridSpec(7, SPIN, (2, 1, 1)), GridSpec(8, COPY, block=(39, 1, 1), parent=7)]
    return CoreSpec([DeviceSpec(grids, [SmSpec(0, blocks)], sm_count=1)], [CUBIN])


def _whole_gpu() -> CoreSpec:
    sms = [
        SmSpec(sm, [BlockSpec(7, (sm, 0, 0), [WarpSpec(warp, [SPIN + 0x10 * warp] * 32) for warp in range(_WARPS)])])
        for sm in range(_SMS)
    ]
    grid = GridSpec(7, SPIN, (_SMS, 1, 1), (32 * _WARPS, 1, 1))
    return CoreSpec([DeviceSpec([grid], sms, sm_count=_SMS)], [CUBIN])


def _diverged(error: int | None) -> WarpSpec:
    pcs = [COPY + 0x40] * 16 + [COPY + 0x80] * 16
    return WarpSpec(5, pcs, error=error, failed=dict.fromkeys(ALL, 14), active=0xFFFF0000)


_COPIES = GridSpec(9, COPY, (2, 1, 1), (64, 1, 1))
_BLOCK_FAULT = [WarpSpec(n, [COPY + 0x20] * 32, error=COPY + 0x18, failed=dict.fromkeys(ALL, 5)) for n in range(2)]

CORES = {
    "a kernel that hangs": _hung(),
    "an exception of one thread": _core([WarpSpec(3, [SPIN + 0x110] * 32, failed={9: 1})]),
    "an exception of a block": _core(_BLOCK_FAULT, _COPIES),
    "a diverged warp that failed at one place": _core([_diverged(COPY + 0x20)], _COPIES),
    "a diverged warp that failed without a place": _core([_diverged(None)], _COPIES),
    "rows of threads that there are not": _core([WarpSpec(3, [SPIN + 0x110] * 8, valid=0x0F, failed={6: 14})]),
    "threads in the middle of a warp": _core([WarpSpec(3, [SPIN + lane for lane in ALL], valid=0x00FF00F0)]),
    "two GPUs": _two_gpus(),
    "two kernels and a partial warp": _two_kernels(),
    "a kernel without warps": CoreSpec([DeviceSpec([GridSpec(7, SPIN)], [SmSpec(0)], sm_count=1)], [CUBIN]),
    "an exception of an SM beside warps": CoreSpec(
        [
            DeviceSpec(
                [GridSpec(7, SPIN)],
                [SmSpec(0, [BlockSpec(7, warps=[WarpSpec(3, [SPIN + 8] * 32)])]), SmSpec(1, (), 10, COPY + 0x40)],
                sm_count=2,
            )
        ],
        [CUBIN],
    ),
    "symbols relative to their sections": _hung(relative=True),
    "rows that grew": _hung(grown=8),
    "rows of an older driver": _hung(old=True),
    "many sections": _hung(many_sections=True),
    "a function in no cubin": _core([WarpSpec(3, [SPIN + 0x900] * 32)]),
    "a GPU full of warps": _whole_gpu(),
    "every exception": _core(
        [WarpSpec(code, [SPIN + code] * 32, failed={0: code}) for code in range(1, 38)],
    ),
}


@dataclass
class Said:
    """What cuda-gdb printed: its tables by name, and all of it."""

    tables: dict[str, list[str]]
    text: str

    def found(self, table: str, row: re.Pattern[str]) -> Iterator[tuple[tuple[int, ...], re.Match[str]]]:
        """Yield the rows of a table, each with the device, SM and warp that it stands under."""
        where: tuple[int, ...] = ()
        for line in self.tables[table]:
            if under := WHERE.match(line):
                where = tuple(int(number) for number in under.groups() if number is not None)
            elif match := row.match(line):
                yield where, match


REAL_CORES = {path.name.removesuffix(CORE_SUFFIX): path for path in sorted(REAL.glob(f"*{CORE_SUFFIX}"))}


@pytest.fixture(params=[*CORES, *REAL_CORES], scope="module")
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[CudaCore, Said]:
    """One core, as the kit and as cuda-gdb read it."""
    folder = tmp_path_factory.mktemp("oracle")
    path = folder / "core.cuda"
    if real := REAL_CORES.get(request.param):
        path.write_bytes(gzip.decompress(real.read_bytes()))
        text = (REAL / f"{request.param}.txt").read_text()
    else:
        path.write_bytes(core_bytes(CORES[request.param]))
        text = ask_cuda_gdb(CUDA_GDB, path, folder)
    opening, *parts = text.split("== ")
    tables = {part.splitlines()[0]: part.splitlines()[1:] for part in parts}
    return read_cuda_core(path), Said(tables, opening)


def test_they_agree_on_the_gpus(both: tuple[CudaCore, Said]) -> None:
    core, said = both
    found = [match.groups() for _where, match in said.found("devices", DEVICE)]
    assert [(int(one[0]), int(one[1], 16), *one[2:4], *map(int, one[4:])) for one in found] == [
        (one.number, one.pci_bus, one.name, one.sm_type, one.sms, one.warps_per_sm, one.lanes_per_warp)
        for one in core.devices
    ]


def test_they_agree_on_the_kernels(both: tuple[CudaCore, Said]) -> None:
    core, said = both
    rows = [match.groups() for _where, match in said.found("kernels", KERNEL)]
    # A kernel without warps is none to cuda-gdb, and one whose symbols are relative has no name.
    names = {(int(row[1]), int(row[2])): row[6] for row in rows}
    mine = {(one.device, one.grid_id): one for one in core.kernels if one.warps}
    assert {(int(row[1]), int(row[2])): (row[3].lower(), row[4], row[5]) for row in rows} == {
        key: (one.status, ",".join(map(str, one.grid)), ",".join(map(str, one.block))) for key, one in mine.items()
    }
    for key, name in names.items():
        assert name in ("<internal>", (mine[key].name or "").partition("(")[0])


def test_they_agree_on_what_launched_a_kernel_and_where(both: tuple[CudaCore, Said]) -> None:
    core, said = both
    rows = [match.groups() for _where, match in said.found("kernels", LAUNCH)]
    grids = {number: int(grid) for number, _parent, _device, grid, _sms in rows} | {"-": 0}
    blocks = {(where[0], grids[match[2]], where[1], match[3]) for where, match in said.found("warps", WARP)}
    found = {
        (int(device), grids[number]): (
            grids[parent],
            int(sms, 16),
            sum(one[:2] == (int(device), grids[number]) for one in blocks),
        )
        for number, parent, device, _grid, sms in rows
    }
    assert found == {
        (one.device, one.grid_id): (one.parent_grid_id, sms_of(core, one), one.blocks)
        for one in core.kernels
        if one.warps
    }


def sms_of(core: CudaCore, kernel: Kernel) -> int:
    """Return the SMs that a kernel has warps on, as a mask."""
    own = {warp.sm for warp in core.warps if (warp.device, warp.grid_id) == (kernel.device, kernel.grid_id)}
    return sum(1 << sm for sm in own)


def test_they_agree_on_the_warps(both: tuple[CudaCore, Said]) -> None:
    core, said = both
    grids = {match[1]: int(match[3]) for _where, match in said.found("kernels", KERNEL)}
    found = {(*where[:2], int(match[1]), grids[match[2]], match[3]) for where, match in said.found("warps", WARP)}
    assert found == {
        (one.device, one.sm, one.number, one.grid_id, ",".join(map(str, one.block_index))) for one in core.warps
    }


def test_they_agree_on_where_the_threads_were(both: tuple[CudaCore, Said]) -> None:
    core, said = both
    found: dict[Warp, Counter[int]] = {}
    for (device, sm, warp), match in said.found("lanes", LANE):
        found.setdefault((device, sm, warp), Counter())[int(match[2], 16)] += 1
    assert found == {(one.device, one.sm, one.number): Counter(dict(one.pcs)) for one in core.warps}


def test_they_agree_on_the_exceptions(both: tuple[CudaCore, Said]) -> None:
    core, said = both
    found = Counter((*where, match[3].lower()) for where, match in said.found("lanes", LANE) if match[3] != "None")
    mine: Counter[tuple[int | str | None, ...]] = Counter()
    for one in core.faults:
        if one.warp is not None:
            name = one.exception.lower() if one.code in CHECKED_EXCEPTIONS else UNKNOWN_TO_IT
            mine[one.device, one.sm, one.warp, name] += one.lanes or 0
    assert found == mine


def test_they_agree_on_the_place_that_failed(both: tuple[CudaCore, Said]) -> None:
    core, said = both
    focus, error = FOCUS.search(said.text), ERROR_PC.search(said.text)
    if focus is None:
        assert not core.warps
        return
    warp = next(one for one in core.warps if (one.device, one.sm, one.number) == tuple(map(int, focus.groups()[:3])))
    assert int(focus[4], 16) in dict(warp.pcs)
    assert warp.error == (int(error[1], 16) if error else None)
    places = {place.address: place.function for place, _warps in core.hot}
    if focus[5] != "??":
        assert places.get(int(focus[4], 16), focus[5]) == focus[5]
