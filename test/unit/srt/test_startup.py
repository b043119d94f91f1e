"""The wait for ranks: what it says on a clock of its own, and the hooks that begin it, with real processes."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_crashkit.kernel import cgroup
from sglang_crashkit.srt.entrypoints.engine import on_wait_for_scheduler_ready
from sglang_crashkit.srt.managers import data_parallel_controller as hooks
from sglang_crashkit.srt.startup import Startup, StartupError
from sglang_crashkit.srt.supervisor import Child
from unit.srt.conftest import Listener, launch
from unit.support.fake_ranks import READY, FakeClock, FakeRank
from unit.support.locked_memory import locked_process
from unit.support.waiting import descriptors

TIMEOUT = "SGLANG_CRASHKIT_STARTUP_TIMEOUT_SECS"
READY_1 = [(1.0, "ready")]
DIED = "died during initialization (exit code: "


def run(*scripts: list[tuple[float, Any]], **options: Any) -> tuple[FakeClock, list[Any]]:
    """Wait for one rank for each script, on a clock of its own."""
    clock = FakeClock()
    ranks = [FakeRank(number, clock, *script) for number, script in enumerate(scripts)]
    return clock, Startup([rank.child() for rank in ranks], clock=clock, **options).run()


def fail(*scripts: list[tuple[float, Any]], **options: Any) -> StartupError:
    with pytest.raises(StartupError) as caught:
        run(*scripts, **options)
    return caught.value


def test_what_ranks_sent_comes_in_their_order() -> None:
    clock, infos = run([(3.0, "ready")], [(1.0, "ready")], [(2.0, "ready")])
    assert infos == [READY | {"rank": number} for number in range(3)]
    assert clock.time == 1003.0


@pytest.mark.parametrize(
    ("scripts", "kind", "said"),
    [
        ([[], [(5.0, -9)]], "died", [f"Rank 1 scheduler {DIED}-9)", "5.1 s after", "not ready: Rank 0 scheduler."]),
        ([[(1.0, "ready"), (5.0, -15)], []], "died", [f"Rank 0 scheduler {DIED}-15)", "was killed by SIGTERM"]),
        ([READY_1, [(1.0, "ready"), (1.0, 0)]], "died", [f"Rank 1 scheduler {DIED}0)"]),
        ([[], [(5.0, 7)]], "died", [f"{DIED}7)", "ended with exit status 7"]),
        ([[(2.0, "begin")], [(5.0, -9)]], "died", [f"Rank 1 scheduler {DIED}-9)"]),
        (
            [[(5.0, -15)], [], [(5.0, -9)]],
            "died",
            [f"Rank 0 scheduler and Rank 2 scheduler {DIED}-15, -9).", "at the same moment as the first."],
        ),
        ([[(5.0, -9)], [(5.01, -9)]], "died", [f"Rank 0 scheduler and Rank 1 scheduler {DIED}-9, -9).", ", first."]),
        ([[], [(5.0, "close")]], "closed", ["closed its pipe before it was ready, and its process lives"]),
        ([[], [(5.0, "text")]], "garbled", ["without a status, of type str"]),
        ([[], [(5.0, {"state": "ready"})]], "garbled", ["without a status, of type dict"]),
        (
            [[], [(5.0, "garble")]],
            "garbled",
            ["Rank 1 scheduler (sglang::scheduler_TP1, pid", "cannot be read (ValueError: invalid load key"],
        ),
        ([[(2.0, "begin")], []], "garbled", ["Rank 0 scheduler (sglang::", "did not finish it within 10 s"]),
        (
            [[], [(5.0, {"status": "error"})]],
            "failed",
            ["Initialization failed. Please see the error messages above. Rank 1 scheduler", "reported status 'error'"],
        ),
    ],
)
def test_one_that_will_not_get_ready_ends_the_wait(
    scripts: list[Any], kind: str, said: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    error = fail(*scripts)
    assert error.kind == kind
    # Its traceback begins with itself.
    assert error.__context__ is None
    assert all(words in str(error) for words in said), str(error)
    assert f"crash kit: {error}" in caplog.text


def test_silence_is_reported_ever_more_rarely(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(TIMEOUT, "600")
    text = str(fail(READY_1, []))
    assert text.startswith(f"Rank 1 scheduler not ready within 600 s ({TIMEOUT}). Rank 1 scheduler (sglang::")
    assert text.endswith("Ready: Rank 0 scheduler.")
    reports = [record.message for record in caplog.records if "not ready after" in record.message]
    assert [words.split(" s:")[0].split()[-1] for words in reports] == ["30", "90", "210", "450"]
    assert "1 of 2 (Rank 1 scheduler (sglang::" in reports[0]
    assert reports[0].endswith(": gone); ready: Rank 0 scheduler")


def test_without_a_limit_it_waits_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TIMEOUT, "0")
    assert run([(1e6, "ready")])[1]


def test_the_time_that_was_waited_before_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TIMEOUT, "600")
    assert " not ready within 600 s" in str(fail([(2.0, "ready")], waited_secs=599.0))


def test_children_may_come_later_and_without_a_pipe() -> None:
    clock, children = FakeClock(), list[Child]()
    ranks = [FakeRank(0, clock, (1.0, "ready")), FakeRank(1, clock, (3.0, "ready"), (9.0, 3))]

    def all_known() -> bool:
        if clock.time > 1002.0 and len(children) == 1:
            children.append(ranks[1].child(is_waited_for=False))
        return len(children) == 2

    children.append(ranks[0].child())
    assert len(Startup(children, all_known, clock=clock).run()) == 1
    clock.time = 1010.0
    with pytest.raises(StartupError, match=rf"^Rank 1 scheduler {DIED[:4]}"):
        Startup(children, clock=clock).run()


# -- real processes


@on_wait_for_scheduler_ready
def wait_for_scheduler_ready(scheduler_pipe_readers: Any, scheduler_procs: Any) -> Any:
    return "upstream's"


def test_the_launcher_gets_what_the_ranks_sent(started):
    readers, processes = launch(started, "ready", "ready")
    before = set(descriptors())
    infos = wait_for_scheduler_ready(readers, processes)
    assert [info["title"] for info in infos] == ["sglang::scheduler_TP0", "sglang::scheduler_TP1"]
    assert set(descriptors()) <= before


def test_a_death_is_raised_when_the_incident_is_whole(started, listener: Listener, caplog, monkeypatch):
    readers, processes = launch(started, "silent", "silent")
    look_up = Child.look_up_title

    def look_up_and_kill(self: Child) -> None:
        look_up(self)
        if self.title == "sglang::scheduler_TP1":
            os.kill(processes[1].pid, signal.SIGKILL)

    monkeypatch.setattr(Child, "look_up_title", look_up_and_kill)
    with pytest.raises(RuntimeError, match=r"Rank 1 scheduler died during initialization \(exit code: -9\)") as caught:
        wait_for_scheduler_ready(scheduler_pipe_readers=readers, scheduler_procs=processes)
    assert f"Rank 1 scheduler (sglang::scheduler_TP1, pid {processes[1].pid}) was killed by" in str(caught.value)
    heard = listener.heard_but_members()
    assert heard["event"] == "launch_failed"
    assert heard["message"].startswith("Rank 1 scheduler died")
    assert heard["titles"] == {str(processes[1].pid): "sglang::scheduler_TP1"}
    assert heard["exit_codes"] == {str(processes[1].pid): -9}
    assert [record.message.split(":")[0] for record in caplog.records] == ["crash kit", "crash kit"]
    assert "incident /incident" in caplog.records[1].message
    # The crash handler reads of the zombie how it ended.
    assert os.waitid(os.P_PID, processes[1].pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None


def test_silence_beyond_the_limit_is_an_incident(started, listener: Listener, monkeypatch):
    monkeypatch.setenv(TIMEOUT, "0.5")
    monkeypatch.setenv("SGLANG_CRASHKIT_BUDGET_SECS", "0.2")
    readers, processes = launch(started, "ready", "silent")
    with pytest.raises(RuntimeError, match=r"Rank 1 scheduler not ready within 0\.5 s"):
        wait_for_scheduler_ready(readers, processes)
    assert listener.heard_but_members()["event"] == "startup_timeout"


@pytest.mark.parametrize("grown", [0, 1])
def test_without_descriptors_left_the_sentinels_do(started, tmp_path, monkeypatch, grown: int):
    events = tmp_path / "memory.events"
    events.write_text(f"oom_kill {3 + grown}\n")
    monkeypatch.setattr(cgroup, "find_counter", lambda pid: cgroup.OomCounter(events, 3))
    monkeypatch.setattr(os, "pidfd_open", lambda _pid: os.open("/nonexistent", os.O_RDONLY))
    said = [r"its memory cgroup counts no OOM kill since", rf"{events} counts 1 OOM kill\(s\) since"][grown]
    with pytest.raises(RuntimeError, match=rf"Rank 1 scheduler died .* \({said} the wait began\)"):
        wait_for_scheduler_ready(*launch(started, "silent", "dies"))


@pytest.mark.parametrize("stand_ins", [False, True])
def test_what_is_left_to_upstream(started, monkeypatch, stand_ins: bool):
    if not stand_ins:
        monkeypatch.setenv("SGLANG_CRASHKIT_ENABLED", "0")
    pipes, processes = ([object()], [object()]) if stand_ins else launch(started, "ready")
    assert wait_for_scheduler_ready(pipes, processes) == "upstream's"
    events = [threading.Event()]
    assert stand_ins or hooks.on_scheduler_groups(SimpleNamespace(), events) is events
    assert hooks.on_scheduler_group_started(SimpleNamespace(), pipes) is pipes


def test_a_title_that_comes_too_late_is_given_up(tmp_path: Path) -> None:
    with locked_process(tmp_path, title="sglang::scheduler_TP0") as target:
        found = Child("Rank 0 scheduler", target.pid)
        found.look_up_title()
        assert (found.has_title, found.label()) == (True, f"Rank 0 scheduler (pid {target.pid})")
