from __future__ import annotations

import argparse
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_crashkit.cli.commands import watch
from sglang_crashkit.errors import ExitCode
from unit.cli.conftest import GDB, native_stack
from unit.support.targets import TITLE


class Told:
    """Takes what is told, and whether the debugger had run by then."""

    def __init__(self, ran: Path) -> None:
        self.events: list[tuple[str, str, dict[str, Any]]] = []
        self.after_debugger: list[bool] = []
        self._ran = ran
        self.options: list[str] = []

    def __call__(self, kind: str, text: str, **more: Any) -> None:
        self.events.append((kind, text, more))
        self.after_debugger.append(self._ran.exists())

    @property
    def kinds(self) -> list[str]:
        return [kind for kind, _text, _more in self.events]


@pytest.fixture
def told(gdb: Path) -> Told:
    return Told(gdb.with_name("cuda-gdb.ran"))


def capture(pid: int, output: Path, told: Told, *, native: bool = True) -> ExitCode:
    parser = argparse.ArgumentParser()
    watch.configure(parser)
    told.options = ["--snapshots", "1", "--output-dir", str(output), "--json", *(["--native"] if native else [])]
    command = watch._Watch(parser.parse_args(["--url", "http://127.0.0.1:1", *told.options]), 2.0)
    command._server = SimpleNamespace(pid=pid)  # type: ignore[assignment]
    command._tell = told  # type: ignore[method-assign]
    return command._capture_hang()


def test_the_verdict_is_told_before_the_debugger_runs(rank: int, tmp_path: Path, told: Told) -> None:
    assert capture(rank, tmp_path / "out", told) == ExitCode.DONE
    assert told.kinds == ["snapshots", "verdict", "native_stacks"]
    assert told.after_debugger == [False, False, True]
    (_kind, text, snapshots), _verdict, (_other, native_text, native) = told.events
    assert text.startswith(f"1 snapshots of 1 processes in {tmp_path}/out/")
    folder = Path(snapshots["output_dir"])
    assert snapshots["missing"] == []
    # It printed no stack; its file says so.
    assert native_text == f"native stacks of 0 processes in {folder}; none of {TITLE}"
    assert native["files"] == [f"cudagdb_{os.uname().nodename}_{rank}.txt"]
    account = {"summary.md", "verdict.json"}
    assert {one.name for one in folder.iterdir()} == {*snapshots["files"], *native["files"], *account}


def test_a_verdict_that_native_stacks_change_is_told_again(rank: int, tmp_path: Path, told: Told, gdb: Path) -> None:
    (tmp_path / "listing").write_text(native_stack(rank))
    gdb.write_text(f"{GDB}cat {tmp_path}/listing\n")
    capture(rank, tmp_path / "out", told)
    assert told.kinds == ["snapshots", "verdict", "native_stacks", "verdict"]
    first, second = (more for kind, _text, more in told.events if kind == "verdict")
    assert told.events[1][1] != told.events[3][1]
    assert first.keys() == second.keys() == {"level", "explanation"}


def test_a_folder_lost_while_the_debugger_runs_is_told(rank: int, tmp_path: Path, told: Told, gdb: Path) -> None:
    output = tmp_path / "out"
    gdb.write_text(f"{GDB}mv {output} {output}.moved\n")
    capture(rank, output, told)
    assert told.kinds == ["snapshots", "verdict", "problem"]
    assert told.events[-1][1].startswith(f"no native stacks in {output}/")
