"""GPU cores, read by NVIDIA's own cuda-gdb, and by stand-ins for one that misbehaves."""

from __future__ import annotations

import gzip
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_crashkit.capture.cuda_core.reading import CudaCoreError, core_in_lines, parse, read_cuda_core
from sglang_crashkit.cli.main import main
from unit.capture.cuda_core.synthetic_core import core_bytes
from unit.support.targets import is_gone, make_tool
from unit.support.waiting import LONG, wait_until

Output = pytest.CaptureFixture[str]
TABLE = """\
Opening GPU coredump: core
[Current focus set to CUDA kernel 0, grid 7, cluster (0,0,0), block (1,0,0), thread (0,0,0), device 0, sm 0, warp 3]
#0  0x00007fffd0000110 in flash_fwd<128, true>(Params)<<<(2,1,1),(32,1,1)>>> (params=...)
== devices
  Dev PCI Bus/Dev ID        Name Description SM Type SMs Warps/SM Lanes/Warp Max Regs/Lane Active SMs Mask
*   0        1b:00.0 NVIDIA H200       GH100   sm_90   4       64         32           255      0x00000001
== kernels
  Kernel Parent Dev Grid Status   SMs Mask GridDim BlockDim Invocation
*      0      -   0    7 Active 0x00000001 (2,1,1) (32,1,1) (1,1,1) flash_fwd<128, true>(params={q = 0x7f, n = 8})
"""


@pytest.fixture
def core(tmp_path: Path) -> Path:
    path = tmp_path / "core.cuda"
    path.write_bytes(H200_CORE)
    return path


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Put a cuda-gdb on PATH that runs this."""

    def make(script: str) -> None:
        make_tool(tmp_path / "bin", script, "cuda-gdb")
        monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)

    return make


#: What the driver 580.159.04 wrote of a kernel with debug information that stored where nothing is; only the path of
#: its source is another.
H200_CORE = gzip.decompress((Path(__file__).parent / "h200_illegal_address.core.gz").read_bytes())
IN_LINES = [
    "GPU 0: NVIDIA H200, sm_90, 132 SMs",
    "kernel scatter_rows() on GPU 0: grid 2x1x1, block 32x1x1, active, grid id 1",
    "exception: Warp Illegal Address at 0x7f1ae37a04d0 in scatter_rows"
    "(in=0x7f1adbe00000, out=0x7f1adbe00200, n=64, shift=1099511627776) "
    "(grid 1, block (0,0,0), device 0, sm 124, warp 0)",
]


@pytest.mark.usefixtures("cuda_gdb")
def test_a_core_is_told_in_lines(tmp_path: Path, capsys: Output) -> None:
    # What is in a file's name is no command of the debugger.
    path = tmp_path / "core cuda\nshell touch 'harm'"
    path.write_bytes(H200_CORE)
    assert main(["core", str(path)]) == 0
    assert capsys.readouterr().out.splitlines() == IN_LINES
    assert [one.name for one in tmp_path.iterdir()] == [path.name]


@pytest.mark.usefixtures("cuda_gdb")
def test_programs_get_json(core: Path, capsys: Output) -> None:
    assert main(["core", str(core), "--json"]) == 0
    (told,) = json.loads(capsys.readouterr().out)["cores"]
    assert (told["path"], told["devices"][0]["sm_type"], told["kernels"][0]["grid_id"]) == (str(core), "sm_90", 1)
    assert (told["focus"]["exception"], told["focus"]["places"]["warp"]) == ("Warp Illegal Address", "0")


@pytest.mark.usefixtures("cuda_gdb")
@pytest.mark.parametrize(
    ("data", "why"),
    [
        (core_bytes(), "cannot be read by cuda-gdb: "),
        (H200_CORE[:-1], "is no whole GPU core"),
        (b"text", "is no whole GPU core"),
        (None, "is no whole GPU core"),
    ],
    ids=["says nothing", "cut off", "text", "fifo"],
)
def test_a_damaged_core_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes | None, why: str
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "core.cuda"
    path.write_bytes(data) if data is not None else os.mkfifo(path)
    with pytest.raises(CudaCoreError, match=rf"core\.cuda {why}"):
        read_cuda_core(path)
    # cuda-gdb leaves no core of its own behind.
    assert [one.name for one in tmp_path.iterdir()] == [path.name]


def test_without_cuda_gdb_the_package_is_named(core: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    monkeypatch.setattr("sglang_crashkit.capture.debugger.TOOLKITS", ())
    monkeypatch.setattr("os.environ", {"PATH": "/nonexistent"})
    assert main(["core", str(core), "--json"]) == 1
    captured = capsys.readouterr()
    assert json.loads(captured.out)["error"] == f"cuda-gdb, which reads {core}, is not installed"
    assert "next: apt-get install cuda-gdb-13-0 (NVIDIA's packages)" in captured.err


def test_it_has_a_folder_of_its_own_and_no_servers_of_symbols(
    core: Path, tmp_path: Path, stand_in: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEBUGINFOD_URLS", "http://127.0.0.1:9/")
    (tmp_path / "table").write_text(TABLE)
    # It is limited while it starts.
    limited = 'while [ "$(ulimit -c)" != 0 ]; do sleep 0.01; done'
    stand_in(
        f'{limited}; echo "folder $TMPDIR $(stat -c %a "$TMPDIR") servers <$DEBUGINFOD_URLS>"; cat {tmp_path}/table'
    )
    own = tmp_path / "own"
    own.mkdir()
    text = read_cuda_core(core, folder=own).text
    assert text.startswith(f"folder {own}/cuda-gdb-")
    assert " 700 servers <>\n" in text
    assert list(own.iterdir()) == []


def test_one_that_hangs_is_killed_with_its_children_and_what_it_said_is_kept(
    core: Path, tmp_path: Path, stand_in: Callable[[str], None]
) -> None:
    (tmp_path / "table").write_text(TABLE)
    stand_in(f"trap '' TERM INT; sleep 600 & echo $! > {tmp_path}/child; cat {tmp_path}/table; wait")
    began = time.monotonic()
    told = read_cuda_core(core, 2.0)
    assert time.monotonic() - began < LONG
    assert list(core_in_lines(told))[-1] == "that is not all: cuda-gdb did not end within 2 s"
    # Killed with the others, it may take a moment to end.
    wait_until(lambda: is_gone(int((tmp_path / "child").read_text())), "its child is gone")


def test_one_that_prints_for_ever_is_ended(core: Path, stand_in: Callable[[str], None]) -> None:
    stand_in("exec yes")
    with pytest.raises(CudaCoreError, match="cuda-gdb printed more than 1 MiB"):
        read_cuda_core(core)


SECOND = """\
== devices
    1        1c:00.0 NVIDIA H200       GH100   sm_90   8       64         32           255      0x00000001
