"""A launch: the wait for ranks on a clock of its own, and the hooks that begin it, with real processes."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from sglang_crashkit import settings
from sglang_crashkit.srt import crash_exit, handler_process, supervisor
from sglang_crashkit.srt.entrypoints.engine import (
    on_engine_launch,
    on_launch_phase_sigquit,
    on_wait_for_scheduler_ready,
)
from sglang_crashkit.srt.managers import data_parallel_controller as hooks
from sglang_crashkit.srt.startup import Startup, StartupError
from sglang_crashkit.srt.supervisor import Child
from unit.srt.conftest import Listener, launch
from unit.support.fake_ranks import READY, FakeClock, FakeRank
from unit.support.fake_scheduler import scheduler
from unit.support.locked_memory import locked_process
from unit.support.waiting import LONG, descriptors, wait_until

TIMEOUT = "SGLANG_CRASHKIT_STARTUP_TIMEOUT_SECS"
READY_1 = [(1.0, "ready")]
DIED = "died during initialization (exit code: "


def run(*scripts: list[tuple[float, Any]]) -> tuple[FakeClock, list[Any]]:
    """Wait for one rank for each script, on a clock of its own."""
    clock = FakeClock()
    ranks = [FakeRank(number, clock, *script) for number, script in enumerate(scripts)]
    return clock, Startup([rank.child() for rank in ranks], clock=clock).run()


def fail(*scripts: list[tuple[float, Any]]) -> StartupError:
    with pytest.raises(StartupError) as caught:
        run(*scripts)
    return caught.value


def test_without_a_limit_it_waits_on_and_what_ranks_sent_comes_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TIMEOUT, "0")
    clock, infos = run([(1e6, "ready")], [(1.0, "ready")], [(2.0, "ready")])
    assert infos == [READY | {"rank": number} for number in range(3)]
    assert clock.time == 1000.0 + 1e6


@pytest.mark.parametrize(
    ("scripts", "said"),
    [
        ([[], [(5.0, -9)]], [f"Rank 1 scheduler {DIED}-9)", "5.1 s after", "not ready: Rank 0 scheduler."]),
        ([[(1.0, "ready"), (5.0, -15)], []], [f"Rank 0 scheduler {DIED}-15)", "was killed by SIGTERM"]),
        ([READY_1, [(1.0, "ready"), (1.0, 0)]], [f"Rank 1 scheduler {DIED}0)"]),
        ([[], [(5.0, 7)]], [f"{DIED}7)", "ended with exit status 7"]),
        ([[(2.0, "begin")], [(5.0, -9)]], [f"Rank 1 scheduler {DIED}-9)"]),
        (
            [[(5.0, -15)], [], [(5.0, -9)]],
            [f"Rank 0 scheduler and Rank 2 scheduler {DIED}-15, -9).", "at the same moment as the first."],
        ),
        ([[(5.0, -9)], [(5.01, -9)]], [f"Rank 0 scheduler and Rank 1 scheduler {DIED}-9, -9).", ", first."]),
        ([[], [(5.0, "close")]], ["closed its pipe before it was ready, and its process lives"]),
        ([[], [(5.0, "text")]], ["without a status, of type str"]),
        ([[], [(5.0, {"state": "ready"})]], ["without a status, of type dict"]),
        (
            [[], [(5.0, "garble")]],
            ["Rank 1 scheduler (sglang::scheduler_TP1, pid", "cannot be read (ValueError: invalid load key"],
        ),
        ([[(2.0, "begin")], []], ["Rank 0 scheduler (sglang::", "did not finish it within 10 s"]),
        (
            [[], [(5.0, {"status": "error"})]],
            ["Initialization failed. Please see the error messages above. Rank 1 scheduler", "reported status 'error'"],
        ),
    ],
)
def test_one_that_will_not_get_ready_ends_the_wait(
    scripts: list[Any], said: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    error = fail(*scripts)
    assert error.event == "launch_failed"
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


def test_a_signal_that_comes_before_the_death_is_seen_names_who_died(started, listener: Listener, caplog, monkeypatch):
    readers, processes = launch(started, "silent", "silent")

    class EndedByUpstream(BaseException):
        """What ends the process, in a test."""

    @on_launch_phase_sigquit
    def end(_signum: int, _frame: object) -> None:
        raise EndedByUpstream

    wait = Startup.wait

    def fail(self: Startup, seconds: float | None, others: Iterable[int] = ()) -> set[int]:
        monkeypatch.setattr(Startup, "wait", wait)
        os.kill(processes[1].pid, signal.SIGKILL)
        os.waitid(os.P_PID, processes[1].pid, os.WEXITED | os.WNOWAIT)
        os.kill(os.getpid(), signal.SIGQUIT)
        return self.wait(seconds, others)

    monkeypatch.setattr(Startup, "wait", fail)
    previous = signal.signal(signal.SIGQUIT, end)
    try:
        with pytest.raises(EndedByUpstream):
            wait_for_scheduler_ready(readers, processes)
    finally:
        signal.signal(signal.SIGQUIT, previous)
    heard = listener.heard_but_members()
    assert heard["event"] == "launch_failed"
    assert heard["exit_codes"] == {str(processes[1].pid): -9}
    assert "crash kit: Rank 1 scheduler died during initialization (exit code: -9)." in caplog.text


def test_without_descriptors_left_the_sentinels_do(started, monkeypatch):
    monkeypatch.setattr(os, "pidfd_open", lambda _pid: os.open("/nonexistent", os.O_RDONLY))
    with pytest.raises(RuntimeError, match=r"Rank 1 scheduler died .* was killed by SIGKILL"):
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


# -- the data-parallel controller

#: As the controller's: a process has no pipes but its own.
SPAWN = multiprocessing.get_context("spawn")


class Controller:
    """What upstream's ``DataParallelController`` does when it starts, with the hooks where the patches put them."""

    def __init__(self, started: list[Any], groups: dict[int, list[str]], *, broken: int | None = None) -> None:
        self.scheduler_procs: list[Any] = []
        self.infos: dict[int | None, list[Any]] = {}
        self._started = started
        self._groups = groups
        self._broken = broken

    def launch_dp_schedulers(self) -> None:
        ready_events = [threading.Event() for _ in self._groups]
        threads = [
            threading.Thread(target=self._group_thread, args=(dp_rank, event), daemon=True)
            for dp_rank, event in zip(self._groups, ready_events, strict=True)
        ]
        ready_events = hooks.on_scheduler_groups(self, ready_events)
        for thread in threads:
            thread.start()
        for event in ready_events:
            event.wait()

    def _group_thread(self, dp_rank: int, ready_event: threading.Event) -> None:
        self.launch_tensor_parallel_group(None, None, 0, dp_rank)
        ready_event.set()
        time.sleep(LONG)

    @hooks.on_scheduler_group_launch
    def launch_tensor_parallel_group(self, server_args: Any, port_args: Any, base_gpu_id: int, dp_rank: int | None):
        if dp_rank == self._broken is not None:
            raise MemoryError("no fork")
        readers = []
        for rank, behaviour in enumerate(self._groups[dp_rank or 0]):
            reader, writer = SPAWN.Pipe(duplex=False)
            title = f"sglang::scheduler_DP{dp_rank}_TP{rank}"
            process = SPAWN.Process(target=scheduler, args=(title, behaviour, writer), daemon=True)
            process.start()
            self._started.append(process)
            self.scheduler_procs.append(process)
            readers.append(reader)
        readers = hooks.on_scheduler_group_started(self, readers)
        self.infos[dp_rank] = [reader.recv() for reader in readers]
        # As in upstream, the last rank's writing end stays open in this process while it waits.
        assert writer


