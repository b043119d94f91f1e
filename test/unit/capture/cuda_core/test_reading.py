from __future__ import annotations

import contextlib
import functools
import os
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_crashkit.capture.cuda_core import reading
from sglang_crashkit.capture.cuda_core.core_file import CudaCoreError
from sglang_crashkit.capture.cuda_core.model import CudaCore
from sglang_crashkit.capture.cuda_core.reading import CoreReader, Reading, read_cuda_core
from unit.capture.cuda_core.synthetic_core import (
    COPY_NAME,
    CTATBL,
    CUBIN,
    DEVTBL,
    GRIDTBL,
    HEADER,
    LNTBL,
    SECTION,
    SMTBL,
    SPIN,
    SPIN_NAME,
    WPTBL,
    BlockSpec,
    CoreSpec,
    DeviceSpec,
    GridSpec,
    Part,
    SmSpec,
    WarpSpec,
    core_bytes,
    core_parts,
    elf_bytes,
    failed_core,
    hung_core,
)
from unit.support.targets import make_tool
from unit.support.waiting import LONG, wait_until

Write = Callable[[bytes], Path]


@pytest.fixture(autouse=True, scope="module")
def demangled_once() -> Iterator[None]:
    """Have the same names demangled once: each time takes a process, and cores that differ little have the same."""
    known = functools.cache(reading.demangle)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "demangle", lambda names: known(tuple(names)))
        yield


