from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from sglang_crashkit.capture.native_stacks import obstacle_of
from sglang_crashkit.capture.pyspy import EXECUTABLE_VARIABLE
from sglang_crashkit.capture.tool_guard import ToolGuard, guard
from sglang_crashkit.kernel import procfs
from unit.targets import PTRACE, SLEEPER, settle, settle_in_sleep, start_ticks, state_of
from unit.waiting import child, wait_until

#: Runs a tool on a process: the tool's file, then pid and start time.
RUNNER = """
from sglang_crashkit.capture.debugger import Debugger, debug_all, substitute
processes = {int(sys.argv[2]): int(sys.argv[3])}
ready()
"""
#: cuda-gdb; py-spy, which finds for gdb what to read; py-spy where there is neither.
WAYS = {
    "cuda-gdb": 'debug_all(Debugger("cuda-gdb", sys.argv[1]), processes, 600, print)',
    "before gdb": 'debug_all(Debugger("gdb", "/nonexistent/gdb"), processes, 600, print)',
    "in its place": "substitute(processes, 600)",
}
#: A tool that holds its target stopped, and one that left a stop ahead of it and does not end either.
HOLDS = PTRACE + "attach(int(sys.argv[1])); os.waitpid(int(sys.argv[1]), 0x40000000); told(); time.sleep(600)\n"
LEFT_STOPPED = "import os, signal, sys, time; os.kill(int(sys.argv[1]), signal.SIGSTOP); told(); time.sleep(600)\n"


def make_tool(folder: Path, code: str) -> str:
    told = f"def told(): open({str(folder)!r} + '/tool.pid', 'w').write(str(os.getpid()))\n"
    (folder / "tool.py").write_text("import os\n" + told + code)
    tool = folder / "tool"
    tool.write_text(
        '#!/bin/sh\nwhile [ "$1" != -p ] && [ "$1" != --pid ]; do shift; done\n'
        f'"{sys.executable}" {folder}/tool.py "$2" &\nwait\n'
    )
    tool.chmod(0o755)
    return str(tool)


def is_gone(pid: int) -> bool:
    stat = procfs.read_stat(pid)
    return stat is None or stat.state in "ZX"


def guards() -> set[int]:
    pids = procfs.TreeScanner(os.getpid()).scan()
    return {pid for pid in pids if any("tool_guard.guard(" in word for word in procfs.read_cmdline(pid))}


@pytest.mark.parametrize("code", [HOLDS, LEFT_STOPPED], ids=["holds it", "left it stopped"])
@pytest.mark.parametrize("way", WAYS)
def test_where_its_parent_is_killed_the_tool_is_too_and_its_target_runs_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, way: str
) -> None:
    tool = make_tool(tmp_path, code)
    monkeypatch.setenv(EXECUTABLE_VARIABLE, tool)
    with child(SLEEPER) as target:
        settle_in_sleep(target.pid)
        words = (tool, str(target.pid), str(start_ticks(target.pid)))
        with child(RUNNER + WAYS[way], *words) as runner:
            pid = tmp_path / "tool.pid"
            wait_until(lambda: pid.exists() and pid.read_text(), "the tool runs")
            wait_until(lambda: state_of(target.pid) in "Tt", "its target is stopped")
            runner.kill()
            wait_until(lambda: is_gone(int(pid.read_text())), "the tool is gone")
            wait_until(lambda: not obstacle_of(target.pid, start_ticks(target.pid)), "the target runs on")


def test_it_ends_with_its_parent_and_touches_nothing_that_has_ended(tmp_path: Path) -> None:
    with child(SLEEPER) as target:
        before = guards()
        watch = ToolGuard()
        (its,) = guards() - before
        with watch.over(target.pid, start_ticks(target.pid)) as tool_runs:
            tool_runs(target.pid)
        target.send_signal(signal.SIGSTOP)
        settle(target.pid, "T")
        watch.close()
        assert is_gone(its)
        assert state_of(target.pid) == "T"


def test_it_runs_nothing_of_the_current_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("contextlib", "sglang_crashkit"):
        (tmp_path / f"{module}.py").write_text(f"open({str(tmp_path / 'run')!r}, 'w')\n")
    monkeypatch.chdir(tmp_path)
    ToolGuard().close()
    assert not (tmp_path / "run").exists()


def test_another_process_with_the_tools_pid_is_left_alone() -> None:
    with child(SLEEPER) as target, child(SLEEPER) as other:
        guard([f"{target.pid} {start_ticks(target.pid)} {other.pid} {start_ticks(other.pid) - 1}\n"])
        assert not is_gone(other.pid)


def test_without_a_guard_a_tool_runs_nevertheless(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    watch = ToolGuard()
    with watch.over(1, 1) as tool_runs:
        tool_runs(1)
    watch.close()