def test_the_controller_gets_what_the_ranks_of_each_group_sent(started):
    controller = Controller(started, {0: ["ready", "ready"], 1: ["ready", "ready"]})
    controller.launch_dp_schedulers()
    wait_until(lambda: len(controller.infos) == 2, "both groups went on")
    titles = {dp_rank: [info["title"] for info in infos] for dp_rank, infos in controller.infos.items()}
    assert titles == {dp: [f"sglang::scheduler_DP{dp}_TP0", f"sglang::scheduler_DP{dp}_TP1"] for dp in (0, 1)}


def test_a_death_in_one_group_ends_the_controllers_wait(started):
    controller = Controller(started, {0: ["ready"], 1: ["dies"]})
    with pytest.raises(StartupError, match=r"^DP1 Rank 0 scheduler died during initialization \(exit code: -9\)\."):
        controller.launch_dp_schedulers()
    assert controller.infos == {}
    wait_until(lambda: len(started) == 2, "both were started")


def test_a_group_that_cannot_be_started_ends_the_controllers_wait(started, caplog):
    controller = Controller(started, {0: ["ready"], 1: ["ready"]}, broken=1)
    with pytest.raises(MemoryError, match="no fork"):
        controller.launch_dp_schedulers()
    assert "data-parallel rank 1 could not be started" in caplog.text
    wait_until(lambda: started, "the other one was started")


