from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from sglang_crashkit.capture.cuda_core.model import (
    SCHEMA_VERSION,
    CudaCore,
    Place,
    Warp,
    exception_in_words,
    status_in_words,
)
from sglang_crashkit.capture.cuda_core.reading import read_cuda_core
from sglang_crashkit.capture.cuda_core.text import INFERRED, UNCHECKED, brief, format_core
from unit.capture.cuda_core.synthetic_core import (
    COPY_NAME,
    CUBIN,
    SPIN,
    SPIN_NAME,
    SPIN_SYMBOL,
    CoreSpec,
    DeviceSpec,
    GridSpec,
    SmSpec,
    core_bytes,
    failed_core,
    hung_core,
)

Write = Callable[[bytes], Path]


def lines_of(path: Path) -> list[str]:
    return list(format_core(read_cuda_core(path)))


def test_a_hung_kernel_in_words(write: Write) -> None:
    assert lines_of(write(hung_core())) == [
        "GPU 0: NVIDIA H200, sm_90, 132 SMs",
        "driver 580.65, CUDA 13.0, written 2026-11-18T11:06:40Z",
        f"kernel {SPIN_NAME} on GPU 0: grid 2x1x1, block 32x1x1, active",
        "    grid id 7, 1 block and 1 warp on the GPU, launched by host thread 4711",
        f"    1 warp at {SPIN_NAME}+0x110",
        INFERRED,
        f"its metadata: {UNCHECKED}",
    ]


def test_a_failure_in_words(write: Write) -> None:
    assert lines_of(write(failed_core()))[2:] == [
        "no kernel on the GPU",
        f"exception: device illegal address at {COPY_NAME}+0x40 (GPU 0, SM 17)",
        INFERRED,
        f"exceptions of an SM alone, its metadata: {UNCHECKED}",
    ]


def test_names_are_shortened_and_printable(write: Write) -> None:
    name = "evil\x1b[2J" + "n" * 500
    device = DeviceSpec([GridSpec(1, SPIN)], name="NVIDIA\x1b[2J", sm_type="")
    spec = CoreSpec([device], [{name: CUBIN[SPIN_SYMBOL]}])
    assert lines_of(write(core_bytes(spec)))[0] == "GPU 0: NVIDIA?[2J, sm_90, 132 SMs"
    kernel = next(line for line in lines_of(write(core_bytes(spec))) if line.startswith("kernel"))
    assert "evil?[2Jnnn" in kernel
    assert "nnn..." in kernel
    assert len(kernel) < 300


def test_many_exceptions_are_counted(write: Write) -> None:
    spec = CoreSpec([DeviceSpec(sms=[SmSpec(number, exception=14) for number in range(100)])])
    found = [line for line in lines_of(write(core_bytes(spec))) if "exception" in line and UNCHECKED not in line]
    assert len(found) == 17
    assert found[-1] == "84 more exceptions"


def test_in_short_it_is_kernels_and_exceptions(write: Write) -> None:
    grids = [GridSpec(number, SPIN) for number in range(6)]
    device = DeviceSpec(grids, [SmSpec(number, exception=14) for number in range(6)])
    lines = list(brief(read_cuda_core(write(core_bytes(CoreSpec([device]))))))
    assert [line.split()[0] for line in lines] == ["kernel"] * 4 + ["2"] + ["exception:"] * 4 + ["2", "it"]
    assert lines[0] == f"kernel at {SPIN:#x} on GPU 0: grid 1x1x1, block 32x1x1, active, {UNCHECKED}"
    assert lines[5] == f"exception: warp illegal address (GPU 0, SM 0), {UNCHECKED}"
    assert (lines[4], lines[9]) == ("2 more kernels", "2 more exceptions")
    assert lines[10].startswith("it holds no relocated cubin")


WARPS = tuple(Warp(0, 0, number, 7, (0, 0, 0), ((pc, 32),)) for number, pc in enumerate((0x20, 0x10, 0x20, 0x30)))


def test_codes_have_words() -> None:
    assert exception_in_words(14) == "warp illegal address"
    assert exception_in_words(999) == "exception 999"
    assert (status_in_words(2), status_in_words(999)) == ("active", "")


def test_it_becomes_json() -> None:
    core = CudaCore((), (), (), WARPS, ((Place(0x20, "spin", 4), 2),), "580.65", "13.0", None, True, (), ())
    document = json.loads(json.dumps(core.to_json()))
    assert document["schema_version"] == SCHEMA_VERSION
    assert document["hot"] == [{"address": 0x20, "function": "spin", "offset": 4, "symbol": None, "warps": 2}]
    assert len(document["warps"]) == 4
    assert "warps" not in core.to_json(warps=False)
