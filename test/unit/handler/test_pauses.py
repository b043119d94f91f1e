"""Pauses that are no hang: what is noted of them, where they are told, and what they may take."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from sglang_crashkit.handler.heartbeats import LONG_COLLECTION, LOOK_SECS, SLOW_STEP, Heartbeats, Pauses
from sglang_crashkit.handler.processes import ProcessTree, TrackedProcess
from sglang_crashkit.memory import heartbeat
from sglang_crashkit.memory.heartbeat import HeartbeatWriter
from sglang_crashkit.model.step import Step
from unit.support.tracked import tracked


def step(number: int, secs: float, mode: str = "decode", began: float = 900.0) -> Step:
    return Step(number, began, began + secs, "processed", mode, (), 3, 3)


WORDS = {"long_collections": heartbeat.LONG_COLLECTIONS, "collection_secs": heartbeat.COLLECTION_SECS}
WORDS |= {"collection_ended": heartbeat.COLLECTION_ENDED, "flags": heartbeat.FLAGS}


class Ranks:
    """Schedulers whose heartbeats and steps are made up, on a clock of their own."""

    made: list[Ranks] = []  # noqa: RUF012 - all that a test made

    def __init__(self, *pids: int) -> None:
        self.made.append(self)
        self.now = 1000.0
        self.said: list[str] = []
        self.steps: dict[int, list[Step]] = {pid: [] for pid in pids}
        self.read: list[int] = []
        self.tree, self.writers = ProcessTree(os.getpid()), {pid: HeartbeatWriter() for pid in pids}
        self.heartbeats = Heartbeats(self.tree, now=lambda: self.now)
        self.beat()
        for pid, writer in self.writers.items():
            self.heartbeats.follow(tracked(pid, f"sglang::scheduler_TP{pid}"), writer.fd)
        self.pauses = Pauses(self.heartbeats, self._steps_of, lambda: self.now)
        self.pauses.say = self.said.append

    def close(self) -> None:
        for each in (*self.heartbeats.followed.values(), *self.writers.values(), self.tree):
            each.close()

    def _steps_of(self, process: TrackedProcess) -> tuple[Step, ...]:
        self.read.append(process.pid)
        return tuple(self.steps[process.pid])

    def beat(self, *pids: int, **fields: float) -> None:
        for pid in pids or self.writers:
            words = self.writers[pid].words
            words[heartbeat.LOOP_TIME] = self.now
            for name, value in fields.items():
                words[WORDS[name]] = value

    def pass_time(self, secs: float, *beating: int) -> None:
        """Let so much time pass, in which these ranks, by default none, go round their loops."""
        end = self.now + secs
        while self.now < end:
            self.now = min(end, max(self.now + 0.01, self.pauses.next_due()))
            for pid in beating:
                self.beat(pid)
            self.pauses.act_on_time()

    @property
    def noted(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        self.pauses.add_to(lambda _at, event, **fields: found.append({"event": event} | fields))
        return found


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    while Ranks.made:
        Ranks.made.pop().close()


def test_a_long_collection_is_noted_once() -> None:
    ranks = Ranks(0, 1)
    ranks.pass_time(10.0, 0, 1)
    ranks.beat(1, long_collections=1, collection_secs=7.25, collection_ended=1009.0)
    ranks.pass_time(10.0, 0, 1)
    assert ranks.said == ["sglang::scheduler_TP1 (pid 1) stood still for 7.2 s in a garbage collection of Python"]
    its = {"pid": 1, "title": "sglang::scheduler_TP1", "seconds": 7.25}
    assert ranks.noted == [{"event": LONG_COLLECTION} | its]
    assert ranks.pauses.counts == {("sglang::scheduler_TP1", LONG_COLLECTION): 1}
    assert ranks.read == []
    # An incident much later has nothing to do with it.
    ranks.pass_time(700.0, 0, 1)
    assert ranks.noted == []


def slow_down(ranks: Ranks, pid: int, secs: float, *, number: int = 100, others: int = 40, usual: float = 0.03) -> None:
    """Have a rank stand still in a step, and let it go on."""
    ranks.beat(pid)
    ranks.pass_time(secs)
    ranks.steps[pid] = [step(one, usual) for one in range(number - others, number)] + [step(number, secs)]
    ranks.beat(pid)
    ranks.pass_time(2 * LOOK_SECS, pid)


def test_a_slow_step_is_told_with_the_median_of_its_mode() -> None:
    ranks = Ranks(0)
    ranks.pass_time(10.0, 0)
    slow_down(ranks, 0, 7.0)
    (line,) = ranks.said
    assert line.startswith("sglang::scheduler_TP0 (pid 0) was in step 100 (decode, 3 requests) for 7.0 s, 233 times ")
    (noted,) = ranks.noted
    assert (noted["event"], noted["step"], noted["mode"], noted["median"]) == (SLOW_STEP, 100, "decode", 0.03)
    # The same step is still on record at the next one.
    slow_down(ranks, 0, 8.0, number=101)
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
    ranks = Ranks(0)
    ranks.pass_time(10.0, 0)
    slow_down(ranks, 0, secs, others=others, usual=usual)
    assert (ranks.said, ranks.noted) == ([], [])


def test_steps_are_not_read_of_a_server_that_goes_on() -> None:
    ranks = Ranks(*range(8))
    ranks.pass_time(100.0, *ranks.writers)
    assert ranks.read == []
    ranks.beat(3, flags=heartbeat.PAUSED)
    ranks.pass_time(20.0)
    for pid in ranks.writers:
        ranks.beat(pid, flags=0)
    ranks.pass_time(LOOK_SECS, *ranks.writers)
    # One at a look, and not of one that was paused.
    assert len(ranks.read) == 1
    ranks.pass_time(10 * LOOK_SECS, *ranks.writers)
    assert sorted(ranks.read) == [0, 1, 2, 4, 5, 6, 7]


def test_what_is_kept_is_bounded() -> None:
    ranks = Ranks(0)
    ranks.pass_time(LOOK_SECS, 0)
    for number in range(1, 200):
        ranks.beat(0, long_collections=number, collection_secs=2.0, collection_ended=ranks.now)
        ranks.pass_time(LOOK_SECS, 0)
    assert len(ranks.noted) == 64
    assert ranks.pauses.counts["sglang::scheduler_TP0", LONG_COLLECTION] == 199
