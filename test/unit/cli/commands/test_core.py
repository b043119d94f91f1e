from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from sglang_crashkit.capture.cuda_core.text import INFERRED
from sglang_crashkit.cli.main import main
from unit.capture.cuda_core.synthetic_core import COPY_NAME, SPIN_NAME, failed_core, hung_core

Output = pytest.CaptureFixture[str]


@pytest.fixture
def hung(tmp_path: Path) -> Path:
    path = tmp_path / "hung.core"
    path.write_bytes(hung_core())
    return path


def test_a_core_is_told_in_lines(hung: Path, capsys: Output) -> None:
    assert main(["core", str(hung)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "GPU 0: NVIDIA H200, sm_90, 132 SMs"
    assert lines[2] == f"kernel {SPIN_NAME} on GPU 0: grid 2x1x1, block 32x1x1, active"
    assert lines[-2] == INFERRED


def test_a_failure_is_told(tmp_path: Path, capsys: Output) -> None:
    path = tmp_path / "core"
    path.write_bytes(failed_core())
    assert main(["core", str(path)]) == 0
    assert f"exception: device illegal address at {COPY_NAME}+0x40 (GPU 0, SM 17)" in capsys.readouterr().out


def test_programs_get_json(hung: Path, capsys: Output) -> None:
    assert main(["core", str(hung), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    (core,) = document["cores"]
    assert (core["path"], core["kernels"][0]["grid_id"], len(core["warps"])) == (str(hung), 7, 1)


@pytest.mark.parametrize("kind", ["missing", "fifo", "text"])
def test_what_is_no_core_ends_with_1(tmp_path: Path, capsys: Output, kind: str) -> None:
    path = tmp_path / "core"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "text":
        path.write_text("no core")
    assert main(["core", str(path), "--json"]) == 1
    captured = capsys.readouterr()
    assert str(path) in json.loads(captured.out)["error"]
    assert captured.err.startswith(f"sglang-crashkit core: {path}")
