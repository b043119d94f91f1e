from __future__ import annotations

from dataclasses import replace

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
        state = "X" if number in self.gone else "T" if is_stopped else "S"
        return replace(one, state=state, threads=(thread,) if stacks else ())


@pytest.fixture
def server() -> Server:
    server = Server()
    server.pass_by(3, "ok")
    return server


def test_a_server_that_answers_is_told_of_once_and_never_looked_at_closely(server: Server) -> None:
    assert server.pass_by(10 * HANG_SECS, "ok") == []
    assert [event.kind for event in server.told] == ["serving"]
    assert server.looks_with_stacks == 0
    assert server.watching.phase == "serving"


def test_a_stopped_rank_is_a_hang_after_the_time_and_is_told_of_once(server: Server) -> None:
    server.stopped = {1}
    assert server.pass_by(HANG_SECS - 1, "waiting") == []
    assert server.pass_by(1, "waiting") == ["hang"]
    hang = server.told[-1]
    assert hang.text == (
        "no health check was answered for 10.0 s: "
        "sglang::scheduler_TP1 (pid 1) is stopped (state T) until somebody sends SIGCONT."
    )
    assert {rank.source.title: rank.manner() for rank in hang.ranks}["sglang::scheduler_TP1"] == "stopped"
    assert server.pass_by(10 * HANG_SECS, "failed") == []
    assert server.watching.phase == "hung"


def test_progress_is_told_and_the_next_hang_is_another_one(server: Server) -> None:
    server.pass_by(2 * HANG_SECS, "waiting")
    assert server.pass_by(3, "ok") == ["progress"]
    assert server.told[-1].secs == pytest.approx(2 * HANG_SECS, abs=2)
    assert server.pass_by(2 * HANG_SECS, "failed") == ["hang"]


def test_an_answer_now_and_then_is_no_hang(server: Server) -> None:
    for _ in range(20):
        assert server.pass_by(HANG_SECS - 1, "waiting") == []
        assert server.pass_by(1, "ok") == []


def test_ranks_that_go_on_are_given_more_time_which_is_said_once(server: Server) -> None:
    server.is_busy = True
    assert server.pass_by(4 * HANG_SECS - 1, "waiting") == ["excused"]
    assert "given 4 times the time" in server.told[-1].text
    assert server.pass_by(1, "waiting") == ["hang"]
    assert server.told[-1].level == "unknown"


def test_that_time_ends_before_upstreams_watchdog_ends_the_server() -> None:
    server = Server(hang_secs=60.0)
    server.is_busy = True
    server.pass_by(3, "ok")
    assert server.pass_by(250, "waiting") == ["excused", "hang"]


def test_a_paused_server_never_hangs(server: Server) -> None:
    server.is_busy, server.answers = True, True
    assert server.pass_by(20 * HANG_SECS, "failed") == ["excused"]
    assert server.pass_by(2, "ok") == ["serving"]


@pytest.mark.parametrize(("after", "kinds"), [(HANG_SECS + 2, ["excused"]), (HANG_SECS + 20, ["hang"])])
def test_the_schedulers_are_given_a_few_seconds_to_answer(server: Server, after: float, kinds: list[str]) -> None:
    server.has_ranks, server.answers, server.answers_after = False, True, after
    # So slow is the watcher that it learns of the silence when it is over.
    server.at += 12.0
    server.watching.skip(server.at)
    assert server.pass_by(20, "waiting", step=2.0)[:1] == kinds


def test_a_stopped_rank_needs_no_answer(server: Server) -> None:
    server.stopped, server.answers_after = {1}, 1000.0
    assert server.pass_by(HANG_SECS, "waiting") == ["hang"]


def test_a_server_that_is_stopped_as_a_whole_does_not_hang(server: Server) -> None:
    server.stopped, server.state = {0, 1}, "T"
    assert server.pass_by(5 * HANG_SECS, "waiting") == ["excused"]


