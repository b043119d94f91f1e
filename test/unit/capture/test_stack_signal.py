from __future__ import annotations

import dataclasses
import os
import signal
from pathlib import Path

import pytest

from sglang_crashkit.capture.stack_signal import ask_faulthandler
from sglang_crashkit.kernel import procfs
from sglang_crashkit.kernel.stack_hooks import HookFiles, StackHooks
from unit.targets import (
    LOCK_HOLDER,
    SLEEPER,
    armed,
    functions_of,
    settle,
    settle_in_lock,
    start_ticks,
    state_of,
    traced,
)
from unit.waiting import LONG, child, descriptors, wait_until

EXEC = """
ready()
os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(120)"])
"""
BLOCKED = """
signal.pthread_sigmask(signal.SIG_BLOCK, range(34, 65))
"""


def ask(folder: Path, *targets: StackHooks, secs: float = LONG):
    return ask_faulthandler(targets, {target.pid: folder for target in targets}, secs)


def test_a_process_whose_lock_is_held_in_c_says_where_all_its_threads_are(runtime: Path) -> None:
    with armed(runtime, LOCK_HOLDER) as target:
        settle_in_lock(target.pid)
        (sample,) = ask(runtime, target)
        assert state_of(target.pid) == "S"
    assert (sample.problem, sample.source) == ("", "faulthandler")
    assert sample.threads
    (main,) = [thread for thread in sample.threads if thread.native_id == target.pid]
    assert [frame.function for frame in main.frames] == ["hold_the_lock", "<module>"]
    # The kit's own is among them.
    assert len(sample.threads) == 2


@pytest.mark.wide
def test_it_can_be_asked_again_and_again(runtime: Path) -> None:
    fds = descriptors()
    with armed(runtime, LOCK_HOLDER) as target:
        settle_in_lock(target.pid)
        for _ in range(20):
            (sample,) = ask(runtime, target)
            assert sample.threads
            assert functions_of(sample.threads).count("hold_the_lock") == 1
        # What it wrote before is gone: the file does not grow.
        assert HookFiles.of(runtime, target.pid, target.start_ticks).stack.stat().st_size < 4096
    assert descriptors().items() <= fds.items()


def test_a_stopped_process_is_not_asked_and_has_no_signal_pending(runtime: Path) -> None:
    with armed(runtime, SLEEPER) as target:
        os.kill(target.pid, signal.SIGSTOP)
        settle(target.pid, "T")
        (sample,) = ask(runtime, target)
        pending = Path(f"/proc/{target.pid}/status").read_text().split("ShdPnd:")[1].split()[0]
        assert int(pending, 16) == 0
        assert state_of(target.pid) == "T"
    assert sample.problem == "it is stopped, and would take the signal when it goes on"


def test_a_traced_process_is_not_asked(runtime: Path) -> None:
    with armed(runtime, SLEEPER) as target, traced(target.pid) as tracer:
        (sample,) = ask(runtime, target)
    assert sample.problem == f"process {tracer} traces it, and would take the signal"


def test_one_that_does_not_catch_the_signal_any_more_is_not_sent_it(runtime: Path) -> None:
    with armed(runtime, EXEC) as target:
        # Its handler went with its program, and the signal would end it.
        wait_until(lambda: "import time; time.sleep(120)" in procfs.read_cmdline(target.pid), "it runs another program")
        (sample,) = ask(runtime, target)
        assert state_of(target.pid) in "RS"
    assert sample.problem == f"it does not catch signal {target.signal} any more"


def test_one_that_blocks_the_signal_in_every_thread_is_not_sent_it(runtime: Path) -> None:
    with armed(runtime, SLEEPER, before=BLOCKED) as target:
        (sample,) = ask(runtime, target)
    assert sample.problem.startswith("no thread of it can take a signal now")


def test_a_recycled_pid_is_not_asked(runtime: Path) -> None:
    with child("signal.signal(45, lambda *_: os._exit(1)); ready(); pause()") as other:
        gone = StackHooks(other.pid, start_ticks(other.pid) - 1, 1, 45)
        (sample,) = ask(runtime, gone)
        assert other.poll() is None
    assert sample.problem == "it has ended"


def test_one_that_is_gone_or_has_no_file_is_said_to(runtime: Path) -> None:
    with armed(runtime, SLEEPER) as target:
        HookFiles.of(runtime, target.pid, target.start_ticks).stack.unlink()
        assert ask(runtime, target)[0].problem == "No such file or directory"
    assert ask(runtime, target)[0].problem


def test_one_that_writes_nothing_costs_no_more_than_the_time(runtime: Path) -> None:
    # GIVEN a process whose signal does something else
    with child("signal.signal(45, lambda *_: None); ready(); pause()") as other, armed(runtime, LOCK_HOLDER) as target:
        silent = dataclasses.replace(target, pid=other.pid, start_ticks=start_ticks(other.pid))
        HookFiles.of(runtime, silent.pid, silent.start_ticks).stack.touch()
        first, second = ask(runtime, silent, target, secs=1.0)
    assert not first.threads
    assert first.problem.startswith("it wrote nothing within ")
    assert first.seconds >= 1.0
    assert second.threads
    assert second.seconds < first.seconds