def test_one_group_is_waited_for_where_it_started(started):
    controller = Controller(started, {0: ["ready", "dies"]})
    with pytest.raises(StartupError, match=r"^Rank 1 scheduler died"):
        controller.launch_tensor_parallel_group(None, None, 0, None)


def test_schedulers_that_the_launcher_started_are_watched_by_pidfd(started):
    readers, processes = launch(started, "ready", "dies")
    prelaunched = {(0, rank): (processes[rank].pid, readers[rank]) for rank in (0, 1)}
    controller = SimpleNamespace(scheduler_procs=[], prelaunched_schedulers=prelaunched)
    with pytest.raises(StartupError, match=r"^Rank 1 scheduler died during initialization \(exit code: -9\)"):
        hooks.on_scheduler_group_started(controller, readers)


def test_a_controller_speaks_before_the_launching_process_which_knows_less(started, listener, monkeypatch):
    monkeypatch.setenv("SGLANG_CRASHKIT_BUDGET_SECS", "0.2")
    monkeypatch.setenv(TIMEOUT, "600")
    # Two seconds less are left to it.
    monkeypatch.setenv(settings.LAUNCH_VARIABLE, str(time.monotonic() - 599))
    controller = Controller(started, {0: ["ready"], 1: ["silent"]})
    with pytest.raises(StartupError, match=r" not ready within 600 s"):
        controller.launch_dp_schedulers()
    assert listener.heard_but_members()["event"] == "startup_timeout"
    # Schedulers that join later have all the time that there is.
    assert settings.LAUNCH_VARIABLE not in os.environ


# -- the launch


@pytest.fixture(autouse=True)
def own_environ() -> Iterator[None]:
    """What a launch sets is not there for other tests."""
    with patch.dict(os.environ):
        yield


@pytest.fixture(autouse=True)
def watches(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, bool]]:
    """How this process was asked to watch its workers, which it does not do."""
    asked: list[dict[str, bool]] = []
    monkeypatch.setattr(supervisor, "begin", lambda **how: asked.append(how))
    return asked


def test_a_handler_that_hangs_at_its_start_is_ended(
    short_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "python"
    tool.write_text("#!/bin/sh\nexec sleep 600\n")
    tool.chmod(0o755)
    monkeypatch.setattr(tempfile, "tempdir", str(short_folder))
    monkeypatch.setattr(sys, "executable", str(tool))
    monkeypatch.setattr(handler_process, "START_SECS", 0.2)
    handler_process.start(str(tmp_path / "crash"))
    assert settings.SOCKET_VARIABLE not in os.environ
    assert list((settings.fallback_folder() / "run").iterdir()) == []


@pytest.mark.parametrize(("rank", "follows"), [(0, False), (None, False), (1, True)])
def test_a_node_above_the_first_follows(
    monkeypatch: pytest.MonkeyPatch, watches: list[dict[str, bool]], rank: int | None, follows: bool
) -> None:
    monkeypatch.setattr(handler_process, "start", lambda _folder: None)
    on_engine_launch(SimpleNamespace(crash_dump_folder=None, node_rank=rank))
    assert watches == [{"follows": follows}]


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("is_program", [False, True])
def test_a_program_has_the_variables_while_ranks_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_program: bool, fails: bool
) -> None:
    seen: list[bool] = []

    def is_set() -> bool:
        return "CUDA_COREDUMP_FILE" in os.environ

    @on_wait_for_scheduler_ready
    def wait(_readers: object, _processes: object) -> str:
        seen.append(is_set())
        if fails:
            raise RuntimeError("not ready")
        return "infos"

    monkeypatch.setattr(handler_process, "start", lambda _folder: None)
    crash_exit.state.is_program = is_program
    on_engine_launch(SimpleNamespace(crash_dump_folder=str(tmp_path)))
    with pytest.raises(RuntimeError) if fails else contextlib.nullcontext():
        # Stand-ins for pipes and processes, as Ray's actors are.
        wait([object()], [object()])
    assert seen == [True]
    assert is_set() is is_program