@contextmanager
def written(data: bytes) -> Iterator[Path]:
    """A file for each example; `tmp_path` is there once for all of them."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "core.cuda"
        path.write_bytes(data)
        yield path


def read(data: bytes) -> CudaCore:
    with written(data) as path:
        return read_cuda_core(path)


def read_or_refuse(data: bytes) -> CudaCore | None:
    """Return what was read, None where it was refused as it should be; anything else is raised."""
    with contextlib.suppress(CudaCoreError):
        return read(data)
    return None


def test_a_kernel_that_hangs_is_named(write: Write) -> None:
    core = read_cuda_core(write(hung_core()))
    assert (core.devices[0].name, core.devices[0].sm_type, core.devices[0].sms) == ("NVIDIA H200", "sm_90", 132)
    kernel = core.kernels[0]
    assert (kernel.name, kernel.grid_id, kernel.grid, kernel.block) == (SPIN_NAME, 7, (2, 1, 1), (32, 1, 1))
    assert (kernel.status, kernel.host_thread, kernel.blocks, kernel.warps) == ("active", 4711, 1, 1)
    warp = core.warps[0]
    assert (warp.sm, warp.number, warp.grid_id, warp.pcs) == (0, 3, 7, ((SPIN + 0x110, 32),))
    place, count = core.hot[0]
    assert (place.function, place.offset, count) == (SPIN_NAME, 0x110, 1)
    assert (core.driver, core.cuda, core.seconds) == ("580.65", "13.0", 1_795_000_000)
    assert core.has_all_warps
    assert core.faults == core.notes == ()


def test_a_failure_is_placed_after_its_kernel_is_gone(write: Write) -> None:
    core = read_cuda_core(write(failed_core()))
    assert core.kernels == ()
    fault = core.faults[0]
    assert (fault.device, fault.sm, fault.exception) == (0, 17, "device illegal address")
    assert fault.place is not None
    assert (fault.place.function, fault.place.offset) == (COPY_NAME, 0x40)
    assert (fault.warp, fault.grid_id, fault.lanes) == (None, None, None)


def test_a_failure_of_a_warp_has_its_block_and_kernel(write: Write) -> None:
    warp = WarpSpec(5, [SPIN + 0x20] * 4, exception=14, error=SPIN + 0x10)
    sm = SmSpec(9, [BlockSpec(7, (1, 2, 3), [warp])])
    spec = CoreSpec([DeviceSpec([GridSpec(7, SPIN)], [sm])], [CUBIN])
    fault = read_cuda_core(write(core_bytes(spec))).faults[0]
    assert (fault.sm, fault.warp, fault.grid_id, fault.block_index, fault.lanes) == (9, 5, 7, (1, 2, 3), 1)
    assert fault.exception == "warp illegal address"
    # Where it failed counts, not how far the thread had got since.
    assert fault.place is not None
    assert fault.place.address == SPIN + 0x10


@pytest.mark.parametrize("error", [None, SPIN + 0x10])
def test_a_diverged_warp_with_one_place_is_one_fault(write: Write, error: int | None) -> None:
    warp = WarpSpec(5, [SPIN + 0x20] * 16 + [SPIN + 0x40] * 16, error=error, failed=dict.fromkeys(range(32), 14))
    spec = CoreSpec([DeviceSpec([GridSpec(7, SPIN)], [SmSpec(0, [BlockSpec(7, warps=[warp])])])], [CUBIN])
    faults = read_cuda_core(write(core_bytes(spec))).faults
    assert [one.lanes for one in faults] == ([16, 16] if error is None else [32])


def test_threads_that_there_are_not_are_left_out(write: Write) -> None:
    partial = WarpSpec(3, [SPIN + 0x20] * 8, valid=0x0F, failed={6: 14})
    phantom = WarpSpec(4, [SPIN + 0x20] * 8, valid=0, failed={0: 14})
    spec = CoreSpec([DeviceSpec([GridSpec(7, SPIN)], [SmSpec(0, [BlockSpec(7, warps=[partial, phantom])])])], [CUBIN])
    core = read_cuda_core(write(core_bytes(spec)))
    assert [(one.number, one.pcs) for one in core.warps] == [(3, ((SPIN + 0x20, 4),))]
    assert (core.faults, core.kernels[0].warps) == ((), 1)


def test_what_nothing_confirmed_is_marked(write: Write) -> None:
    sm = SmSpec(0, [BlockSpec(7, warps=[WarpSpec(1, [SPIN], exception=36)])])
    spec = CoreSpec([DeviceSpec([GridSpec(7, SPIN), GridSpec(8, SPIN)], [sm])], [CUBIN])
    core = read_cuda_core(write(core_bytes(spec)))
    assert core.faults[0].exception == "TMA syscall error"
    assert core.unchecked == ("what exception 36 is called", "kernels without a warp", "its metadata")


def test_a_core_without_cubins_has_kernels_without_names(write: Write) -> None:
    spec = CoreSpec([DeviceSpec([GridSpec(7, SPIN)])])
    core = read_cuda_core(write(core_bytes(spec)))
    assert core.kernels[0].name is None
    assert core.kernels[0].entry.address == SPIN
    assert core.notes == ("it holds no relocated cubin, so that no function has a name",)


@pytest.mark.parametrize("what", ["no names of sections", "no strings", "an offset beyond the strings"])
def test_a_gpu_whose_name_cannot_be_read_has_none(write: Write, what: str) -> None:
    parts = core_parts(CoreSpec([DeviceSpec([GridSpec(7, SPIN)])], [CUBIN]))
    if what == "no strings":
        parts = [part for part in parts if part.name != ".strtab"]
    elif what == "an offset beyond the strings":
        parts[0].data = (1 << 40).to_bytes(8, "little") + parts[0].data[8:]
    data = bytearray(elf_bytes(parts))
    if what == "no names of sections":
        data[62:64] = (0).to_bytes(2, "little")
    core = read_cuda_core(write(bytes(data)))
    assert core.devices[0].name == ""
    assert core.kernels[0].name == SPIN_NAME


def test_the_rows_of_an_old_driver_are_read(write: Write) -> None:
    sm = SmSpec(3, [BlockSpec(7, warps=[WarpSpec(1, [SPIN] * 2)])], exception=10, error=SPIN)
    spec = CoreSpec([DeviceSpec([GridSpec(7, SPIN)], [sm])], [CUBIN], old=True)
    core = read_cuda_core(write(core_bytes(spec)))
    assert core.kernels[0].name == SPIN_NAME
    assert core.warps[0].pcs == ((SPIN, 2),)
    # It did not say yet what an SM failed of.
    assert core.faults == ()


numbers = st.integers(0, 2**32 - 1)
addresses = st.integers(SPIN - 0x10, SPIN + 0x1300)
triples = st.tuples(numbers, numbers, numbers)
warps = st.builds(
    WarpSpec,
    numbers,
    st.lists(addresses, min_size=1, max_size=4),
    st.integers(0, 30),
    st.none() | addresses,
)
blocks = st.builds(BlockSpec, st.integers(0, 3), triples, st.lists(warps, max_size=3))
sms = st.builds(SmSpec, numbers, st.lists(blocks, max_size=3), st.integers(0, 30), st.none() | addresses)
grids = st.builds(GridSpec, st.integers(0, 3), addresses, triples, triples, st.integers(0, 7), numbers)
texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20)
devices = st.builds(DeviceSpec, st.lists(grids, max_size=3), st.lists(sms, max_size=3), texts, texts, numbers)
specs = st.builds(
    CoreSpec,
    st.lists(devices, min_size=1, max_size=3),
    st.sampled_from([[], [CUBIN]]),
    st.integers(0, 40),
    st.just(False),
    st.booleans(),
)


@settings(max_examples=25)
@given(specs)
def test_what_was_written_is_read(spec: CoreSpec) -> None:
    core = read(core_bytes(spec))
    assert [(one.name, one.sm_type, one.sms) for one in core.devices] == [
        (one.name, one.sm_type, one.sm_count) for one in spec.devices
    ]
    grids = [(number, grid) for number, device in enumerate(spec.devices) for grid in device.grids]
    assert [
        (one.device, one.grid_id, one.entry.address, one.grid, one.block, one.host_thread) for one in core.kernels
    ] == [(number, grid.grid_id, grid.entry, grid.grid, grid.block, grid.host_thread) for number, grid in grids]
    for kernel in core.kernels:
        inside = [name for name, (start, size) in CUBIN.items() if start <= kernel.entry.address < start + size]
        assert kernel.entry.symbol == (inside[0] if inside and spec.cubins else None)
    placed = [
        (number, sm, block, warp)
        for number, device in enumerate(spec.devices)
        for sm in device.sms
        for block in sm.blocks
        for warp in block.warps
    ]
    assert [(one.device, one.sm, one.number, one.grid_id, one.block_index, one.error) for one in core.warps] == [
        (number, sm.number, warp.number, block.grid_id, block.index, warp.error) for number, sm, block, warp in placed
    ]
    assert [dict(one.pcs) for one in core.warps] == [
        {pc: list(warp.pcs).count(pc) for pc in warp.pcs} for _number, _sm, _block, warp in placed
    ]
    failed = [sm for device in spec.devices for sm in device.sms if sm.exception]
    failed_warps = [warp for _number, _sm, _block, warp in placed if warp.exception]
    assert [fault.code for fault in core.faults] == [one.exception for one in (*failed, *failed_warps)]
    assert core.has_all_warps


@settings(max_examples=25)
@given(specs, st.integers(1, 40))
def test_longer_rows_say_the_same(spec: CoreSpec, grown: int) -> None:
    today, tomorrow = replace(spec, grown=0), replace(spec, grown=grown)
    assert read(core_bytes(today)) == read(core_bytes(tomorrow))


@pytest.mark.parametrize("kind", [DEVTBL, GRIDTBL, SMTBL, CTATBL, WPTBL, LNTBL])
def test_kernels_are_told_where_only_warps_cannot_be_read(kind: int) -> None:
    device = DeviceSpec([GridSpec(7, SPIN)], [SmSpec(0, [BlockSpec(7, warps=[WarpSpec(1, [SPIN])])])])
    parts = core_parts(CoreSpec([device], [CUBIN]))
    for part in parts:
        if part.kind == kind:
            part.row_size, part.data = 4, part.data[:4]
    if kind in (DEVTBL, GRIDTBL, SMTBL):
        with pytest.raises(CudaCoreError, match="has rows of 4 bytes, and at least"):
            read(elf_bytes(parts))
        return
    core = read(elf_bytes(parts))
    assert core.kernels[0].name == SPIN_NAME
    assert not core.has_all_warps
    assert "not all warps were read: " in core.notes[0]


@pytest.mark.parametrize("kind", [GRIDTBL, SMTBL])
@pytest.mark.parametrize("link", ["itself", "another table", "nowhere", "another row"])
def test_a_table_that_belongs_nowhere_is_refused(kind: int, link: str) -> None:
    parts = core_parts(CoreSpec([DeviceSpec([GridSpec(7, SPIN)], [SmSpec(0, [BlockSpec(7)])])]))
    index = next(index for index, part in enumerate(parts, 1) if part.kind == kind)
    part = parts[index - 1]
    if link == "another row":
        part.info = 99
    else:
        part.link = {"itself": index, "another table": len(parts), "nowhere": 1 << 31}[link]
    with pytest.raises(CudaCoreError, match="belongs to row"):
        read(elf_bytes(parts))


@pytest.mark.parametrize("count", [0, 2])
def test_a_core_has_one_table_of_devices(count: int) -> None:
    parts = [part for part in core_parts(CoreSpec()) if part.kind != DEVTBL]
    parts += [Part(".cudbg.devtbl", DEVTBL, b"")] * count
    with pytest.raises(CudaCoreError, match=f"it has {count} tables of devices"):
        read(elf_bytes(parts))


@pytest.mark.wide
def test_many_tables_of_the_same_bytes_fit_into_memory() -> None:
    # 300 tables of 4 MB each, all of them the same 4 MB.
    parts = core_parts(CoreSpec([DeviceSpec()]))
    number = next(index for index, part in enumerate(parts) if part.kind == SMTBL)
    parts[number].data, parts[number].row_size = bytes(8 << 19), 8
    parts += [replace(parts[number], data=b"") for _ in range(300)]
    data = bytearray(elf_bytes(parts))
    table = int.from_bytes(data[40:48], "little")
    original = SECTION.unpack_from(data, table + (number + 1) * SECTION.size)
    for index in range(len(parts) - 299, len(parts) + 1):
        fields = list(SECTION.unpack_from(data, table + index * SECTION.size))
        fields[4:6] = original[4:6]
        SECTION.pack_into(data, table + index * SECTION.size, *fields)
    with pytest.raises(CudaCoreError, match=r"have more than|take more than"):
        read(bytes(data))


def test_a_core_that_is_larger_than_memory_is_no_trouble(tmp_path: Path) -> None:
    # As of a GPU whose whole memory was dumped: most of the file is of no interest.
    parts = [
        *core_parts(CoreSpec([DeviceSpec([GridSpec(7, SPIN)])], [CUBIN])),
        Part(".cudbg.global.0", 0x80000002, b"g"),
    ]
    data = elf_bytes(parts)
    table = int.from_bytes(data[40:48], "little")
    size = 1 << 38
    path = tmp_path / "core.cuda"
    with path.open("wb") as file:
        header = bytearray(data[: HEADER.size])
        header[40:48] = (table + size).to_bytes(8, "little")
        file.write(header + data[HEADER.size : table])
        try:
            os.truncate(path, table + size + len(data) - table)
        except OSError:
            pytest.skip("no sparse files here")
        file.seek(table + size)
        rows = bytearray(data[table:])
        for index in range(len(rows) // SECTION.size):
            fields = list(SECTION.unpack_from(rows, index * SECTION.size))
            if fields[1] == 0x80000002:
                fields[5] = size
            SECTION.pack_into(rows, index * SECTION.size, *fields)
        file.write(rows)
    assert read_cuda_core(path).kernels[0].name == SPIN_NAME


SMALL = hung_core()


def test_a_core_cut_off_anywhere_is_refused_or_read() -> None:
    for size in range(0, len(SMALL), 11):
        assert read_or_refuse(SMALL[:size]) is None, size


@settings(max_examples=200)
@given(st.lists(st.tuples(st.integers(0, len(SMALL) - 1), st.integers(0, 255)), min_size=1, max_size=8))
def test_bytes_that_flipped_are_refused_or_read(flips: list[tuple[int, int]]) -> None:
    data = bytearray(SMALL)
    for position, value in flips:
        data[position] = value
    read_or_refuse(bytes(data))


def test_fuzzed_headers_and_tables_are_refused_or_read() -> None:
    """Numbers that are likely to hurt, where the format has numbers; the same ones each time."""
    dice = random.Random(20261121)
    hurting = (0, 1, 2, 0x7F, 0xFF, 0xFFFF, 1 << 31, (1 << 32) - 1, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
    table = int.from_bytes(SMALL[40:48], "little")
    outcomes = set()
    for _ in range(400):
        data = bytearray(SMALL)
        for _ in range(dice.randint(1, 3)):
            width = dice.choice((1, 2, 4, 8))
            # Half of them hit the section table or the header, the rest anything.
            start = dice.choice((0, table, 0)) if dice.random() < 0.5 else 0
            end = HEADER.size if start == 0 and dice.random() < 0.3 else len(data) - width
            position = dice.randrange(start, end)
            data[position : position + width] = (dice.choice(hurting) % (1 << 8 * width)).to_bytes(width, "little")
        outcomes.add(read_or_refuse(bytes(data)) is None)
    assert outcomes == {True, False}


def read_apart(path: Path, seconds: float = LONG) -> Reading:
    return wait_until(CoreReader(path, seconds).look, "the core is read")


def test_a_core_is_read_by_a_process_of_its_own(write: Write) -> None:
    told = read_apart(write(hung_core()))
    assert told.reason == ""
    assert told.core is not None
    assert told.core["kernels"][0]["entry"]["function"] == SPIN_NAME
    assert "warps" not in told.core
    assert told.brief == [f"kernel {SPIN_NAME} on GPU 0: grid 2x1x1, block 32x1x1, active, its name inferred"]


def test_what_cannot_be_read_is_told_of(tmp_path: Path) -> None:
    told = read_apart(tmp_path / "none")
    assert (told.core, told.brief) == (None, [])
    assert "cannot be opened: No such file or directory" in told.reason


def test_an_incident_keeps_no_more_than_it_needs(write: Write) -> None:
    sms = [SmSpec(number, exception=14) for number in range(300)]
    told = read_apart(write(core_bytes(CoreSpec([DeviceSpec(sms=sms)]))))
    assert told.core is not None
    assert len(told.core["faults"]) == 256
    assert told.core["notes"][-1] == "44 kernels and exceptions are left out here"


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("exec sleep 600", "its reader: py-spy did not end within 0.5 s"),
        ("exit 3", "its reader: py-spy ended with status 3"),
        ("kill -SEGV $$", "its reader: py-spy ended with status -11"),
        ("echo '[1, 2'", "its reader wrote no answer"),
        ("echo '{}'", "its reader wrote no answer"),
        ("echo '[]'", "its reader wrote no answer"),
        ("exec cat /dev/zero", "its reader: py-spy printed more than 0 MiB"),
    ],
)
def test_whatever_becomes_of_the_reader_there_is_an_answer(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, reason: str
) -> None:
    monkeypatch.setattr(sys, "executable", make_tool(tmp_path, script))
    monkeypatch.setattr(reading, "MAX_OUTPUT", 1000)
    seconds = 0.5 if "sleep" in script else LONG
    assert read_apart(write(hung_core()), seconds) == Reading(None, [], reason)


#: The program as it is, but for a core that takes all the memory there is.
GREEDY = (
    "import sys; from sglang_crashkit.capture.cuda_core import reading; "
    "reading.read_cuda_core = lambda path, max_seconds: bytearray(2 << 30); "
    "sys.exit(reading.main(sys.argv[1:]))"
)


def test_the_reader_has_little_memory(write: Write, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tool = make_tool(tmp_path, f'shift 2; exec "{sys.executable}" -c "{GREEDY}" "$@"')
    monkeypatch.setattr(sys, "executable", tool)
    assert "it takes more memory to read than 1024 MiB" in read_apart(write(hung_core())).reason
