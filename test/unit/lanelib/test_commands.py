from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from lanelib.commands import clean_environment, run_command
from lanelib.errors import LaneError, run_script


def test_run_command_returns_what_was_printed():
    assert run_command([sys.executable, "-c", "print('so')"], timeout_s=30) == "so\n"


def test_run_command_repeats_the_end_of_what_a_failed_program_printed():
    source = "import sys; print(*range(100), sep='\\n'); sys.exit(7)"

    with pytest.raises(LaneError, match="exit status 7") as caught:
        run_command([sys.executable, "-c", source], timeout_s=30)

    assert caught.value.message.splitlines()[-15:] == [str(number) for number in range(85, 100)]


def test_run_command_names_a_program_that_is_not_there(programs):
    with pytest.raises(LaneError) as caught:
        run_command(["no-such-program"], timeout_s=5)

    assert str(caught.value) == "cannot run no-such-program: No such file or directory\n  next: install no-such-program"


def test_run_command_kills_children_at_its_deadline(tmp_path):
    child_pid = tmp_path / "pid"
    source = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "open(sys.argv[1], 'w').write(str(child.pid))\n"
        "time.sleep(60)\n"
    )

    with pytest.raises(LaneError, match="no end after 2 s"):
        run_command([sys.executable, "-c", source, child_pid], timeout_s=2)

    assert _is_gone(int(child_pid.read_text()))


def _is_gone(pid: int) -> bool:
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


def test_clean_environment_drops_what_misleads_a_child_python(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setenv("KEPT", "1")

    env = clean_environment()

    assert "PYTHONPATH" not in env
    assert "PYTHONDONTWRITEBYTECODE" not in env
    assert env["KEPT"] == os.environ["KEPT"]


def test_run_script_prints_the_error_and_returns_its_exit_code(capsys):
    def fail():
        raise LaneError("no disk", next_step="buy one", exit_code=2)

    assert run_script("lane", fail) == 2
    assert capsys.readouterr().err == "lane: no disk\n  next: buy one\n"
