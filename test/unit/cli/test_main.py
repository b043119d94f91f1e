from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

import sglang_crashkit
from sglang_crashkit.cli import incidents, main
from sglang_crashkit.cli.main import COMMANDS
from sglang_crashkit.errors import (
    CrashkitError,
    ExitCode,
    NothingToDoError,
    PartialError,
    RefusedError,
    UsageError,
)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main.main([command, "--help"])
    out = capsys.readouterr().out
    assert f"usage: sglang-crashkit {command}" in out
    assert f"\n  sglang-crashkit {command} " in out or f"\n  sglang-crashkit {command}\n" in out, "there is an example"


def test_the_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main.main(["--help"])
    listed = capsys.readouterr().out
    assert [command for command in COMMANDS if not re.search(rf"\n    {command}\s", listed)] == []


@pytest.mark.parametrize("arguments", [[], ["absent"], ["core"], ["incidents", "x", "--absent"]])
def test_arguments_that_make_no_sense_end_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main.main(arguments)
    assert "usage: sglang-crashkit" in capsys.readouterr().err


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main.main(["--version"])
    assert capsys.readouterr().out == f"sglang-crashkit {sglang_crashkit.__version__}\n"


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (CrashkitError, 1),
        (UsageError, 2),
        (NothingToDoError, 3),
        (RefusedError, 4),
        (PartialError, 5),
    ],
)
def test_an_error_ends_with_its_status_and_names_the_next_step(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: type[CrashkitError], status: int
) -> None:
    def fail(_args: object) -> ExitCode:
        raise error("what happened", next_step="do this")

    monkeypatch.setattr(incidents, "run", fail)
    assert main.main(["incidents", "x"]) == status
    captured = capsys.readouterr()
    assert captured.err == "sglang-crashkit incidents: what happened\n  next: do this\n"
    assert captured.out == ""
    assert main.main(["incidents", "x", "--json"]) == status
    assert json.loads(capsys.readouterr().out) == {"error": "what happened", "next": "do this", "exit_code": status}


def test_an_error_without_a_next_step_is_one_line() -> None:
    assert str(CrashkitError("what happened")) == "what happened"


def test_an_interrupt_ends_with_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(_args: object) -> ExitCode:
        raise KeyboardInterrupt

    monkeypatch.setattr(incidents, "run", interrupt)
    assert main.main(["incidents", "x"]) == 130
    assert "interrupted" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["incidents", "--help"], ["--help"], ["status"]])
def test_a_closed_pipe_is_no_traceback(arguments: list[str]) -> None:
    reads, writes = os.pipe()
    os.close(reads)
    command = [sys.executable, "-m", "sglang_crashkit", *arguments]
    done = subprocess.run(command, stdout=writes, stderr=subprocess.PIPE, timeout=30, check=False)
    os.close(writes)
    assert b"Traceback" not in done.stderr
    assert b"Broken" not in done.stderr


def test_the_module_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "sglang_crashkit", "--version"], capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stdout == f"sglang-crashkit {sglang_crashkit.__version__}\n"
