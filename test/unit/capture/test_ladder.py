from __future__ import annotations

import dataclasses
import json
import os
import signal
from pathlib import Path

import pytest

from sglang_crashkit.capture.ladder import ask_faulthandler, capture_all, parse_faulthandler
from sglang_crashkit.kernel import procfs
from sglang_crashkit.kernel.stack_hooks import HookFiles, StackHooks
from sglang_crashkit.model.sample import Frame, Sample
from unit.support.targets import (
    LOCK_HOLDER,
    SLEEPER,
    UNDUMPABLE,
    asleep,
    functions_of,
    hooked,
    run_unprivileged,
    settle,
    settle_in_lock,
    start_ticks,
    state_of,
    traced,
)
from unit.support.waiting import LONG, child, descriptors, wait_until

CAPTURE = """
import dataclasses, json, pathlib, sys
from sglang_crashkit.capture.ladder import capture_all
from sglang_crashkit.kernel.pidfd import ProcessHandle
processes = {int(pid): ProcessHandle(int(pid)).start_ticks for pid in sys.argv[2:]}
found = capture_all(processes, pathlib.Path(sys.argv[1]), 10, may_signal=True)
print(json.dumps([dataclasses.asdict(one) for one in found]))
"""


def capture(folder: Path, *targets: StackHooks, secs: float = LONG) -> list[Sample]:
    return capture_all({target.pid: target.start_ticks for target in targets}, folder, secs, may_signal=True)


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo Error: Permission denied >&2; exit 1", "Permission denied"),
        pytest.param("exec sleep 600", "py-spy did not end within 5 s", marks=pytest.mark.wide),
    ],
    ids=["refused", "hangs"],
)
def test_every_process_gets_its_stack_in_time_despite_py_spy(runtime: Path, use_tool, script: str, reason: str) -> None:
    use_tool(script)
    fds = descriptors()
    with hooked(runtime, SLEEPER) as free, hooked(runtime, LOCK_HOLDER) as held:
        settle_in_lock(held.pid)
        settle(free.pid, "S")
        first, second = capture(runtime, free, held, secs=10.0)
        # Five times the budget is what a loaded machine may take.
    assert (first.source, first.problem.startswith(reason)) == ("in-process", True), first.problem
    assert functions_of(first.threads)[:2] == ["inner_function", "outer_function"]
    assert second.source == "faulthandler"
    assert second.problem.startswith(reason)
    assert "in-process: no answer within 2 s: the GIL is not to be had" in second.problem
    assert "hold_the_lock" in functions_of(second.threads)
    assert (first.gil, second.gil) == ("", "taken")
    assert descriptors().items() <= fds.items()


def test_without_permission_to_trace_a_process_speaks_for_itself(runtime: Path) -> None:
    # GIVEN processes that no one may trace without the capability, one of them with its lock held
    with (
        hooked(runtime, SLEEPER, before=UNDUMPABLE) as free,
        hooked(runtime, LOCK_HOLDER, before=UNDUMPABLE) as held,
        hooked(runtime, SLEEPER) as open_to_all,
    ):
        settle_in_lock(held.pid)
        settle(free.pid, "S")
        settle(open_to_all.pid, "S")
        # WHEN a crash handler without it takes their stacks
        pids = [str(one.pid) for one in (free, held, open_to_all)]
        first, second, third = json.loads(run_unprivileged(CAPTURE, str(runtime), *pids))
    # THEN py-spy fails for the two, and each rung below delivers what it can
    assert first["source"] == "in-process"
    assert second["source"] == "faulthandler"
    for found in (first, second):
        assert "ermission" in found["problem"] or "Failed to get process executable" in found["problem"], found
    names = [frame["function"] for thread in first["threads"] for frame in thread["frames"]]
    assert names[:3] == ["inner_function", "outer_function", "<module>"]
    assert "hold_the_lock" in [frame["function"] for thread in second["threads"] for frame in thread["frames"]]
    # The third runs as this test does: as root it has the capability, and the process that has less may not trace it.
    assert third["source"] == ("in-process" if os.geteuid() == 0 else "py-spy")


def test_a_stopped_process_costs_the_others_nothing_and_stays_stopped(runtime: Path, use_tool) -> None:
    use_tool("exit 1")
    with hooked(runtime, SLEEPER) as stopped, hooked(runtime, SLEEPER) as free:
        os.kill(stopped.pid, signal.SIGSTOP)
        settle(stopped.pid, "T")
        first, second = capture(runtime, stopped, free)
        assert state_of(stopped.pid) == "T"
        assert int(procfs.read_status(stopped.pid)["ShdPnd"], 16) == 0, "a signal waits for it"
    assert not first.threads
    assert first.problem.endswith("faulthandler: it is stopped, and must stay as it was found")
    assert second.threads
    assert second.seconds < LONG / 5


def test_no_rung_waits_for_a_thread_in_uninterruptible_sleep(runtime: Path, use_tool) -> None:
    with asleep(runtime) as target:
        (sample,) = capture(runtime, target)
        assert sample.source == "py-spy"
        assert "sleep_uninterruptibly" in functions_of(sample.threads)
        use_tool("exit 1")
        (sample,) = capture(runtime, target, secs=10.0)
        assert sample.source == "faulthandler"
        assert "sleep_uninterruptibly" in functions_of(sample.threads)
        assert state_of(target.pid) == "D"


