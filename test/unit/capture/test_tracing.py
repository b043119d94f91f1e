from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import pytest

from sglang_crashkit.capture.pyspy import EXECUTABLE_VARIABLE, capture_native
from sglang_crashkit.capture.tracing import ToolGuard, guard, obstacle_of, release
from sglang_crashkit.kernel import procfs
from unit.support.targets import (
    PTRACE,
    SLEEPER,
    asleep,
    functions_of,
    is_gone,
    make_tool,
    runs_on,
    settle,
    settle_in_sleep,
    start_ticks,
    state_of,
    traced,
)
from unit.support.waiting import LONG, child, wait_until

#: Runs a tool on a process: the tool's file, then pid and start time.
RUNNER = """
import contextlib, pathlib
from sglang_crashkit.capture.debugger import debug_all
from sglang_crashkit.capture.tracing import ToolGuard
guards = ToolGuard.over

@contextlib.contextmanager
def over(self, *target):
    with guards(self, *target) as tool_runs:
        def told(tool):
            tool_runs(tool)
            pathlib.Path(sys.argv[1]).with_name("guarded").touch()
        yield told

ToolGuard.over = over
processes = {int(sys.argv[2]): int(sys.argv[3])}
ready()
"""
#: cuda-gdb, and py-spy in its place.
WAYS = {"cuda-gdb": "debug_all(sys.argv[1], processes, 600, print)", "py-spy": "debug_all(None, processes, 600, print)"}
#: A tool that holds its target stopped, and one that left a stop ahead of it and does not end either.
HOLDS = PTRACE + "attach(int(sys.argv[1])); os.waitpid(int(sys.argv[1]), 0x40000000); told(); time.sleep(600)\n"
LEFT_STOPPED = "import os, signal, sys, time; os.kill(int(sys.argv[1]), signal.SIGSTOP); told(); time.sleep(600)\n"


def make_guarded_tool(folder: Path, code: str) -> str:
    told = f"def told(): open({str(folder)!r} + '/tool.pid', 'w').write(str(os.getpid()))\n"
    (folder / "tool.py").write_text("import os\n" + told + code)
    script = 'while [ "$1" != -p ] && [ "$1" != --pid ]; do shift; done\n'
    return make_tool(folder, f'{script}"{sys.executable}" {folder}/tool.py "$2" &\nwait')


def guards() -> set[int]:
    pids = procfs.TreeScanner(os.getpid()).scan()
    return {pid for pid in pids if any("tracing.guard(" in word for word in procfs.read_cmdline(pid))}


@pytest.mark.parametrize("code", [HOLDS, LEFT_STOPPED], ids=["holds it", "left it stopped"])
@pytest.mark.parametrize("way", WAYS)
def test_a_tool_dies_with_its_parent_and_its_target_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, way: str
) -> None:
    tool = make_guarded_tool(tmp_path, code)
    monkeypatch.setenv(EXECUTABLE_VARIABLE, tool)
    with child(SLEEPER) as target:
        settle_in_sleep(target.pid)
        words = (tool, str(target.pid), str(start_ticks(target.pid)))
        with child(RUNNER + WAYS[way], *words) as runner:
            pid = tmp_path / "tool.pid"
            wait_until(lambda: pid.exists() and pid.read_text(), "the tool runs")
            wait_until(lambda: state_of(target.pid) in "Tt", "its target is stopped")
            # Before, no one but the runner knows the tool.
            wait_until((tmp_path / "guarded").exists, "the guard knows the tool")
            runner.kill()
            wait_until(lambda: is_gone(int(pid.read_text())), "the tool is gone")
            wait_until(lambda: not obstacle_of(target.pid, start_ticks(target.pid)), "the target runs on")


def test_it_ends_with_its_parent_and_spares_reused_pids(tmp_path: Path) -> None:
    with child(SLEEPER) as target:
        before = guards()
        watch = ToolGuard()
        (its,) = wait_until(lambda: guards() - before, "it runs")
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


