from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_crashkit.kernel.pidfd import ExitStatus
from sglang_crashkit.model.sample import Sample
from sglang_crashkit.watch.health import Health
from sglang_crashkit.watch.server import Death
from sglang_crashkit.watch.watching import Event, Observation, Watching
from unit.analysis import real_stacks
from unit.analysis.real_stacks import process

HANG_SECS = 10.0


class Server:
    """A server as it is seen second by second, and what is told of it."""

    def __init__(self, start_secs: float = 0.0, hang_secs: float = HANG_SECS) -> None:
        self.watching = Watching(hang_secs, start_secs)
        self.at = 1000.0
        self.rounds = self.looks_with_stacks = 0
        self.told: list[Event] = []
        self.answers: bool | None = None
        self.answers_after = 0.0
        self.state = "S"
        self.stopped: set[int] = set()
        self.gone: set[int] = set()
        self.deaths: list[Death] = []
        self.traced: set[int] = set()
        self.others: tuple[Sample, ...] = ()
        self.is_busy = False
        self.frames = real_stacks.ALL_REDUCE
        self.has_ranks = True

    def pass_by(self, secs: float, health: Health, step: float = 1.0) -> list[str]:
        """Let time go by; return the kinds of the new events."""
        before = len(self.told)
        for _ in range(int(secs / step)):
            self.at += step
            self.told += self.watching.observe(self.seen(health))
        return [event.kind for event in self.told[before:]]

    def seen(self, health: Health) -> Observation:
        self.rounds += 1
        stacks = self.watching.wants_stacks(self.at)
        self.looks_with_stacks += stacks
        ranks = tuple(self._rank(number, stacks=stacks) for number in range(2)) if self.has_ranks else ()
        ranks += self.others
        state = self.state if self.has_ranks else ""
        if not self.watching.wants_answer:
            return Observation(self.at, health, ranks, state, deaths=tuple(self.deaths))
        asking = self.watching.silent_secs < self.answers_after
        answers = None if asking else self.answers
        return Observation(self.at, health, ranks, state, answers, asking, deaths=tuple(self.deaths))

    def end(self, number: int, end: ExitStatus, *, alone: bool = True) -> None:
        """Let a rank end."""
        self.gone.add(number)
        self.deaths.append(Death(number, f"sglang::scheduler_TP{number}", self.at, end, alone))

    def _rank(self, number: int, *, stacks: bool) -> Sample:
        is_stopped = number in self.stopped
        runs = self.is_busy and not is_stopped
        one = process(number, self.frames, tp=number, time=self.at, cpu_secs=0.5 * self.rounds if runs else 0.0)
        thread = one.threads[0]
        if runs:
            inner = replace(thread.frames[0], line=self.rounds)
            thread = replace(thread, frames=(inner, *thread.frames[1:]))
        state = "X" if number in self.gone else "t" if number in self.traced else "T" if is_stopped else "S"
        return replace(one, state=state, threads=(thread,) if stacks else ())


@pytest.fixture
def server() -> Server:
    server = Server()
    server.pass_by(3, "ok")
    return server


#: What is special about a server, and then for how many seconds it says what, and which events are told.
STORIES: dict[str, tuple[dict[str, Any], list[tuple[float, Health, list[str]]]]] = {
    "it answers": ({}, [(100, "ok", [])]),
    "a stopped rank is a hang after the time, once, and then progress": (
        {"stopped": {1}},
        [(9, "waiting", []), (1, "waiting", ["hang"]), (100, "failed", []), (3, "ok", ["progress"])],
    ),
    "an answer now and then": (
        {"stopped": {1}},
        [(9, "waiting", []), (1, "ok", []), (9, "waiting", []), (1, "ok", [])],
    ),
    "a second hang": ({}, [(20, "waiting", ["hang"]), (3, "ok", ["progress"]), (20, "failed", ["hang"])]),
    "ranks that go on have more time": (
        {"is_busy": True},
        [(39, "waiting", ["excused"]), (1, "waiting", ["hang"])],
    ),
    "ranks in their loop for requests have more time": (
        {"frames": real_stacks.RECEIVE},
        [(39, "waiting", ["excused"]), (1, "waiting", ["hang"])],
    ),
    "ranks that compile have more time": ({"frames": real_stacks.COMPILE}, [(39, "waiting", ["excused"])]),
    "paused": ({"is_busy": True, "answers": True}, [(200, "failed", ["excused"]), (2, "ok", ["serving"])]),
    "a stopped rank needs no answer": ({"stopped": {1}, "answers_after": 1000.0}, [(10, "waiting", ["hang"])]),
    "stopped as a whole": ({"stopped": {0, 1}, "state": "T"}, [(50, "waiting", ["excused"])]),
    "held by a debugger": ({"traced": {1}}, [(50, "waiting", ["excused"])]),
    "it ends in order": ({}, [(100, "starting", [])]),
    "it ends and waits for the exit of its ranks": (
        {},
        [(1, "starting", []), (30, "waiting", ["excused"]), (30, "waiting", ["hang"])],
    ),
    "it was not to end": ({}, [(1, "starting", []), (1, "ok", []), (10, "waiting", ["hang"])]),
    "a rank that has just ended may be the first of all": (
        {"gone": {1}},
        [(14, "waiting", []), (10, "waiting", ["crash"])],
    ),
    "all ranks have ended": ({"gone": {0, 1}}, [(39, "waiting", ["excused"])]),
    "of another host": ({"has_ranks": False}, [(10, "silent", ["hang"]), (10, "refused", ["gone"])]),
    "of another host, its port refuses": ({"has_ranks": False}, [(10, "refused", ["gone"])]),
}


