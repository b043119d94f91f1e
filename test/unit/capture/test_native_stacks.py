from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from sglang_crashkit.capture.native_stacks import capture_native, obstacle_of, release
from sglang_crashkit.capture.pyspy import EXECUTABLE_VARIABLE
from sglang_crashkit.kernel import procfs
from unit.targets import PTRACE, SLEEPER, asleep, functions_of, make_tool, settle, start_ticks, state_of, traced
from unit.waiting import LONG, child, wait_until

#: Sleeps in C, so that the native frames above Python's are known.
NATIVE = """
import ctypes, threading
def call_c(): ctypes.CDLL(None).pause()
for _ in range(3): threading.Thread(target=call_c, daemon=True).start()
ready()
call_c()
"""


def tool_in_python(folder: Path, code: str) -> str:
    """Write a stand-in for py-spy that traces its target; the target's pid is `PID` in `code`."""
    (folder / "tool.py").write_text(PTRACE + "PID = int(sys.argv[5])\n" + code)
    import sys

    return make_tool(folder, f'exec {sys.executable} {folder}/tool.py "$@"')


def capture(pid: int, secs: float = LONG):
    return capture_native({pid: start_ticks(pid)}, secs)


def runs_on(pid: int) -> None:
    """Check that a process is neither stopped nor traced, and has no stop ahead."""
    wait_until(lambda: not any(procfs.read_tracer(pid, one) for one in procfs.thread_states(pid)), "nobody traces it")
    time.sleep(0.2)
    assert set(procfs.thread_states(pid).values()) <= set("RSD")
    for thread in procfs.thread_states(pid):
        assert not procfs.in_mask(procfs.read_status(pid, thread)["SigPnd"], signal.SIGSTOP)


def test_native_frames_stand_between_pythons_and_the_target_runs_on() -> None:
    with child(NATIVE) as process:
        settle(process.pid, "S")
        (sample,), obstacles = capture(process.pid)
        runs_on(process.pid)
    assert (obstacles, sample.problem) == ({}, "")
    functions = functions_of(sample.threads)
    assert "call_c" in functions
    assert any("pause" in function for function in functions), functions


def test_a_stopped_target_is_left_alone_and_stays_stopped() -> None:
    with child(SLEEPER) as process:
        process.send_signal(signal.SIGSTOP)
        settle(process.pid, "T")
        samples, obstacles = capture(process.pid)
        assert state_of(process.pid) == "T"
    assert (samples, obstacles) == ([], {process.pid: "it is stopped, and must stay as it was found"})


def test_a_thread_in_uninterruptible_sleep_is_an_obstacle(runtime: Path) -> None:
    with asleep(runtime) as target:
        started = time.monotonic()
        samples, obstacles = capture(target.pid)
        assert time.monotonic() - started < LONG / 2
        runs_on(target.pid)
    assert samples == []
    assert obstacles[target.pid] == f"thread {target.pid} is in uninterruptible sleep, and would not stop"


def test_a_traced_target_is_left_to_its_tracer() -> None:
    with child(SLEEPER) as process, traced(process.pid) as tracer:
        samples, obstacles = capture(process.pid)
        assert procfs.read_tracer(process.pid) == tracer
    assert samples == []
    assert obstacles[process.pid].startswith(f"process {tracer} (python")
    assert obstacles[process.pid].endswith("traces it already")


def test_one_that_is_gone_or_another_process_by_now_is_an_obstacle() -> None:
    with child(SLEEPER) as process:
        assert obstacle_of(process.pid, start_ticks(process.pid) - 1) == "it has ended"
        assert obstacle_of(process.pid, start_ticks(process.pid)) == ""
    assert obstacle_of(process.pid, 0) == "it has ended"


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
    monkeypatch.setenv(EXECUTABLE_VARIABLE, tool_in_python(tmp_path, code))
    with child(NATIVE) as process:
        settle(process.pid, "S")
        (sample,), obstacles = capture(process.pid, 1.0)
        runs_on(process.pid)
    assert obstacles == {}
    assert not sample.threads
    assert sample.problem


def test_where_it_is_interrupted_the_target_runs_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(pids: list[int], *_arguments: object, **_more: object) -> None:
        os.kill(pids[0], signal.SIGSTOP)
        settle(pids[0], "T")
        raise KeyboardInterrupt

    monkeypatch.setattr("sglang_crashkit.capture.native_stacks.sample_all", interrupted)
    with child(SLEEPER) as process:
        with pytest.raises(KeyboardInterrupt):
            capture(process.pid)
        runs_on(process.pid)


def test_a_stop_that_waits_for_the_end_of_a_sleep_is_taken_back(runtime: Path, tmp_path: Path) -> None:
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


def test_one_that_is_neither_runs_on(tmp_path: Path) -> None:
    with child(SLEEPER) as process:
        assert release({process.pid: start_ticks(process.pid), os.getpid(): 1}) == set()
        runs_on(process.pid)
