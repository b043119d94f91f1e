"""The hooks that wait for ranks, called as upstream's launcher and its data-parallel controller call them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_crashkit.settings import LAUNCH_VARIABLE
from sglang_crashkit.srt import startup
from sglang_crashkit.srt.entrypoints.engine import on_wait_for_scheduler_ready
from sglang_crashkit.srt.managers import data_parallel_controller as hooks
from sglang_crashkit.srt.readiness import StartupError
from unit.srt.conftest import Listener
from unit.srt.fake_scheduler import scheduler
from unit.waiting import LONG, wait_until

CONTEXT = multiprocessing.get_context("fork")
#: As the controller's: a process has no pipes but its own.
SPAWN = multiprocessing.get_context("spawn")
TIMEOUT = "SGLANG_CRASHKIT_STARTUP_TIMEOUT_SECS"


def upstream_wait(scheduler_pipe_readers: Any, scheduler_procs: Any) -> Any:
    return "upstream's"


wait_for_scheduler_ready = on_wait_for_scheduler_ready(upstream_wait)


@pytest.fixture
def started() -> Iterator[list[Any]]:
    processes: list[Any] = []
    yield processes
    for process in processes:
        process.kill()
        process.join(LONG)


def launch(started: list[Any], *behaviours: str) -> tuple[list[Any], list[Any]]:
    readers, processes = [], []
    for rank, behaviour in enumerate(behaviours):
        reader, writer = CONTEXT.Pipe(duplex=False)
        title = f"sglang::scheduler_TP{rank}"
        process = CONTEXT.Process(target=scheduler, args=(title, behaviour, writer), daemon=True)
        process.start()
        writer.close()
        started.append(process)
        readers.append(reader)
        processes.append(process)
    return readers, processes


def test_the_launcher_gets_what_the_ranks_sent(started):
    readers, processes = launch(started, "ready", "ready")
    infos = wait_for_scheduler_ready(readers, processes)
    assert [info["title"] for info in infos] == ["sglang::scheduler_TP0", "sglang::scheduler_TP1"]


def test_a_death_is_raised_when_the_incident_is_whole(started, listener: Listener, caplog):
    readers, processes = launch(started, "silent", "dies")
    with pytest.raises(RuntimeError, match=r"Rank 1 scheduler died during initialization \(exit code: -9\)"):
        wait_for_scheduler_ready(scheduler_pipe_readers=readers, scheduler_procs=processes)
    heard = listener.heard_but_members()
    assert heard["event"] == "launch_failed"
    assert heard["message"].startswith("Rank 1 scheduler died")
    assert heard["titles"] == {str(processes[1].pid): "sglang::scheduler_TP1"}
    assert heard["exit_codes"] == {str(processes[1].pid): -9}
    assert [record.message.split(":")[0] for record in caplog.records] == ["crash kit", "crash kit"]
    assert "incident /incident" in caplog.records[1].message


def test_silence_beyond_the_limit_is_an_incident(started, listener: Listener, monkeypatch):
    monkeypatch.setenv(TIMEOUT, "0.5")
    monkeypatch.setenv("SGLANG_CRASHKIT_BUDGET_SECS", "0.2")
    readers, processes = launch(started, "ready", "silent")
    with pytest.raises(RuntimeError, match=r"Rank 1 scheduler not ready within 0\.5 s"):
        wait_for_scheduler_ready(readers, processes)
    assert listener.heard_but_members()["event"] == "startup_timeout"


def test_a_death_without_a_crash_handler_is_raised(started):
    readers, processes = launch(started, "silent", "dies")
    with pytest.raises(RuntimeError, match="Rank 1 scheduler died"):
        wait_for_scheduler_ready(readers, processes)


def test_a_switched_off_kit_leaves_the_wait_to_upstream(started, monkeypatch):
    monkeypatch.setenv("SGLANG_CRASHKIT_ENABLED", "0")
    assert wait_for_scheduler_ready(*launch(started, "ready")) == "upstream's"


def test_stand_ins_for_processes_are_left_to_upstream():
    assert wait_for_scheduler_ready([object()], [object()]) == "upstream's"


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


def test_a_rank_that_dies_in_one_group_ends_the_controllers_wait(started):
    controller = Controller(started, {0: ["ready"], 1: ["dies"]})
    began = time.monotonic()
    with pytest.raises(StartupError) as caught:
        controller.launch_dp_schedulers()
    assert time.monotonic() - began < LONG / 2
    assert str(caught.value).startswith("DP1 Rank 0 scheduler died during initialization (exit code: -9).")
    assert controller.infos == {}


def test_a_rank_that_was_ready_and_dies_while_another_group_loads_is_named(started):
    controller = Controller(started, {0: ["ready"], 1: ["silent"]})

    def kill() -> None:
        wait_until(lambda: len(started) == 2, "both were started")
        time.sleep(0.3)
        for process in started:
            if process in controller.scheduler_procs[:1]:
                os.kill(process.pid, signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()
    with pytest.raises(StartupError, match=r"^DP\d Rank 0 scheduler died"):
        controller.launch_dp_schedulers()


def test_a_group_that_cannot_be_started_ends_the_controllers_wait(started, caplog):
    controller = Controller(started, {0: ["ready"], 1: ["ready"]}, broken=1)
    with pytest.raises(MemoryError, match="no fork"):
        controller.launch_dp_schedulers()
    assert "data-parallel rank 1 could not be started" in caplog.text


def test_one_group_for_all_ranks_is_waited_for_where_it_is_started(started):
    controller = Controller(started, {0: ["ready", "ready"]})
    controller.launch_tensor_parallel_group(None, None, 0, None)
    assert len(controller.infos[None]) == 2
    controller = Controller(started, {0: ["ready", "dies"]})
    with pytest.raises(StartupError, match=r"^Rank 1 scheduler died"):
        controller.launch_tensor_parallel_group(None, None, 0, None)


def test_schedulers_that_the_launcher_started_are_watched_by_pidfd(started):
    readers, processes = launch(started, "ready", "dies")
    prelaunched = {(0, rank): (processes[rank].pid, readers[rank]) for rank in (0, 1)}
    controller = SimpleNamespace(scheduler_procs=[], prelaunched_schedulers=prelaunched)
    with pytest.raises(StartupError, match=r"^Rank 1 scheduler died during initialization \(exit code: -9\)"):
        hooks.on_scheduler_group_started(controller, readers)


def test_a_controller_that_waits_too_long_tells_the_crash_handler(started, listener: Listener, monkeypatch):
    # Long enough for an interpreter's start on a loaded machine.
    monkeypatch.setenv(TIMEOUT, "8")
    monkeypatch.setenv("SGLANG_CRASHKIT_BUDGET_SECS", "0.2")
    controller = Controller(started, {0: ["ready"], 1: ["silent"]})
    with pytest.raises(StartupError, match=r"^DP1 Rank 0 scheduler not ready within 8 s"):
        controller.launch_dp_schedulers()
    assert listener.heard_but_members()["event"] == "startup_timeout"


def test_a_controller_speaks_before_the_launching_process_which_knows_less(started, monkeypatch):
    monkeypatch.setenv(TIMEOUT, "600")
    monkeypatch.setenv(LAUNCH_VARIABLE, str(time.monotonic() - 599))
    controller = Controller(started, {0: ["ready"], 1: ["silent"]})
    began = time.monotonic()
    with pytest.raises(StartupError, match=r" not ready within 600 s"):
        controller.launch_dp_schedulers()
    assert time.monotonic() - began < LONG
    # Schedulers that join later have all the time that there is.
    assert startup.launched_at() is None


def test_a_switched_off_kit_leaves_the_controller_to_upstream(started, monkeypatch):
    monkeypatch.setenv("SGLANG_CRASHKIT_ENABLED", "0")
    readers, _processes = launch(started, "ready")
    events = [threading.Event()]
    assert hooks.on_scheduler_groups(SimpleNamespace(), events) is events
    assert hooks.on_scheduler_group_started(SimpleNamespace(), readers) is readers
