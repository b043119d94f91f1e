from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from sglang_crashkit.capture.tools import run_tool
from unit.support.targets import is_gone
from unit.support.waiting import LONG, wait_until


def shell(script: str) -> list[str]:
    return ["sh", "-c", script]


@pytest.mark.parametrize(
    ("script", "seconds", "text", "reason"),
    [
        ("echo one; echo two >&2", LONG, "one\ntwo\n", ""),
        ("echo why; exit 3", LONG, "why\n", "sh ended with status 3"),
        ("kill -SEGV $$", LONG, "", "sh ended with status -11"),
        ("exec >&- 2>&-; sleep 600", 0.3, "", "sh did not end within 0.3 s"),
        (None, LONG, "", "/no/such: No such file or directory"),
    ],
)
def test_output_is_kept_with_the_reason_why_it_is_partial(
    script: str | None, seconds: float, text: str, reason: str
) -> None:
    run = run_tool(shell(script) if script else ["/no/such"], seconds)
    assert (run.text, run.reason) == (text, reason)


def test_a_tool_is_what_is_killed_where_memory_runs_out() -> None:
    # What it starts is, too.
    script = "read started; sh -c 'cat /proc/self/oom_score_adj'"
    reader, writer = os.pipe()
    try:
        run = run_tool(shell(script), LONG, on_start=lambda _pid: os.write(writer, b"\n"), stdin=reader)
    finally:
        os.close(reader)
        os.close(writer)
    assert run.text == "1000\n"


def test_a_child_left_behind_is_killed_without_a_wait(tmp_path: Path) -> None:
    run = run_tool(shell(f"sleep 600 & echo $! > {tmp_path}/pid; echo done"), LONG)
    assert (run.text, run.reason) == ("done\n", "")
    wait_until(lambda: is_gone(int((tmp_path / "pid").read_text())), "its child is killed")


def test_it_is_called_off(tmp_path: Path) -> None:
    stop = threading.Event()

    def call_off(_pid: int) -> None:
        wait_until((tmp_path / "begun").exists, "it has begun")
        stop.set()

    run = run_tool(shell(f"echo first; touch {tmp_path}/begun; sleep 600"), 2 * LONG, stop, on_start=call_off)
    assert (run.text, run.reason) == ("first\n", "sh was called off")
    assert run.seconds < LONG


def test_one_that_ended_before_anybody_looked_was_in_time() -> None:
    """A busy machine may give the reader no processor until the time is over."""

    def look_late(pid: int) -> None:
        wait_until(lambda: is_gone(pid), "it has ended")

    run = run_tool(shell("echo all"), LONG, since=time.monotonic() - 2 * LONG, on_start=look_late)
    assert (run.text, run.reason, run.status) == ("all\n", "", 0)


def test_ctrl_c_does_not_reach_it() -> None:
    run = run_tool(shell("read -r stat < /proc/$$/stat; echo $stat"), LONG)
    # Field 5 of proc_pid_stat(5) is the process group, to which a terminal sends SIGINT.
    assert int(run.text.split()[4]) != os.getpgrp()
