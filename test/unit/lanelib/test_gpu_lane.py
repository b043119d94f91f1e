from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from lanelib.errors import LaneError
from lanelib.gpulanes import GpuLane
from lanelib.paths import ROOT


@pytest.fixture(scope="module")
def script() -> ModuleType:
    loader = importlib.machinery.SourceFileLoader("gpu_lane", str(ROOT / "scripts" / "gpu_lane"))
    spec = importlib.util.spec_from_loader("gpu_lane", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def run(script, monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["gpu_lane", *words])
    return script.main()


def test_without_a_gpu_it_says_what_can_be_done(script, monkeypatch):
    def no_device(without):
        raise LaneError("there is no CUDA device on this machine", next_step=without)

    monkeypatch.setattr(script, "require_device", no_device)
    for words in ([], ["run"], ["-k", "hung"]):
        with pytest.raises(LaneError, match="no CUDA device") as caught:
            run(script, monkeypatch, *words)
        assert str(caught.value.next_step).startswith("scripts/gpu_lane pack")


def test_what_is_not_its_own_goes_to_pytest(script, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["gpu_lane", "--out", "found", "-k", "hung", "--durations=5"])

    args, rest = script.parse()

    assert (args.command, args.out, rest) == ("run", Path("found"), ["-k", "hung", "--durations=5"])
    command = script.command_of(GpuLane("0.5.12.post1", False, Path("/lanes/gpu"), None), args.out, rest)
    assert command[:3] == ["/lanes/gpu/bin/python", "-m", "pytest"]
    assert command[-3:] == rest
    assert command[command.index("--gpu-lane") + 1] == "/lanes/gpu"
    assert Path(command[command.index("--gpu-out") + 1]).is_absolute()


def test_the_tests_get_no_switches_and_are_told_where_cuda_is(script, monkeypatch):
    for name in ("SGLANG_X", "CUDA_COREDUMP_FILE", "NCCL_DEBUG", "PYTHONPATH", "CUDA_HOME", "PATH"):
        monkeypatch.setenv(name, "/somewhere")

    names = set(script.environment())

    assert {"CUDA_HOME", "PATH"} <= names
    assert not names & {"SGLANG_X", "CUDA_COREDUMP_FILE", "NCCL_DEBUG", "PYTHONPATH"}


@pytest.mark.parametrize("version", ["3", "3.12.1", "three"])
def test_a_version_that_is_none_is_refused(script, monkeypatch, tmp_path, version):
    with pytest.raises(LaneError, match=r"no version such as 3\.12") as caught:
        run(script, monkeypatch, "pack", str(tmp_path / "out"), "--python", version)
    assert caught.value.exit_code == 2
    assert not (tmp_path / "out").exists()


def test_what_was_packed_is_unpacked(script, monkeypatch, tmp_path, capsys):
    wheel = tmp_path / "a-1-py3-none-any.whl"
    wheel.write_bytes(b"wheel")
    monkeypatch.setattr(script, "fetch_wheels", lambda release, folder, python, generation: [wheel])

    assert run(script, monkeypatch, "pack", str(tmp_path / "parts")) == 0
    assert capsys.readouterr().out.startswith(str(tmp_path / "parts" / "part.000"))
    assert run(script, monkeypatch, "unpack", str(tmp_path / "parts"), str(tmp_path / "wheels")) == 0
    assert (tmp_path / "wheels" / wheel.name).read_bytes() == b"wheel"


def test_an_argument_that_nothing_takes_is_named(script, monkeypatch, tmp_path):
    with pytest.raises(LaneError, match="unknown argument --fast"):
        run(script, monkeypatch, "unpack", str(tmp_path), str(tmp_path), "--fast")
