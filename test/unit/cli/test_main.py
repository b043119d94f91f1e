from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

import sglang_crashkit
from sglang_crashkit.cli.commands import incidents
from sglang_crashkit.cli.main import COMMANDS
from sglang_crashkit.errors import (
    CrashkitError,
    ExitCode,
    NothingToDoError,
    PartialError,
    RefusedError,
    UsageError,
)
from unit.support.command import Cli
from unit.support.waiting import LONG


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, cli: Cli) -> None:
    out = cli(command, "--help").out
    assert f"usage: sglang-crashkit {command}" in out
    assert f"\n  sglang-crashkit {command} " in out or f"\n  sglang-crashkit {command}\n" in out, "there is an example"
    assert out.rstrip().endswith("130 interrupted, 143 ended by SIGTERM"), "its exit statuses are told"


#: What takes long to load; a command does it when it runs.
HEAVY = ("psutil", "yaml", "jinja2", "sglang_crashkit.analysis", "sglang_crashkit.capture")


def test_no_command_loads_much_before_it_runs() -> None:
    code = "import argparse, json, sys; from sglang_crashkit.cli import main\n"
    code += "for name in main.COMMANDS: main.load_command(name).configure(argparse.ArgumentParser())\n"
    code += "print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LONG, check=True)
    assert set(HEAVY) & set(json.loads(done.stdout)) == set()


def test_the_help_names_every_command_and_every_exit_status(cli: Cli) -> None:
    listed, _mark, statuses = cli("--help").out.partition("exit status:")
    assert [command for command in COMMANDS if not re.search(rf"\n    {command}\s", listed)] == []
    assert "\n  sglang-crashkit collect  " in listed, "there is an example"
    assert {int(number) for number in re.findall(r"\b(\d+) [a-z]", statuses)} == {int(status) for status in ExitCode}


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["collect", "--wait-seconds=soon"], "--wait-seconds: 'soon' is not a number of seconds"),
        (["collect", "--wait-seconds=1e7"], "'1e7' is not a number of seconds from 0 to 10000000"),
        (["collect", "--interval=nan"], "--interval: 'nan' is not a number of seconds"),
        (["collect", "--snapshots=0"], "--snapshots: '0' is not a whole number of 1 or more"),
        (["collect", "--fan-out=x"], "--fan-out: 'x' is not a whole number of 1 or more"),
        (["incidents", "--since=2w"], "--since: '2w' is no time such as 30s, 90m, 12h or 2d"),
        (["incidents", "--since=d"], "--since: 'd' is no time such as 30s, 90m, 12h or 2d"),
    ],
)
def test_a_value_that_makes_no_sense_is_named(arguments: list[str], why: str, cli: Cli) -> None:
    assert why in cli(*arguments, status=2).err


@pytest.mark.parametrize("arguments", [[], ["absent"], ["core"], ["incidents", "x", "--absent"]])
def test_arguments_that_make_no_sense_end_with_2(arguments: list[str], cli: Cli) -> None:
    assert "usage: sglang-crashkit" in cli(*arguments, status=2).err


def test_an_unknown_option_gets_the_usage_of_its_command(cli: Cli) -> None:
    assert cli("steps", "x", "--absent", status=2).err.startswith("usage: sglang-crashkit steps ")


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
def test_an_error_has_its_status_and_names_the_next_step(
    monkeypatch: pytest.MonkeyPatch, cli: Cli, error: type[CrashkitError], status: int
) -> None:
    def fail(_args: object) -> ExitCode:
        raise error("what happened", next_step="do this")

    monkeypatch.setattr(incidents, "run", fail)
    told = "sglang-crashkit incidents: what happened\n  next: do this\n"
    assert cli("incidents", "x", status=status) == ("", told, status)
    document = cli("incidents", "x", "--json", status=status).json
    assert document == {"error": "what happened", "next": "do this", "exit_code": status}


@pytest.mark.parametrize("command", ["explain", "show", "bundle"])
def test_what_the_system_refuses_is_one_error_that_names_the_thing(command: str, cli: Cli) -> None:
    said = cli(command, f"./{'a' * 5000}/x", status=ExitCode.FAILED).err
    assert "File name too long" in said
    assert "\n  next: ls -ld " in said
    assert "Traceback" not in said


def end_by_sigterm(_args: object) -> ExitCode:
    os.kill(os.getpid(), signal.SIGTERM)
    signal.pause()
    return ExitCode.DONE


def interrupt(_args: object) -> ExitCode:
    raise KeyboardInterrupt


@pytest.mark.parametrize(("run", "status"), [(end_by_sigterm, 143), (interrupt, 130)])
def test_a_signal_ends_every_command(
    monkeypatch: pytest.MonkeyPatch, cli: Cli, run: Callable[[object], ExitCode], status: int
) -> None:
    monkeypatch.setattr(incidents, "run", run)
    assert "interrupted" in cli("incidents", "x", status=status).err


def test_the_module_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "sglang_crashkit", "--version"], capture_output=True, text=True, timeout=LONG, check=True
    )
    assert done.stdout == f"sglang-crashkit {sglang_crashkit.__version__}\n"