#: Sleeps in C, so that the native frames above Python's are known.
NATIVE = """
import ctypes, threading
def call_c(): ctypes.CDLL(None).pause()
for _ in range(3): threading.Thread(target=call_c, daemon=True).start()
ready()
call_c()
"""


def capture(pid: int, secs: float = LONG):
    return capture_native({pid: start_ticks(pid)}, secs)


def test_native_frames_stand_between_pythons_and_the_target_runs_on() -> None:
    with child(NATIVE) as process:
        settle(process.pid, "S")
        (result,), obstacles = capture(process.pid)
        runs_on(process.pid)
    assert (obstacles, result.problem) == ({}, "")
    functions = functions_of(result.threads)
    assert "call_c" in functions
    assert any("pause" in function for function in functions), functions


def test_who_must_not_be_stopped_is_left_alone(runtime: Path) -> None:
    with asleep(runtime) as target, child(SLEEPER) as process, traced(process.pid) as tracer:
        results, obstacles = capture_native({one: start_ticks(one) for one in (target.pid, process.pid)}, LONG)
        runs_on(target.pid)
        assert procfs.read_tracer(process.pid) == tracer
    assert results == []
    assert obstacles[target.pid] == f"thread {target.pid} is in uninterruptible sleep, and would not stop"
    assert re.fullmatch(rf"process {tracer} \(python.*\) traces it already", obstacles[process.pid])


@pytest.mark.parametrize(
    "code",
    [
        "attach(PID); os.waitpid(PID, 0x40000000); time.sleep(600)",
        "attach(PID); time.sleep(600)",
        "[attach(int(t)) for t in os.listdir(f'/proc/{PID}/task')]; time.sleep(600)",
        "os.kill(PID, signal.SIGSTOP); time.sleep(600)",
        "os.kill(PID, signal.SIGSTOP); sys.exit(1)",
    ],
    ids=["holds it", "asked it to stop", "holds its threads", "stopped it and hangs", "stopped it and failed"],
)
def test_whatever_a_tool_leaves_behind_the_target_runs_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    (tmp_path / "tool.py").write_text(PTRACE + "PID = int(sys.argv[5])\n" + code)
    tool = make_tool(tmp_path, f'exec {sys.executable} {tmp_path}/tool.py "$@"')
    monkeypatch.setenv(EXECUTABLE_VARIABLE, tool)
    with child(NATIVE) as process:
        settle(process.pid, "S")
        (result,), obstacles = capture(process.pid, 1.0)
        runs_on(process.pid)
    assert obstacles == {}
    assert not result.threads
    assert result.problem


def test_where_it_is_interrupted_the_target_runs_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(pids: list[int], *_arguments: object, **_more: object) -> None:
        os.kill(pids[0], signal.SIGSTOP)
        settle(pids[0], "T")
        raise KeyboardInterrupt

    monkeypatch.setattr("sglang_crashkit.capture.pyspy.sample_all", interrupted)
    with child(SLEEPER) as process:
        with pytest.raises(KeyboardInterrupt):
            capture(process.pid)
        runs_on(process.pid)


def test_a_stop_pending_behind_a_sleep_is_taken_back(runtime: Path, tmp_path: Path) -> None:
    # GIVEN a thread in uninterruptible sleep that a tracer, dead by now, asked to stop
    with asleep(runtime) as target:
        with child(PTRACE + "attach(int(sys.argv[1])); ready(); pause()", str(target.pid)):
            assert procfs.in_mask(procfs.read_status(target.pid, target.pid)["SigPnd"], signal.SIGSTOP)
        wait_until(lambda: procfs.read_tracer(target.pid) == 0, "the tracer is gone")
        assert procfs.in_mask(procfs.read_status(target.pid, target.pid)["SigPnd"], signal.SIGSTOP)
        # WHEN it is released
        assert release({target.pid: target.start_ticks}) == {target.pid}
        # THEN there is no stop ahead of it
        assert not procfs.in_mask(procfs.read_status(target.pid, target.pid)["SigPnd"], signal.SIGSTOP)
        runs_on(target.pid)
