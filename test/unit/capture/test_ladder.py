from __future__ import annotations

import dataclasses
import json
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from sglang_crashkit.capture import ladder
from sglang_crashkit.capture.ladder import capture_all
from sglang_crashkit.capture.responder import ask_responders
from sglang_crashkit.model.sample import Sample
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
    state_of,
    traced,
)
from unit.support.waiting import LONG

CAPTURE = """
import dataclasses, json, pathlib, sys
from sglang_crashkit.capture.ladder import capture_all
from sglang_crashkit.kernel.pidfd import ProcessHandle
processes = {int(pid): ProcessHandle(int(pid)).start_ticks for pid in sys.argv[2:]}
found = capture_all(processes, pathlib.Path(sys.argv[1]), 10, may_signal=True)
print(json.dumps([dataclasses.asdict(one) for one in found]))
"""


def test_py_spy_is_first_and_asks_nothing_of_the_process(runtime: Path) -> None:
    with hooked(runtime, LOCK_HOLDER) as target:
        settle_in_lock(target.pid)
        (sample,) = capture_all({target.pid: target.start_ticks}, runtime, LONG, may_signal=True)
    assert (sample.source, sample.problem) == ("py-spy", "")
    assert "hold_the_lock" in functions_of(sample.threads)


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
    with hooked(runtime, SLEEPER) as free, hooked(runtime, LOCK_HOLDER) as held:
        settle_in_lock(held.pid)
        settle(free.pid, "S")
        first, second = capture_all({one.pid: one.start_ticks for one in (free, held)}, runtime, 10.0, may_signal=True)
        # Five times the budget is what a loaded machine may take.
    assert (first.source, first.problem.startswith(reason)) == ("in-process", True), first.problem
    assert functions_of(first.threads)[:2] == ["inner_function", "outer_function"]
    assert second.source == "faulthandler"
    assert second.problem.startswith(reason)
    assert "in-process: no answer within 2 s: the GIL is not to be had" in second.problem
    assert "hold_the_lock" in functions_of(second.threads)
    assert (first.gil, second.gil) == ("", "taken")


def test_a_machine_that_stood_still_does_not_cost_the_stacks(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # GIVEN a round of py-spy that took the time of all, and a process that is slow to answer
    late = 0.0

    def stand_still(pids: list[int], deadline_secs: float) -> list[Sample]:
        nonlocal late
        late = 3 * deadline_secs
        return [Sample(pid=pid, problem="py-spy did not end", seconds=deadline_secs) for pid in pids]

    def answer_late(sockets: dict[int, Path], deadline_secs: float) -> list[Sample]:
        time.sleep(0.05)
        return ask_responders(sockets, deadline_secs - 0.05)

    monkeypatch.setattr(ladder, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + late))
    monkeypatch.setattr(ladder, "sample_all", stand_still)
    monkeypatch.setattr(ladder, "ask_responders", answer_late)
    with hooked(runtime, SLEEPER) as free, hooked(runtime, LOCK_HOLDER) as held:
        settle_in_lock(held.pid)
        first, second = capture_all({one.pid: one.start_ticks for one in (free, held)}, runtime, 10.0, may_signal=True)
    # THEN there are two ways left
    assert (first.source, second.source) == ("in-process", "faulthandler"), (first.problem, second.problem)


def test_without_permission_to_trace_a_process_speaks_for_itself(runtime: Path) -> None:
    # GIVEN processes that nobody may trace without the capability, one of them with its lock held
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
    # The third runs as this test does: as root it has the capability, and whoever has less may not trace it.
    assert third["source"] == ("in-process" if os.geteuid() == 0 else "py-spy")


def test_a_stopped_process_costs_the_others_nothing_and_stays_stopped(runtime: Path, use_tool) -> None:
    use_tool("exit 1")
    with hooked(runtime, SLEEPER) as stopped, hooked(runtime, SLEEPER) as free:
        os.kill(stopped.pid, signal.SIGSTOP)
        settle(stopped.pid, "T")
        first, second = capture_all(
            {one.pid: one.start_ticks for one in (stopped, free)}, runtime, LONG, may_signal=True
        )
        assert state_of(stopped.pid) == "T"
    assert not first.threads
    assert first.problem.endswith("faulthandler: it is stopped, and would take the signal when it goes on")
    assert second.threads
    assert second.seconds < LONG / 5


def test_no_rung_waits_for_a_thread_in_uninterruptible_sleep(runtime: Path, use_tool) -> None:
    with asleep(runtime) as target:
        (sample,) = capture_all({target.pid: target.start_ticks}, runtime, LONG, may_signal=True)
        assert sample.source == "py-spy"
        assert "sleep_uninterruptibly" in functions_of(sample.threads)
        use_tool("exit 1")
        (sample,) = capture_all({target.pid: target.start_ticks}, runtime, 10.0, may_signal=True)
        assert sample.source == "faulthandler"
        assert "sleep_uninterruptibly" in functions_of(sample.threads)
        assert state_of(target.pid) == "D"


def test_a_traced_process_is_captured_beside_its_tracer(runtime: Path) -> None:
    with hooked(runtime, SLEEPER) as target, traced(target.pid) as tracer:
        settle(target.pid, "S")
        (sample,) = capture_all({target.pid: target.start_ticks}, runtime, LONG, may_signal=True)
        assert Path(f"/proc/{target.pid}/status").read_text().split("TracerPid:")[1].split()[0] == str(tracer)
    assert (sample.source, sample.problem) == ("py-spy", "")


def test_one_that_is_gone_is_asked_for_nothing_more(runtime: Path, use_tool) -> None:
    use_tool("echo Error: no such process >&2; exit 1")
    with hooked(runtime, SLEEPER) as target:
        pass
    (sample,) = capture_all({target.pid: target.start_ticks}, runtime, LONG, may_signal=True)
    assert sample == dataclasses.replace(sample, threads=(), problem="no such process", source="py-spy")
