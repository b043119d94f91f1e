from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lanelib.commands import NO_END, clean_environment, exclusive, run_command, run_in_terminal
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


class Endless:
    """A process that does not end before it gets the signal that `ends_by` names."""

    def __init__(self, ends_by: str) -> None:
        self.ends_by = ends_by
        self.told: list[str] = []

    def wait(self, timeout: float) -> int:
        if self.ends_by not in self.told:
            raise subprocess.TimeoutExpired("pytest", timeout)
        return 0

    def send_signal(self, number: signal.Signals) -> None:
        self.told.append(number.name)

    def kill(self) -> None:
        self.told.append("SIGKILL")


@pytest.mark.parametrize(("ends_by", "told"), [("SIGINT", ["SIGINT"]), ("SIGKILL", ["SIGINT", "SIGKILL"])])
def test_a_check_that_does_not_end_is_interrupted_and_then_killed(monkeypatch, capsys, ends_by, told):
    process = Endless(ends_by)
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **options: process)

    assert run_in_terminal(["pytest"], timeout_s=3, env={}) == NO_END
    assert process.told == told
    assert capsys.readouterr().err == "no end after 3 s: pytest\n"


def test_a_checks_exit_status_is_returned():
    assert run_in_terminal([sys.executable, "-c", "raise SystemExit(5)"], timeout_s=30, env=os.environ) == 5


def test_clean_environment_drops_what_misleads_a_child_python(monkeypatch):
    for name in ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "SGLANG_X", "SGLANG_Y_Z", "KEPT"):
        monkeypatch.setenv(name, "1")

    assert {"SGLANG_X", "KEPT"} <= clean_environment().keys()
    env = clean_environment(without=("SGLANG_",), kept=("SGLANG_Y",))
    assert {"SGLANG_Y_Z", "KEPT"} <= env.keys()
    assert not {"PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "SGLANG_X"} & env.keys()


def test_one_holder_at_a_time_has_a_lock(tmp_path):
    with (tmp_path / "lock").open("a") as other:
        with exclusive(tmp_path / "lock"), pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_run_script_prints_the_error_and_returns_its_exit_code(capsys):
    def fail():
        raise LaneError("no disk", next_step="buy one", exit_code=2)

    assert run_script("lane", fail) == 2
    assert capsys.readouterr().err == "lane: no disk\n  next: buy one\n"
