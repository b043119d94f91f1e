"""What the kit's reader says of a core, compared with what NVIDIA's own says."""

from __future__ import annotations

import os
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from sglang_crashkit.capture.cuda_core.model import CHECKED_EXCEPTIONS, CudaCore
from sglang_crashkit.capture.cuda_core.reading import read_cuda_core
from unit.capture.cuda_core.oracle_cores import CORES
from unit.synthetic_core import core_bytes

CUDA_GDB = Path(__file__).parents[4] / ".lanes" / "cuda-gdb" / "cuda-gdb"
TABLES = {
    "devices": "info cuda devices",
    "kernels": "info cuda kernels",
    "lanes": "info cuda lanes device all sm all warp all lane all",
    "warps": "info cuda warps device all sm all",
}
DEVICE = re.compile(r"[* ]\s+(\d+)\s+(\w\w):\S+ (.+?)\s+\S+\s+(sm_\d+)\s+(\d+)\s+(\d+)\s+(\d+)\s+\d+\s+0x")
KERNEL = re.compile(r"[* ]\s+(\d+)\s+\S+\s+(\d+)\s+(\d+)\s+(\w+)\s+0x\w+\s+\((\S+)\)\s+\((\S+)\)\s+(.+)\(\)")
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


@pytest.fixture(params=CORES, scope="module")
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[CudaCore, Said]:
    """One core, as the kit and as cuda-gdb read it."""
    folder = tmp_path_factory.mktemp("oracle")
    path = folder / "core.cuda"
    path.write_bytes(core_bytes(CORES[request.param]))
    command = [CUDA_GDB, "-nx", "-batch", "-iex", "set width 0", "-ex", f"target cudacore {path}"]
    for name, listing in TABLES.items():
        command += ["-ex", f"echo == {name}\\n", "-ex", listing]
    run = subprocess.run(
        command, env={**os.environ, "TMPDIR": str(folder)}, capture_output=True, text=True, timeout=60, check=True
    )
    assert "Could not open" not in run.stderr
    opening, *parts = run.stdout.split("== ")
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
