from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from sglang_crashkit.model.sample import Frame
from sglang_crashkit.watch.standstill import RankLook, Standing, judge, standing_of

IN_COLLECTIVE = (Frame("broadcast", "torch/distributed/distributed_c10d.py", 3787), Frame("event_loop", "s.py", 1))
IN_MODEL = (Frame("forward", "sglang/srt/models/llama.py", 10), Frame("run_batch", "s.py", 2))
LOADING = (Frame("load_weights", "sglang/srt/model_loader/loader.py", 10),)
COMPILING = (Frame("wait", "subprocess.py", 1), Frame("build", "flashinfer/jit/core.py", 5))
RECEIVING = (Frame("recv_requests", "sglang/srt/managers/scheduler.py", 10),)


def looks_of(
    *,
    states: str = "SSSS",
    cpu: float = 0.0,
    switches: int = 0,
    stacks: Sequence[tuple[Frame, ...]] = (IN_COLLECTIVE,),
    tp: int = 0,
) -> list[RankLook]:
    """Return looks a second apart, at a rank that uses so much CPU time and wakes up so often in each."""
    return [
        RankLook(
            float(number),
            100 + tp,
            f"sglang::scheduler_TP{tp}",
            state,
            cpu_secs=number * cpu,
            switches=number * switches,
            frames=stacks[number % len(stacks)],
        )
        for number, state in enumerate(states)
    ]


def moved(frames: tuple[Frame, ...]) -> list[tuple[Frame, ...]]:
    return [(replace(frames[0], line=line), *frames[1:]) for line in range(1, 5)]


GONE = standing_of(looks_of(states="SSSX", tp=1))
STOPPED = standing_of(looks_of(states="SSTT", tp=1))
STILL = standing_of(looks_of())
SPINNING = standing_of(looks_of(states="RRRR", cpu=1.0, stacks=[IN_MODEL]))
MOVING = standing_of(looks_of(states="RRRR", cpu=1.0, stacks=moved(IN_MODEL)))
LOADS = standing_of(looks_of(stacks=[LOADING]))
COMPILES = standing_of(looks_of(stacks=[COMPILING]))
RECEIVES = standing_of(looks_of(stacks=[RECEIVING]))
TRACED = standing_of(looks_of(states="SSSt"))


@pytest.mark.parametrize(
    ("looks", "manner"),
    [
        (looks_of(states="SSST"), "stopped"),
        (looks_of(states="SDDD"), "asleep"),
        (looks_of(states="SSSD", cpu=0.1, switches=50), "moving"),
        (looks_of(states="SSSt"), "traced"),
        (looks_of(states="SSSZ"), "gone"),
        (looks_of(states="SSSX"), "gone"),
        (looks_of(), "still"),
        (looks_of(switches=100), "moving"),
        (looks_of(states="RRRR", cpu=1.0), "spinning"),
        (looks_of(states="RRRR", cpu=1.0)[:2], "moving"),
        (looks_of(states="RRRR", cpu=1.0, stacks=moved(IN_MODEL)), "moving"),
        (looks_of(stacks=moved(IN_COLLECTIVE)), "moving"),
        (looks_of(stacks=[()]), "still"),
        (looks_of(states="RRRR", cpu=1.0, stacks=[()]), "moving"),
        (looks_of()[:1], "unknown"),
    ],
)
def test_how_a_rank_fares(looks: list[RankLook], manner: str) -> None:
    assert standing_of(looks).manner == manner


def test_what_was_seen_is_said_with_its_figures() -> None:
    function = "broadcast (torch/distributed/distributed_c10d.py:3787)"
    assert STILL.words == f"stood still for 3.0 s; it waited in a collective in {function}"
    assert (
        SPINNING.words
        == "used 3.0 s of CPU time in 3.0 s at one line; it was in forward (sglang/srt/models/llama.py:10)"
    )
    assert STOPPED.words == "was stopped (state T) until somebody sends SIGCONT"


@pytest.mark.parametrize(
    ("standings", "outcome"),
    [
        ([STOPPED, STILL], "hang"),
        ([STOPPED, MOVING], "hang"),
        ([STILL, SPINNING], "hang"),
        ([STILL, MOVING], "hang"),
        ([SPINNING], "hang"),
        ([STILL], "hang"),
        ([], "hang"),
        ([MOVING, MOVING], "patience"),
        ([LOADS, STILL], "patience"),
        ([COMPILES, STILL], "patience"),
        ([LOADS, STOPPED], "hang"),
        ([GONE, STILL], "crash"),
        ([GONE, STOPPED], "crash"),
        ([GONE, GONE], "patience"),
        ([TRACED, STILL], "excused"),
    ],
)
def test_a_server_whose_health_check_fails_hangs_when_a_rank_stands(standings: list[Standing], outcome: str) -> None:
    assert judge(standings).outcome == outcome


def test_only_those_that_the_kernel_holds_are_named_where_there_are_any() -> None:
    reason = judge([STILL, STOPPED]).reason
    assert reason == "sglang::scheduler_TP1 (pid 101) was stopped (state T) until somebody sends SIGCONT"


@pytest.mark.parametrize(("state", "outcome"), [("T", "excused"), ("S", "hang")])
def test_a_server_stopped_as_a_whole_does_not_hang(state: str, outcome: str) -> None:
    assert judge([STOPPED, STOPPED], server_state=state).outcome == outcome


@pytest.mark.parametrize(
    ("standings", "outcome"),
    [([MOVING], "excused"), ([SPINNING], "excused"), ([], "excused"), ([STILL], "hang"), ([STOPPED], "hang")],
)
def test_schedulers_that_answer_something_else_excuse_all_but_what_stands_for_sure(
    standings: list[Standing], outcome: str
) -> None:
    assert judge(standings, answers=True).outcome == outcome


def test_where_no_rank_is_seen_to_stand_the_level_is_unknown() -> None:
    assert [judge([]).level, judge([MOVING]).level, judge([STILL]).level] == ["unknown", "unknown", "supported"]


def test_too_few_looks_give_patience_without_a_word() -> None:
    judgement = judge([standing_of(looks_of()[:1])])
    assert (judgement.outcome, judgement.reason) == ("patience", "")


@pytest.mark.parametrize(
    ("standings", "outcome"),
    [
        ([STILL, MOVING], "hang"),
        ([STOPPED], "hang"),
        ([MOVING], "excused"),
        ([SPINNING], "excused"),
        ([RECEIVES], "excused"),
        ([LOADS, STILL], "excused"),
        ([], "excused"),
    ],
)
def test_without_a_health_check_only_what_stands_for_sure_is_a_hang(standings: list[Standing], outcome: str) -> None:
    assert judge(standings, by_health=False).outcome == outcome