def test_a_server_that_ends_in_order_does_not_hang(server: Server) -> None:
    assert server.pass_by(10 * HANG_SECS, "starting") == []
    assert server.told[-1].kind == "serving"


def test_a_server_that_waits_for_the_exit_of_its_ranks_has_more_time(server: Server) -> None:
    server.pass_by(1, "starting")
    assert server.pass_by(3 * HANG_SECS, "waiting") == ["excused"]
    assert "as one does that is to end" in server.told[-1].text
    assert server.pass_by(3 * HANG_SECS, "waiting") == ["hang"]


def test_a_rank_that_has_just_ended_may_be_the_first_of_all(server: Server) -> None:
    server.gone.add(1)
    assert server.pass_by(1.4 * HANG_SECS, "waiting") == []
    assert server.pass_by(HANG_SECS, "waiting") == ["crash"]
    assert "(pid 1) is gone" in server.told[-1].text


KILLED, FAULT, RAISED = ExitStatus(signal="SIGKILL"), ExitStatus(signal="SIGSEGV"), ExitStatus(code=1)


@pytest.mark.parametrize("end", [KILLED, FAULT, RAISED, ExitStatus(code=0), ExitStatus()])
def test_a_rank_that_ends_alone_is_a_crash_at_once_and_nothing_else_after_it(server: Server, end: ExitStatus) -> None:
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


def test_the_first_of_several_is_named(server: Server) -> None:
    server.end(1, KILLED)
    server.end(0, KILLED, alone=False)
    assert server.pass_by(1, "waiting") == ["crash"]
    assert server.told[-1].text == "sglang::scheduler_TP1 (pid 1) was killed by SIGKILL; 1 more ended after it"


def test_a_fault_is_a_crash_also_where_the_others_end_with_it(server: Server) -> None:
    server.end(1, FAULT, alone=False)
    server.end(0, KILLED, alone=False)
    assert server.pass_by(1, "waiting") == ["crash"]
    assert (server.told[-1].text, server.told[-1].level) == (
        "sglang::scheduler_TP1 (pid 1) was killed by SIGSEGV",
        "supported",
    )


def test_ranks_that_are_killed_together_are_no_crash(server: Server) -> None:
    server.end(0, KILLED, alone=False)
    server.end(1, KILLED, alone=False)
    events = server.watching.observe(Observation(server.at + 1, "refused", gone=True, deaths=tuple(server.deaths)))
    assert [event.kind for event in events] == ["gone"]


def test_processes_that_are_all_asked_to_end_are_no_crash(server: Server) -> None:
    # As systemctl stop does it; the main process takes its time.
    server.end(1, ExitStatus(signal="SIGTERM"))
    server.pass_by(1, "waiting")
    server.end(0, ExitStatus(signal="SIGTERM"))
    assert server.pass_by(HANG_SECS - 2, "waiting") == []


def test_a_rank_that_alone_was_asked_to_end_is_a_crash_after_a_while(server: Server) -> None:
    server.end(1, ExitStatus(signal="SIGTERM"))
    assert server.pass_by(4, "waiting") == []
    assert server.pass_by(2, "waiting") == ["crash"]


def test_what_ends_while_the_server_ends_is_no_crash(server: Server) -> None:
    server.pass_by(1, "starting")
    server.end(1, KILLED)
    assert server.pass_by(HANG_SECS - 1, "starting") == []


def test_a_server_that_serves_on_without_a_rank_is_said_to_and_watched_on(server: Server) -> None:
    server.end(1, KILLED)
    # The answer of the moment before is still there for a while.
    assert server.pass_by(10, "ok") == ["crash"]
    assert server.pass_by(10, "ok") == ["serving"]
    assert server.told[-1].text == "the server serves on"
    server.stopped = {0}
    assert server.pass_by(HANG_SECS, "waiting") == ["hang"]
    assert server.told[-1].text.endswith(
        "sglang::scheduler_TP0 (pid 0) is stopped (state T) until somebody sends SIGCONT."
    )


