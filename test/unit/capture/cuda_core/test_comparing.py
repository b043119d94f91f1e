from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_crashkit.capture.cuda_core.comparing import Comparison, compare
from sglang_crashkit.capture.cuda_core.model import CudaCore
from sglang_crashkit.capture.cuda_core.reading import read_cuda_core
from sglang_crashkit.errors import UsageError
from unit.synthetic_core import SPIN, CoreSpec, DeviceSpec, GridSpec, core_bytes, hung_core

Write = Callable[[bytes], Path]


@pytest.fixture
def read(write: Write) -> Callable[[bytes], CudaCore]:
    return lambda data: read_cuda_core(write(data))


def told(comparison: Comparison) -> tuple[str, str, list[tuple[int, str, str]]]:
    kernels = [(one.grid_id, one.outcome, one.level) for one in comparison.kernels]
    return comparison.outcome, comparison.level, kernels


def test_a_kernel_that_does_not_move_is_stuck(read: Callable[[bytes], CudaCore]) -> None:
    comparison = compare(read(hung_core()), read(hung_core()))
    assert told(comparison) == ("stuck", "supported", [(7, "stuck", "supported")])
    assert comparison.kernels[0].text == (
        "spin_kernel(int volatile*) (grid 7) was at the same places in both cores with all its 1 warps"
    )
    assert json.loads(json.dumps(comparison.to_json()))["kernels"][0]["outcome"] == "stuck"


def test_a_kernel_that_moves_goes_on_or_spins(read: Callable[[bytes], CudaCore]) -> None:
    comparison = compare(read(hung_core(0x110)), read(hung_core(0x120)))
    assert told(comparison) == ("progressing", "supported", [(7, "progressing", "supported")])
    assert "moved with 1 of its 1 warps, if only in a loop" in comparison.kernels[0].text


def test_a_kernel_with_other_blocks_goes_on(read: Callable[[bytes], CudaCore]) -> None:
    comparison = compare(read(hung_core(block=0)), read(hung_core(block=1)))
    assert told(comparison) == ("progressing", "established", [(7, "progressing", "established")])


def test_another_launch_of_the_same_kernel_is_another_kernel(read: Callable[[bytes], CudaCore]) -> None:
    comparison = compare(read(hung_core(grid_id=7)), read(hung_core(grid_id=9)))
    kernels = [(7, "ended", "established"), (9, "started", "established")]
    assert told(comparison) == ("progressing", "established", kernels)


def test_without_warps_nothing_is_said(read: Callable[[bytes], CudaCore]) -> None:
    core = read(core_bytes(CoreSpec([DeviceSpec([GridSpec(7, SPIN)])])))
    assert told(compare(core, core)) == ("unknown", "unknown", [(7, "unknown", "unknown")])


def test_cores_of_different_gpus_are_not_compared(read: Callable[[bytes], CudaCore]) -> None:
    two = read(core_bytes(CoreSpec([DeviceSpec(), DeviceSpec()])))
    with pytest.raises(UsageError, match="of different GPUs"):
        compare(read(hung_core()), two)