EXEC = """
ready()
os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(120)"])
"""
BLOCKED = """
signal.pthread_sigmask(signal.SIG_BLOCK, range(34, 65))
"""


def ask(folder: Path, *targets: StackHooks, secs: float = LONG):
    return ask_faulthandler(targets, {target.pid: folder for target in targets}, secs)


def test_a_traced_process_is_captured_beside_its_tracer_and_not_asked(runtime: Path) -> None:
    with hooked(runtime, SLEEPER) as target, traced(target.pid) as tracer:
        settle(target.pid, "S")
        (sample,) = capture(runtime, target)
        (refused,) = ask(runtime, target)
        assert procfs.read_tracer(target.pid) == tracer
    assert (sample.source, sample.problem) == ("py-spy", "")
    assert refused.problem.startswith(f"process {tracer} (")


def test_one_that_stopped_catching_the_signal_is_not_sent_it(runtime: Path) -> None:
    with hooked(runtime, EXEC) as target:
        # Its handler went with its program, and the signal would end it.
        wait_until(lambda: "import time; time.sleep(120)" in procfs.read_cmdline(target.pid), "it runs another program")
        (sample,) = ask(runtime, target)
        assert state_of(target.pid) in "RS"
    assert sample.problem == f"it does not catch signal {target.signal} any more"


def test_one_whose_threads_all_block_the_signal_is_spared(runtime: Path) -> None:
    with hooked(runtime, SLEEPER, before=BLOCKED) as target:
        (sample,) = ask(runtime, target)
    assert sample.problem.startswith("no thread of it can take a signal now")


def test_a_recycled_pid_is_not_asked(runtime: Path) -> None:
    with child("signal.signal(45, lambda *_: os._exit(1)); ready(); pause()") as other:
        gone = StackHooks(other.pid, start_ticks(other.pid) - 1, 1, 45)
        (sample,) = ask(runtime, gone)
        assert other.poll() is None
    assert sample.problem == "it has ended"


def test_one_that_writes_nothing_costs_no_more_than_the_time(runtime: Path) -> None:
    # GIVEN a process whose signal does something else
    with child("signal.signal(45, lambda *_: None); ready(); pause()") as other, hooked(runtime, LOCK_HOLDER) as target:
        silent = dataclasses.replace(target, pid=other.pid, start_ticks=start_ticks(other.pid))
        HookFiles.of(runtime, silent.pid, silent.start_ticks).stack.touch()
        first, second = ask(runtime, silent, target, secs=1.0)
    assert not first.threads
    assert first.problem.startswith("it wrote nothing within ")
    assert first.seconds >= 1.0
    assert second.threads
    assert second.seconds < first.seconds


MAIN, OTHER = 0x7F00, 0x7E00
WHOLE = """Fatal Python error: Segmentation fault

Thread 0x0000000000007e00 (most recent call first):
  File "/site/threading.py", line 320 in wait
  File "/site/threading.py", line 1002 in _bootstrap

Current thread 0x0000000000007f00 (most recent call first):
  File "/site/sglang/srt/managers/scheduler.py", line 12 in forward
  File "<string>", line 1 in <module>

Extension modules: numpy.core, torch._C (total: 2)
"""


def parse(text: str, *roots: str):
    return parse_faulthandler(text, 100, MAIN, roots)


def test_the_error_the_threads_and_their_frames_are_read() -> None:
    output = parse(WHOLE, "/site")
    assert output.error == "Segmentation fault"
    assert output.is_whole
    main, other = output.threads
    assert (main.name, main.native_id, main.active) == ("MainThread", 100, True)
    assert main.frames == (
        Frame("forward", "sglang/srt/managers/scheduler.py", 12),
        Frame("<module>", "<string>", 1),
    )
    assert (other.name, other.native_id, other.active) == ("", None, False)


@pytest.mark.parametrize("length", range(0, len(WHOLE), 7))
def test_what_was_cut_off_is_read_as_far_as_possible(length: int) -> None:
    output = parse(WHOLE[:length])
    whole = parse(WHOLE)
    ended = "in <module>\n" in WHOLE[:length]
    assert output.is_whole == ended
    frames = [frame for thread in output.threads for frame in thread.frames]
    known = [frame for thread in whole.threads for frame in thread.frames]
    assert all(frame in known for frame in frames)


def test_names_of_later_pythons_and_unknown_lines_are_taken() -> None:
    text = f"Thread 0x{OTHER:016x} [worker] (most recent call first):\n  <no Python frame>\n"
    text += f'\nCurrent thread 0x{MAIN:016x} [python] (most recent call first):\n  File "/x.py", line ??? in <module>\n'
    output = parse(text)
    assert [thread.name for thread in output.threads] == ["worker", "MainThread"]
    assert output.threads[1].frames == (Frame("<module>", "/x.py", 0),)
    # It was asked for its stack, which says nothing about who was at work.
    assert not any(thread.active for thread in output.threads)
    assert (output.error, output.is_whole) == ("", True)


@pytest.mark.parametrize("text", ["", "\n", "rubbish\n", "  ...\n", '  File "/x.py", line 1 in f\n', "\0" * 100])
def test_anything_else_holds_nothing(text: str) -> None:
    output = parse(text)
    assert (output.threads, output.is_whole, output.error) == ((), False, "")