def test_a_hang_that_ends_in_a_death_is_a_crash(server: Server) -> None:
    server.stopped = {1}
    assert server.pass_by(HANG_SECS, "waiting") == ["hang"]
    server.end(1, KILLED)
    assert server.pass_by(1, "waiting") == ["crash"]


def test_a_server_that_answers_again_was_not_to_end(server: Server) -> None:
    server.pass_by(1, "starting")
    server.pass_by(1, "ok")
    assert server.pass_by(HANG_SECS, "waiting") == ["hang"]


@pytest.mark.parametrize("health", ["starting", "refused"])
def test_a_server_that_starts_does_not_hang(health: Health) -> None:
    server = Server()
    assert server.pass_by(20 * HANG_SECS, health) == []
    assert server.watching.phase == "starting"


def test_a_server_that_is_never_ready_is_told_of_once_after_its_own_time() -> None:
    server = Server(start_secs=50.0)
    assert server.pass_by(50, "starting") == []
    assert server.pass_by(200, "starting") == ["hang"]
    assert "not ready after 50 s" in server.told[-1].text
    assert server.pass_by(1, "ok") == ["progress"]


def test_the_first_answer_is_told_also_after_a_check_that_failed() -> None:
    server = Server()
    assert server.pass_by(3, "failed") == []
    assert server.pass_by(3, "ok") == ["serving"]


def test_one_that_hung_before_it_was_watched_hangs() -> None:
    server = Server()
    assert server.pass_by(2 * HANG_SECS + 2, "failed") == ["hang"]


def test_what_the_watcher_did_not_see_is_not_counted(server: Server) -> None:
    server.pass_by(HANG_SECS - 2, "waiting")
    server.at += 1000.0
    assert server.pass_by(HANG_SECS, "waiting") == ["started_over"]
    assert server.pass_by(1, "waiting") == ["hang"]


@pytest.mark.parametrize("hang_secs", [2.0, 5.0, 60.0])
def test_of_a_gap_much_less_than_the_time_to_a_hang_is_counted(hang_secs: float) -> None:
    # The watcher was stopped, or got no CPU, for a moment.
    server = Server(hang_secs=hang_secs)
    server.pass_by(3, "ok")
    assert server.pass_by(3 * 14.0, "waiting", step=14.0) == []
    assert server.watching.silent_secs <= 0.75 * hang_secs


def test_time_that_is_skipped_is_not_counted(server: Server) -> None:
    server.at += 1000.0
    server.watching.skip(server.at)
    assert server.pass_by(1, "ok") == []


def test_a_port_that_refuses_connections_says_that_a_server_of_another_host_is_gone(server: Server) -> None:
    server.has_ranks = False
    assert server.pass_by(HANG_SECS, "refused") == ["gone"]


def test_a_server_of_another_host_hangs_by_its_health_check_alone(server: Server) -> None:
    server.has_ranks = False
    assert server.pass_by(HANG_SECS, "silent") == ["hang"]
    assert (server.told[-1].level, server.told[-1].ranks) == ("unknown", ())
    assert server.pass_by(HANG_SECS, "refused") == ["gone"]


def test_the_end_of_the_server_is_told(server: Server) -> None:
    events = server.watching.observe(Observation(server.at + 1, "ok", gone=True))
    assert [event.kind for event in events] == ["gone"]


def test_without_a_health_check_ranks_that_stand_hang_until_they_go_on() -> None:
    server = Server()
    server.is_busy = True
    assert server.pass_by(5 * HANG_SECS, "none") == []
    server.is_busy = False
    assert server.pass_by(3 * HANG_SECS, "none") == ["hang"]
    server.is_busy = True
    assert server.pass_by(HANG_SECS, "none") == ["progress"]


def test_stacks_are_looked_at_a_few_times_before_the_alarm(server: Server) -> None:
    server.pass_by(HANG_SECS, "waiting")
    assert 3 <= server.looks_with_stacks <= 6


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
