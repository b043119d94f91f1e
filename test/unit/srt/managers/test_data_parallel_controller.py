from __future__ import annotations

import multiprocessing
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_crashkit.settings import LAUNCH_VARIABLE
from sglang_crashkit.srt import startup
from sglang_crashkit.srt.managers import data_parallel_controller as hooks
from sglang_crashkit.srt.startup import StartupError
from unit.srt.conftest import launch
from unit.support.fake_scheduler import scheduler
from unit.support.waiting import LONG, wait_until

#: As the controller's: a process has no pipes but its own.
SPAWN = multiprocessing.get_context("spawn")


TIMEOUT = "SGLANG_CRASHKIT_STARTUP_TIMEOUT_SECS"


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
    monkeypatch.setenv(LAUNCH_VARIABLE, str(time.monotonic() - 599))
    controller = Controller(started, {0: ["ready"], 1: ["silent"]})
    with pytest.raises(StartupError, match=r" not ready within 600 s"):
        controller.launch_dp_schedulers()
    assert listener.heard_but_members()["event"] == "startup_timeout"
    # Schedulers that join later have all the time that there is.
    assert startup.launched_at() is None
