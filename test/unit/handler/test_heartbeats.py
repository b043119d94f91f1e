"""How the handler follows heartbeats, and pauses that are no hang: what is noted of them, and where they are told."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from sglang_crashkit.handler.heartbeats import LONG_COLLECTION, LOOK_SECS, SLOW_STEP, Pauses
from sglang_crashkit.handler.processes import TrackedProcess
from sglang_crashkit.memory import heartbeat
from sglang_crashkit.model.step import Step
from unit.support.beating import Beating
from unit.support.tracked import tracked


def test_only_schedulers_with_a_heartbeat_are_followed(caplog: pytest.LogCaptureFixture) -> None:
    world = Beating()
    rank, heartbeats = world.processes[0], world.heartbeats
    heartbeats.follow(tracked(12, "nvcc"), world.writers[10].fd)
    heartbeats.follow(rank, None)
    assert caplog.records == []
    with Path("/dev/null").open() as no_heartbeat:
        heartbeats.follow(rank, no_heartbeat.fileno())
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert (heartbeats.followed, heartbeats.unfollowed) == ({}, {10})


@pytest.mark.parametrize("role", ["server", "detokenizer", "tokenizer_worker"])
def test_another_process_that_the_server_needs_is_no_scheduler(role: str) -> None:
    world = Beating()
    process, heartbeats = tracked(12, f"sglang::{role}", is_root=role == "server"), world.heartbeats
    world.beat(10, is_waiting=True)
    for _again in range(2):
        heartbeats.follow(process, world.writers[10].fd)
    said = heartbeats.others[12].last()
    assert (said.is_waiting, said.loop_at) == (True, world.now)
    assert (heartbeats.followed, heartbeats.last_signs()) == ({}, {})


@pytest.mark.parametrize("modes", [None, 7, ["extend"], {"x": "a", "": "b", "-1": "c"}, {1: "extend"}])
def test_names_of_modes_that_are_none_are_passed_over(modes: Any) -> None:
    assert Beating().follow(modes=modes).heartbeats.followed.keys() == {10, 11}


def test_a_collection_that_began_after_the_last_sign_is_known_though_it_is_no_sign() -> None:
    world = Beating().follow(10)
    rank = world.heartbeats.followed[10]
    world.heartbeats.look(0.0)
    world.writers[10].words[heartbeat.COLLECTING_SINCE] = since = world.now + 0.2
    world.heartbeats.look(1.0)
    assert (rank.silent_secs, rank.sign.collecting_since) == (1.0, since)


# -- pauses


def step(number: int, secs: float, mode: str = "decode", began: float = 900.0) -> Step:
    return Step(number, began, began + secs, "processed", mode, (), 3, 3)


class Ranks(Beating):
    """Schedulers whose steps are made up, too."""

    def __init__(self, count: int = 1) -> None:
        super().__init__(tuple(range(10, 10 + count)))
        self.said: list[str] = []
        self.steps: dict[int, list[Step]] = {pid: [] for pid in self.writers}
        self.read: list[int] = []
        self.pauses = Pauses(self.follow().heartbeats, self._steps_of, lambda: self.now)
        self.pauses.say = self.said.append

    def _steps_of(self, process: TrackedProcess) -> tuple[Step, ...]:
        self.read.append(process.pid)
        return tuple(self.steps[process.pid])

    def pass_time(self, secs: float, *beating: int) -> None:
        """Let so much time pass, in which these ranks, by default none, go round their loops."""
        self.pass_with(self.pauses, secs, (lambda: self.beat(*beating)) if beating else None)

    @property
    def noted(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        self.pauses.add_to(lambda _at, event, **fields: found.append({"event": event} | fields))
        return found


def test_a_long_collection_is_noted_once() -> None:
    ranks = Ranks(2)
    ranks.pass_time(10.0, 10, 11)
    ranks.beat(11, long_collections=1, collection_secs=7.25, collection_ended=1009.0)
    ranks.pass_time(10.0, 10, 11)
    assert ranks.said == ["sglang::scheduler_TP1 (pid 11) stood still for 7.2 s in a garbage collection of Python"]
    its = {"pid": 11, "title": "sglang::scheduler_TP1", "seconds": 7.25}
    assert ranks.noted == [{"event": LONG_COLLECTION} | its]
    assert ranks.pauses.counts == {("sglang::scheduler_TP1", LONG_COLLECTION): 1}
    assert ranks.read == []
    # An incident much later has nothing to do with it.
    ranks.pass_time(700.0, 10, 11)
    assert ranks.noted == []


def slow_down(ranks: Ranks, secs: float, *, number: int = 100, others: int = 40, usual: float = 0.03) -> None:
    """Have a rank stand still in a step, and let it go on."""
    ranks.beat(10)
    ranks.pass_time(secs)
    ranks.steps[10] = [step(one, usual) for one in range(number - others, number)] + [step(number, secs)]
    ranks.beat(10)
    ranks.pass_time(2 * LOOK_SECS, 10)


def test_a_slow_step_is_told_with_the_median_of_its_mode() -> None:
    ranks = Ranks()
    ranks.pass_time(10.0, 10)
    slow_down(ranks, 7.0)
    (line,) = ranks.said
    assert line.startswith("sglang::scheduler_TP0 (pid 10) was in step 100 (decode, 3 requests) for 7.0 s, 233 times ")
    (noted,) = ranks.noted
    assert (noted["event"], noted["step"], noted["mode"], noted["median"]) == (SLOW_STEP, 100, "decode", 0.03)
    # The same step is still on record at the next one.
    slow_down(ranks, 8.0, number=101)
    assert [one["step"] for one in ranks.noted] == [100, 101]
    # One line a minute.
    assert len(ranks.said) == 1


@pytest.mark.parametrize(
    ("secs", "others", "usual"),
    [
        pytest.param(4.9, 40, 0.03, id="short"),
        pytest.param(7.0, 40, 0.5, id="as such steps are"),
        pytest.param(7.0, 7, 0.03, id="one of the first"),
    ],
)
def test_a_step_that_is_not_slow_is_not_told(secs: float, others: int, usual: float) -> None:
    ranks = Ranks()
    ranks.pass_time(10.0, 10)
    slow_down(ranks, secs, others=others, usual=usual)
    assert (ranks.said, ranks.noted) == ([], [])


def test_steps_are_not_read_of_a_server_that_goes_on() -> None:
    ranks = Ranks(8)
    ranks.pass_time(100.0, *ranks.writers)
    assert ranks.read == []
    ranks.beat(13, paused=True)
    ranks.pass_time(20.0)
    for pid in ranks.writers:
        ranks.beat(pid)
    ranks.pass_time(LOOK_SECS, *ranks.writers)
    # One at a look, and not of one that was paused.
    assert len(ranks.read) == 1
    ranks.pass_time(10 * LOOK_SECS, *ranks.writers)
    assert sorted(ranks.read) == [10, 11, 12, 14, 15, 16, 17]


def test_what_is_kept_is_bounded() -> None:
    ranks = Ranks()
    ranks.pass_time(LOOK_SECS, 10)
    for number in range(1, 200):
        ranks.beat(10, long_collections=number, collection_secs=2.0, collection_ended=ranks.now)
        ranks.pass_time(LOOK_SECS, 10)
    assert len(ranks.noted) == 64
    assert ranks.pauses.counts["sglang::scheduler_TP0", LONG_COLLECTION] == 199
