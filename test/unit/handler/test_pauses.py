"""Pauses that are no hang: what is noted of them, where they are told, and what they may take."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_crashkit.handler.pauses import LONG_COLLECTION, LOOK_SECS, SLOW_STEP, Pauses
from sglang_crashkit.memory.heartbeat import Heartbeat
from sglang_crashkit.model.step import Step

IDLE = Heartbeat(1000.0, 0.0, 0, 0, paused=False, is_busy=False, is_off=False)


def step(number: int, secs: float, mode: str = "decode", began: float = 900.0) -> Step:
    return Step(number, began, began + secs, "processed", mode, (), 3, 3)


class Ranks:
    """Schedulers whose heartbeats and steps are made up, on a clock of their own."""

    def __init__(self, *pids: int) -> None:
        self.now = 1000.0
        self.said: list[str] = []
        self.signs = dict.fromkeys(pids, IDLE)
        self.steps: dict[int, list[Step]] = {pid: [] for pid in pids}
        self.read: list[int] = []
        processes = {pid: SimpleNamespace(pid=pid, title=f"sglang::scheduler_TP{pid}") for pid in pids}
        followed: Any = {
            pid: SimpleNamespace(process=process, last=lambda pid=pid: self.signs[pid])
            for pid, process in processes.items()
        }
        heartbeats: Any = SimpleNamespace(followed=followed, living=lambda: list(followed.values()))
        self.pauses = Pauses(heartbeats, self._steps_of, lambda: self.now)
        self.pauses.say = self.said.append

    def _steps_of(self, process: Any) -> tuple[Step, ...]:
        self.read.append(process.pid)
        return tuple(self.steps[process.pid])

    def beat(self, *pids: int, **fields: Any) -> None:
        for pid in pids or self.signs:
            self.signs[pid] = replace(self.signs[pid], loop_at=self.now, **fields)

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
    ranks.pass_time(100.0, *ranks.signs)
    assert ranks.read == []
    ranks.beat(3, paused=True)
    ranks.pass_time(20.0)
    for pid in ranks.signs:
        ranks.beat(pid, paused=False)
    ranks.pass_time(LOOK_SECS, *ranks.signs)
    # One at a look, and not of one that was paused.
    assert len(ranks.read) == 1
    ranks.pass_time(10 * LOOK_SECS, *ranks.signs)
    assert sorted(ranks.read) == [0, 1, 2, 4, 5, 6, 7]


def test_what_is_kept_is_bounded() -> None:
    ranks = Ranks(0)
    ranks.pass_time(LOOK_SECS, 0)
    for number in range(1, 200):
        ranks.beat(0, long_collections=number, collection_secs=2.0, collection_ended=ranks.now)
        ranks.pass_time(LOOK_SECS, 0)
    assert len(ranks.noted) == 64
    assert ranks.pauses.counts["sglang::scheduler_TP0", LONG_COLLECTION] == 199