@pytest.mark.parametrize("story", STORIES)
def test_a_server_that_served(server: Server, story: str) -> None:
    special, steps = STORIES[story]
    vars(server).update(special)
    for secs, health, kinds in steps:
        assert server.pass_by(secs, health) == kinds


NEW: dict[str, tuple[dict[str, Any], list[tuple[float, Health, list[str]]]]] = {
    "it starts": ({}, [(200, "starting", [])]),
    "it does not listen yet": ({}, [(200, "refused", [])]),
    "its first check fails": ({}, [(3, "failed", []), (3, "ok", ["serving"])]),
    "it hung before it was watched": ({}, [(22, "failed", ["hang"])]),
    "without a health check its ranks tell": ({"is_busy": True}, [(50, "none", [])]),
    "without a health check one that stands hangs": ({}, [(30, "none", ["hang"])]),
}


@pytest.mark.parametrize("story", NEW)
def test_a_server_that_is_met(story: str) -> None:
    server, (special, steps) = Server(), NEW[story]
    vars(server).update(special)
    for secs, health, kinds in steps:
        assert server.pass_by(secs, health) == kinds


def test_a_hang_names_the_rank_and_how_each_fared(server: Server) -> None:
    server.stopped = {1}
    server.pass_by(HANG_SECS, "waiting")
    hang = server.told[-1]
    assert hang.text == (
        "no health check was answered for 10.0 s: "
        "sglang::scheduler_TP1 (pid 1) is stopped (state T) until somebody sends SIGCONT."
    )
    assert (hang.level, hang.secs) == ("supported", HANG_SECS)
    assert {rank.source.title: rank.manner() for rank in hang.ranks} == {
        "sglang::scheduler_TP0": "still",
        "sglang::scheduler_TP1": "stopped",
    }
    assert 3 <= server.looks_with_stacks <= 6


def test_a_process_that_is_no_rank_may_be_the_one(server: Server) -> None:
    server.is_busy = True
    fields = {"title": "sglang::detokenizer", "role": "detokenizer", "state": "T"}
    server.others = (process(9, real_stacks.DETOKENIZE, **fields),)
    assert server.pass_by(HANG_SECS, "waiting") == ["hang"]
    assert "sglang::detokenizer (pid 9) is stopped" in server.told[-1].text
    assert len(server.told[-1].ranks) == 2


def test_patience_has_its_reason_and_ends_before_upstreams_watchdog() -> None:
    server = Server(hang_secs=60.0)
    server.is_busy = True
    server.pass_by(3, "ok")
    assert server.pass_by(250, "waiting") == ["excused", "hang"]
    assert "cannot be seen; it is given 4 times the time" in server.told[-2].text
    assert server.told[-1].level == "unknown"


@pytest.mark.parametrize(("after", "kinds"), [(HANG_SECS + 2, ["excused"]), (HANG_SECS + 20, ["hang"])])
def test_the_schedulers_are_given_a_few_seconds_to_answer(server: Server, after: float, kinds: list[str]) -> None:
    server.has_ranks, server.answers, server.answers_after = False, True, after
    # So slow is the watcher that it learns of the silence when it is over.
    server.at += 12.0
    server.watching.skip(server.at)
    assert server.pass_by(20, "waiting", step=2.0)[:1] == kinds


KILLED, FAULT, RAISED = ExitStatus(signal="SIGKILL"), ExitStatus(signal="SIGSEGV"), ExitStatus(code=1)
ASKED, DONE = ExitStatus(signal="SIGTERM"), ExitStatus(code=0)


@pytest.mark.parametrize("end", [KILLED, FAULT, RAISED, ExitStatus()])
def test_a_rank_that_ends_alone_is_one_crash_at_once(server: Server, end: ExitStatus) -> None:
    server.end(1, end)
    assert server.pass_by(1, "waiting") == ["crash"]
    crash = server.told[-1]
    assert crash.text.startswith("sglang::scheduler_TP1 (pid 1) ")
    assert crash.text.endswith("; the others went on")
    assert (crash.level, crash.first) == ("established", server.deaths[0])
    # The other rank stands in a collective for ever, and ends in the end.
    assert server.pass_by(20 * HANG_SECS, "failed") == []
    assert server.watching.phase == "crashed"
    server.end(0, KILLED)
    events = server.watching.observe(Observation(server.at + 1, "refused", gone=True, deaths=tuple(server.deaths)))
    assert [event.kind for event in events] == ["gone"]