== kernels
       1      -   1    9 Active 0x00000001 (8,2,1) (64,1,1) (1,1,1) copy_kernel()
"""


def test_every_gpu_and_kernel_is_told_with_its_parameters() -> None:
    core = parse(TABLE + SECOND)
    assert [(one.number, one.sms) for one in core.devices] == [(0, 4), (1, 8)]
    assert [(one.device, one.grid_id, one.grid, one.call) for one in core.kernels] == [
        (0, 7, "2x1x1", "flash_fwd<128, true>(params={q = 0x7f, n = 8})"),
        (1, 9, "8x2x1", "copy_kernel()"),
    ]
    assert list(core_in_lines(core))[-1] == (
        "a thread at 0x00007fffd0000110 in flash_fwd<128, true>(Params) (grid 7, block (1,0,0), device 0, sm 0, warp 3)"
    )
    idle = parse("Opening GPU coredump: core\n== devices" + TABLE.partition("== devices")[2].partition("== ")[0])
    assert (len(idle.devices), list(core_in_lines(idle))) == (1, ["no kernel on the GPU"])


def test_names_in_a_core_move_no_cursor() -> None:
    core = parse(TABLE.replace("H200", "\x1b[2J\r").replace("params=", "\x9b31m\u202e"))
    told = "".join(core_in_lines(core)) + core.devices[0].name + core.text
    assert told.replace("\n", "").isprintable()


@pytest.mark.wide
@pytest.mark.parametrize(
    "line",
    [
        "*   0        1b:00.0 " + " a" * 500_000,
        "*   0        1b:00.0 " + " " * 1_000_000,
        "*      0      -   0    7 Active 0x00000001 " + "(1,1,1) " * 125_000,
        "[Current focus set to CUDA kernel" + " grid (1,1,1" * 80_000,
        "#0  " + "0x1 in " * 140_000,
    ],
)
def test_the_worst_line_costs_no_time(line: str) -> None:
    opening, devices, kernels = TABLE.split("== ")
    text = "== ".join([f"{opening}{line}\n", f"{devices}{line}\n", f"{kernels}{line}\n"])
    began = time.process_time()
    parse(text)
    assert time.process_time() - began < 1.0
