from __future__ import annotations

import os
import threading
import time
from pathlib import Path

from sglang_crashkit.capture.tool_run import run_tool
from sglang_crashkit.kernel import procfs
from unit.waiting import LONG, wait_until


def shell(script: str) -> list[str]:
    return ["sh", "-c", script]


def is_gone(pid: int) -> bool:
    stat = procfs.read_stat(pid)
    return stat is None or stat.state in "ZX"


def test_what_it_prints_on_either_stream_is_kept() -> None:
    run = run_tool(shell("echo one; echo two >&2"), LONG)
    assert (run.text, run.reason) == ("one\ntwo\n", "")


def test_a_failure_is_told_with_what_it_printed() -> None:
    run = run_tool(shell("echo why; exit 3"), LONG)
    assert (run.text, run.reason) == ("why\n", "sh ended with status 3")


def test_standard_error_is_kept_apart_where_that_is_asked_for() -> None:
    run = run_tool(shell("echo $WHO; echo two >&2; exit 3"), LONG, environ={"WHO": "one"}, apart=True)
    assert (run.text, run.errors, run.status) == ("one\n", "two\n", 3)


def test_one_that_cannot_be_run_is_said_to(tmp_path: Path) -> None:
    run = run_tool([str(tmp_path / "absent")], LONG)
    assert (run.text, run.reason) == ("", f"{tmp_path}/absent: No such file or directory")


def test_one_that_does_not_end_is_killed_with_its_children_and_what_it_printed_is_kept(tmp_path: Path) -> None:
    script = f"trap '' TERM INT; sleep 600 & echo $! > {tmp_path}/pid; echo first; while :; do sleep 1; done"
    started = time.monotonic()
    run = run_tool(shell(script), 2.0)
    assert time.monotonic() - started < LONG
    assert (run.text, run.reason) == ("first\n", "sh did not end within 2 s")
    child = int((tmp_path / "pid").read_text())
    wait_until(lambda: is_gone(child), "its child is killed")


def test_one_that_closed_its_output_and_does_not_end_is_killed() -> None:
    run = run_tool(shell("exec >&- 2>&-; sleep 600"), 1.0)
    assert run.reason == "sh did not end within 1 s"


def test_a_child_that_it_left_behind_is_killed_and_not_waited_for(tmp_path: Path) -> None:
    started = time.monotonic()
    run = run_tool(shell(f"sleep 600 & echo $! > {tmp_path}/pid; echo done"), LONG)
    assert time.monotonic() - started < LONG / 2
    assert (run.text, run.reason) == ("done\n", "")
    wait_until(lambda: is_gone(int((tmp_path / "pid").read_text())), "its child is killed")


def test_one_that_prints_for_ever_is_killed() -> None:
    run = run_tool(shell("exec yes"), LONG)
    assert run.reason == "sh printed more than 32 MiB"


def test_it_is_called_off() -> None:
    stop = threading.Event()
    timer = threading.Timer(0.3, stop.set)
    timer.start()
    run = run_tool(shell("echo first; sleep 600"), 2 * LONG, stop)
    timer.join(LONG)
    assert (run.text, run.reason) == ("first\n", "sh was called off")
    assert run.seconds < LONG


def test_ctrl_c_does_not_reach_it() -> None:
    run = run_tool(shell("read -r stat < /proc/$$/stat; echo $stat"), LONG)
    # Field 5 of proc_pid_stat(5) is the process group, to which a terminal sends SIGINT.
    assert int(run.text.split()[4]) != os.getpgrp()