@pytest.mark.parametrize(
    ("ends", "secs", "text"),
    [
        ([(KILLED, True), (KILLED, False)], 1, "TP1 (pid 1) was killed by SIGKILL; 1 more ended after it"),
        ([(FAULT, False), (KILLED, False)], 1, "TP1 (pid 1) was killed by SIGSEGV"),
        ([(KILLED, False), (KILLED, False)], 8, ""),
        # As systemctl stop does it; one that alone was asked to end is a crash after a while.
        ([(ASKED, True), (ASKED, True)], 8, ""),
        ([(ASKED, True)], 4, ""),
        ([(ASKED, True)], 6, "TP1 (pid 1) was killed by SIGTERM; the others went on"),
        # As a server does that was asked to end: its ranks leave one after the other.
        ([(DONE, True), (DONE, True)], 8, ""),
        ([(DONE, True)], 4, ""),
        ([(DONE, True)], 6, "TP1 (pid 1) ended with exit status 0; the others went on"),
    ],
)
def test_who_ended_first_where_nobody_asked_for_it(
    server: Server, ends: list[tuple[ExitStatus, bool]], secs: float, text: str
) -> None:
    for number, (end, alone) in zip((1, 0), ends, strict=False):
        server.end(number, end, alone=alone)
    assert server.pass_by(secs, "waiting") == (["crash"] if text else [])
    assert not text or server.told[-1].text == f"sglang::scheduler_{text}"


def test_what_ends_while_the_server_ends_is_no_crash(server: Server) -> None:
    server.pass_by(1, "starting")
    server.end(1, KILLED)
    assert server.pass_by(HANG_SECS - 1, "starting") == []


def test_a_server_that_serves_without_a_rank_is_watched_on(server: Server) -> None:
    server.end(1, KILLED)
    # The answer of the moment before is still there for a while.
    assert server.pass_by(10, "ok") == ["crash"]
    assert server.pass_by(10, "ok") == ["serving"]
    assert server.told[-1].text == "the server serves on"
    server.stopped = {0}
    assert server.pass_by(HANG_SECS, "waiting") == ["hang"]
    assert "sglang::scheduler_TP0 (pid 0) is stopped (state T)" in server.told[-1].text
    server.end(0, KILLED)
    assert server.pass_by(1, "waiting") == ["crash"]


def test_a_server_never_ready_is_told_once_in_time() -> None:
    server = Server(start_secs=50.0)
    assert server.pass_by(50, "starting") == []
    assert server.pass_by(200, "starting") == ["hang"]
    assert "not ready after 50 s" in server.told[-1].text
    assert [rank.source.pid for rank in server.told[-1].ranks] == [0, 1]
    assert server.pass_by(1, "ok") == ["progress"]


def test_what_the_watcher_did_not_see_is_not_counted(server: Server) -> None:
    server.pass_by(HANG_SECS - 2, "waiting")
    server.at += 1000.0
    server.watching.skip(server.at)
    assert server.pass_by(1, "waiting") == []
    server.at += 1000.0
    assert server.pass_by(HANG_SECS, "waiting") == ["started_over"]
    assert server.pass_by(1, "waiting") == ["hang"]


@pytest.mark.parametrize("hang_secs", [2.0, 5.0, 60.0])
def test_only_a_small_part_of_a_gap_is_counted(hang_secs: float) -> None:
    # The watcher was stopped, or got no CPU, for a moment.
    server = Server(hang_secs=hang_secs)
    server.pass_by(3, "ok")
    assert server.pass_by(3 * 14.0, "waiting", step=14.0) == []
    assert server.watching.silent_secs <= 0.75 * hang_secs


def test_without_a_health_check_moving_ranks_are_progress() -> None:
    server = Server()
    assert server.pass_by(3 * HANG_SECS, "none") == ["hang"]
    server.is_busy = True
    assert server.pass_by(HANG_SECS, "none") == ["progress"]


@given(st.lists(st.sampled_from(["ok", "waiting", "failed", "silent", "refused", "starting"]), max_size=60))
def test_hangs_and_progress_alternate_and_no_hang_is_early(healths: list[Health]) -> None:
    server, silent = Server(), 0.0
    server.pass_by(1, "ok")
    for health in healths:
        silent = 0.0 if health in ("ok", "starting") and server.watching.phase != "hung" else silent + 3.0
        for kind in server.pass_by(3, health, step=3.0):
            assert kind != "hang" or silent >= HANG_SECS
            silent = 0.0 if kind == "progress" else silent
    kinds = [event.kind for event in server.told if event.kind in ("hang", "progress")]
    assert kinds == ["hang", "progress"] * (len(kinds) // 2) + ["hang"] * (len(kinds) % 2)
