from __future__ import annotations

import json
import zlib
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_crashkit.analysis.divergence import (
    Divergence,
    Moment,
    RankSteps,
    disagreement,
    events_in,
    find_divergence,
)
from sglang_crashkit.analysis.ranks import Rank, rank_at
from sglang_crashkit.model.step import DIVERGED, PHASES, Step, StepRequest

TP0, TP1, TP2 = (rank_at({"tp": number}) for number in range(3))
AB12, CD34 = StepRequest("ab12", 37, 37), StepRequest("cd34", 1, 20)
EF56 = StepRequest("ef56", 5, 5)
#: What the first step runs, and each after it: a request is taken in, and one token more comes out of it.
LAST = 18_204


def step(number: int, mode: str = "decode", *requests: StepRequest, **fields: Any) -> Step:
    tokens = sum(request.tokens for request in requests)
    told = replace(
        Step(number, float(number), number + 0.5, "processed", mode, requests, len(requests), tokens), **fields
    )
    own = zlib.crc32(repr((mode, requests, told.size, told.tokens, told.decisions)).encode()) or 1
    return replace(told, agreed_hash=fields.get("agreed_hash", own))


def steps(last: int = LAST, first: int = LAST - 9) -> list[Step]:
    return [step(number, "decode", replace(CD34, length=number)) for number in range(first, last + 1)]


def judge(*ranks: tuple[Rank, list[Step]], moment: Moment | None = None) -> Divergence:
    found = find_divergence([RankSteps(rank, of, pid) for pid, (rank, of) in enumerate(ranks)], moment)
    assert found is not None
    return found


DECODES, EXTENDS, BOTH = step(LAST, "decode", CD34), step(LAST, "extend", AB12), step(LAST, "decode", CD34, AB12)
#: No one knows who is wrong.
EITHER = ("TP0-1", "supported")


def decides(**decisions: int) -> Step:
    return step(LAST, "decode", CD34, decisions=decisions)


#: What TP1 and TP0 ran, in what they differ and of which request, who is the outlier, and the statement.
DIFFERENCES: list[tuple[Step, Step, tuple[str, str | None], tuple[str, str], str]] = [
    (
        DECODES,
        EXTENDS,
        ("mode", "ab12"),
        ("TP1", "established"),
        "TP1 ran decode of request cd34 (1 token) in step 18,204 where TP0 ran extend of request ab12 (37 tokens)",
    ),
    (
        DECODES,
        step(LAST, "decode", replace(AB12, tokens=1), CD34),
        ("requests", "ab12"),
        ("TP1", "supported"),
        "TP1 ran decode of request cd34 (1 token) in step 18,204 where TP0 ran decode of request ab12 (1 token)"
        " and 1 other (request ab12 is TP0's only)",
    ),
    (
        EXTENDS,
        step(LAST, "extend", AB12, EF56),
        ("requests", "ef56"),
        ("TP1", "established"),
        "TP1 ran extend of request ab12 (37 tokens) in step 18,204 where TP0 ran extend of request ef56 (5 tokens)"
        " and 1 other (request ef56 is TP0's only)",
    ),
    # Each took in another one.
    (
        EXTENDS,
        step(LAST, "extend", EF56),
        ("requests", "ab12"),
        EITHER,
        "TP1 ran extend of request ab12 (37 tokens) in step 18,204 where TP0 ran extend of request ef56 (5 tokens)",
    ),
    (
        decides(retract=1),
        DECODES,
        ("decision", "cd34"),
        ("TP1", "supported"),
        "TP1 decided retract on the way to step 18,204 where TP0 did not",
    ),
    # By its own clock; the number tells of which request.
    (
        replace(BOTH, decisions={"timeout": zlib.crc32(b"ab12 ")}, agreed_hash=1),
        BOTH,
        ("decision", "ab12"),
        ("TP1", "supported"),
        "TP1 decided timeout of request ab12 on the way to step 18,204 where TP0 did not",
    ),
    (
        DECODES,
        decides(prefetch=1),
        ("decision", "cd34"),
        ("TP1", "supported"),
        "TP0 decided prefetch on the way to step 18,204 where TP1 did not",
    ),
    # Two requests that their clients gave one id.
    (
        step(LAST, "decode", CD34),
        step(LAST, "decode", CD34, CD34),
        ("requests", "cd34"),
        ("TP1", "supported"),
        "TP1 ran decode of request cd34 (1 token) in step 18,204 where TP0 ran decode of request cd34 (1 token)"
        " and 1 other (request cd34 is TP0's only)",
    ),
    (
        step(LAST, "decode", AB12, CD34),
        BOTH,
        ("requests", "ab12"),
        EITHER,
        "TP1 ran decode of 2 requests (38 tokens) in step 18,204 where TP0 ran the same requests in another order",
    ),
    (
        EXTENDS,
        step(LAST, "extend", replace(AB12, tokens=38, length=38)),
        ("lengths", "ab12"),
        EITHER,
        "TP1 ran extend in step 18,204 with 37 tokens of request ab12 (37 long) where TP0 had 38 (38 long)",
    ),
    (
        step(LAST, "decode", CD34, AB12, size=300, tokens=300),
        step(LAST, "decode", CD34, AB12, size=300, tokens=299),
        ("lengths", None),
        EITHER,
        "TP1 ran decode of 300 requests (300 tokens) in step 18,204 where TP0 ran decode of 300 requests (299 tokens)",
    ),
    (
        decides(abort=1),
        step(LAST, "decode", AB12, CD34),
        ("decision", "ab12"),
        EITHER,
        "TP1 decided abort on the way to step 18,204 where TP0 did not: TP1 ran decode of request cd34 (1 token) in"
        " step 18,204 where TP0 ran decode of request ab12 (37 tokens) and 1 other (request ab12 is TP0's only)",
    ),
    (
        decides(abort=0, prefetch=7),
        decides(prefetch=8),
        ("decision", "cd34"),
        EITHER,
        "TP1 decided another prefetch on the way to step 18,204 than TP0",
    ),
    (
        replace(DECODES, agreed_hash=1),
        replace(DECODES, agreed_hash=2),
        ("hash", None),
        EITHER,
        "TP1 and TP0 ran the same batch in step 18,204, and what led to it differs",
    ),
]


@pytest.mark.parametrize(("ours", "theirs", "what", "who", "statement"), DIFFERENCES)
def test_the_first_step_that_differs_is_told_and_in_what(
    ours: Step, theirs: Step, what: tuple[str, str | None], who: tuple[str, str], statement: str
) -> None:
    after = [step(LAST + 1, "extend", AB12)]
    # After the first difference nothing is alike any more, and who was first says nothing.
    found = judge(
        (TP0, [*steps(LAST - 1), theirs]), (TP1, [*steps(LAST - 1), ours, *after]), moment=Moment(LAST + 960.0, "it")
    )
    assert (found.kind, found.request, found.step) == (*what, LAST)
    assert found.statement == f"{statement}; 16 minutes before it."
    odd = {"TP0": ((0,), "TP1"), "TP1": ((1,), "TP0"), "TP0-1": ((0, 1), "")}
    assert (found.ranks, found.level, (found.pids, found.against)) == (*who, odd[who[0]])
    assert (found.seconds_before, found.compared) == (960.0, 10)


def test_of_several_ranks_those_are_named_that_are_fewer() -> None:
    other = [*steps(LAST - 1), step(LAST, "extend", AB12)]
    found = judge((TP0, other), (TP1, steps()), (TP2, steps()))
    assert (found.ranks, found.against, found.pids, found.level) == ("TP0", "TP1-2", (0,), "established")


def in_flight(number: int = LAST, phase: str = "forward_begun", **fields: Any) -> Step:
    return step(number, "decode", replace(CD34, length=number), ended=None, phase=phase, **fields)


@pytest.mark.parametrize(
    "last",
    [
        [in_flight()],
        [in_flight(phase="scheduled")],
        # Of what is not yet scheduled nothing is known, whatever was there before.
        [in_flight(phase="received", agreed_hash=7)],
        [step(LAST, "", ended=None, phase="received", decisions={"abort": 1})],
        [],
    ],
)
@pytest.mark.parametrize("read_at", [LAST + 1.9, LAST - 1.0])
def test_ranks_read_in_the_middle_of_a_step_agree(last: list[Step], read_at: float) -> None:
    ranks = (TP0, steps()), (TP1, [*steps(LAST - 1), *last])
    found = judge(*ranks, moment=Moment(LAST, "it", read_at))
    assert (found.kind, found.level) == ("none", "established")
    compared = 9 if not last or last[0].phase == "received" else 10
    assert found.statement == f"No divergence in the last {compared} steps of TP0-1."


def test_one_that_stopped_where_others_went_on_has_ended_earlier() -> None:
    ranks = (TP0, [*steps(LAST - 1), step(LAST, "extend", AB12)]), (TP1, steps(LAST - 1))
    found = judge(*ranks, moment=Moment(LAST + 5.0, "the hang", LAST + 7.0))
    assert found.statement == (
        "TP1 ended earlier, with step 18,203 (processed), where TP0 went on and ran extend of request ab12 (37 tokens)"
        " in step 18,204; 5.0 s before the hang; up to then they did the same."
    )
    assert (found.kind, found.step, found.ranks, found.request) == ("ended_earlier", LAST, "TP1", "ab12")
    assert judge(*ranks).kind == "ended_earlier"
    # What it had received says that it decided otherwise, or hung on the way.
    received = step(LAST, "", AB12, ended=None, phase="received")
    found = judge(ranks[0], (TP1, [*steps(LAST - 1), received]))
    assert found.statement.endswith(" up to then they did the same. TP1 had received request ab12 for it.")


@pytest.mark.parametrize(
    ("ranks", "statement"),
    [
        (
            [(TP0, steps(20, 11)), (TP1, steps(9, 1))],
            "Whether the ranks diverged is unknown: the steps that are kept do not overlap (TP0 11 to 20, TP1 1 to 9).",
        ),
        ([(TP0, steps()), (TP1, [])], "Whether the ranks diverged is unknown: of TP1 there are no steps."),
        ([(TP0, []), (TP1, [])], "Whether the ranks diverged is unknown: of TP0-1 there are no steps."),
    ],
)
def test_where_the_steps_do_not_overlap_it_is_unknown(ranks: list[tuple[Rank, list[Step]]], statement: str) -> None:
    found = judge(*ranks)
    assert (found.kind, found.level, found.statement) == ("unknown", "unknown", statement)


def test_a_rank_without_steps_leaves_the_others_to_be_compared() -> None:
    found = judge((TP0, steps()), (TP1, steps()), (TP2, []))
    assert found.statement == "No divergence in the last 10 steps of TP0-1. Of TP2 there are no steps."
    assert (found.kind, found.level) == ("none", "supported")


@pytest.mark.parametrize(
    ("ours", "kind", "words"),
    [
        (
            step(100, "decode", CD34, agreed_hash=7),
            "hash",
            "TP1 and TP0 had diverged before step 100, the oldest that both still have.",
        ),
        (step(100, "extend", AB12), "mode", "it is the oldest step that both still have, and they may have diverged"),
    ],
)
def test_what_was_before_the_oldest_step_is_not_claimed(ours: Step, kind: str, words: str) -> None:
    found = judge((TP0, [step(99), step(100, "decode", CD34)]), (TP1, [ours]))
    assert (found.kind, found.level) == (kind, "supported")
    assert words in found.statement


def test_ranks_of_other_stages_and_replicas_need_not_agree() -> None:
    odd, alike = [*steps(LAST - 1), step(LAST, "extend", AB12)], steps()
    assert find_divergence([RankSteps(rank_at({"dp": n}), [odd, alike][n]) for n in range(2)]) is None
    assert find_divergence([RankSteps(rank_at({}), odd)]) is None
    assert find_divergence([]) is None
    four = [({"dp": n // 2, "tp": n}, [alike, alike, odd, odd][n]) for n in range(4)]
    found = judge(*[(rank_at(numbers), of) for numbers, of in four])
    assert found.kind == "none"
    assert judge(*[(rank_at(four[n][0]), four[0 if n == 2 else n][1]) for n in range(4)]).against == "DP1 TP3"
    stages = [(rank_at({"pp": n // 2, "tp": n % 2}), [odd, odd, alike, alike][n]) for n in range(4)]
    assert judge(*stages).kind == "none"


_numbers = st.integers(0, 6)
_requests = st.builds(StepRequest, st.text(max_size=3), st.integers(-1, 3), st.integers(-1, 2**63 - 1))
_steps = st.builds(
    Step,
    number=_numbers,
    began=st.floats(),
    ended=st.none() | st.floats(),
    phase=st.sampled_from([*PHASES, "", "another"]),
    mode=st.sampled_from(["extend", "decode", ""]),
    requests=st.lists(_requests, max_size=3).map(tuple),
    size=st.integers(-1, 5),
    tokens=st.integers(-1, 5),
    decisions=st.dictionaries(st.sampled_from(["abort", "retract"]), _numbers, max_size=2),
    agreed_hash=st.integers(0, 2),
)
_places = st.dictionaries(st.sampled_from(["tp", "pp", "dp", "ep"]), st.integers(0, 2), max_size=3).map(rank_at)
_ranks = st.lists(st.builds(RankSteps, _places, st.lists(_steps, max_size=6), _numbers), max_size=5)
_moments = st.none() | st.builds(Moment, st.floats(), st.just("it"), st.none() | st.floats())


@given(_ranks, _moments)
def test_whatever_the_steps_hold_there_is_an_answer(ranks: list[RankSteps], moment: Moment | None) -> None:
    found = find_divergence(ranks, moment)
    if found is not None:
        assert found.statement.endswith(".")
        assert (found.step is not None) == (found.kind in (*DIVERGED, "ended_earlier"))
        assert found.seconds_before is None or 0 <= found.seconds_before < float("inf")
        json.dumps(msgspec.to_builtins(found), allow_nan=False)


@given(st.lists(_steps, max_size=6), st.integers(2, 4), _moments)
def test_ranks_that_did_the_same_have_not_diverged(of: list[Step], count: int, moment: Moment | None) -> None:
    found = find_divergence([RankSteps(rank_at({"tp": at}), of) for at in range(count)], moment)
    assert found.kind in ("none", "unknown")


# -- SGLang's rank consensus checker, by what its ranks log: upstream's own words, of 0.5.23

LINE = "2026-11-28T18:00:00.000000Z CRITICAL sglang.srt.utils.rank_consensus_checker: Found rank divergence for "
SAME = "get_next_batch_to_run called params=<no check>"


def logged(*events: str) -> str:
    return f"{LINE}{len(events)} events(s)! local hash: {'0f' * 20}, events = {list(events)}\n"


@pytest.mark.parametrize(
    ("log", "events"),
    [
        ("", None),
        ("it is ready\n", None),
        (logged("a's", 'b "c"', "d"), ["a's", 'b "c"', "d"]),
        (logged("old") + logged("new"), ["new"]),
        (logged("whole", "is cut off here")[:-6], ["whole"]),
    ],
)
def test_events_are_read_as_they_were_logged(log: str, events: list[str] | None) -> None:
    assert events_in(log) == events


@pytest.mark.parametrize(
    ("ranks", "words", "outliers"),
    [
        (
            {"TP0": [SAME, "x returns result=1"], "TP1": [SAME, "x returns result=2"]},
            "TP0: x returns result=1; TP1:",
            0,
        ),
        ({"TP0": ["x" * 500], "TP1": ["x" * 500 + " (odd)"]}, f"TP1: ...{'x' * 60} (odd)", 0),
        ({"TP0": ["1"], "TP1": ["2"], "TP2": ["1"]}, "TP0 and TP2: 1; TP1: 2", 1),
        ({"TP0": [SAME], "TP1": [SAME]}, "they differ behind the first 1 events", 0),
        ({"TP1": [SAME]}, "only what TP1 did is known", 0),
    ],
)
def test_the_first_event_that_differs_is_told(ranks: dict[str, list[str]], words: str, outliers: int) -> None:
    found = disagreement({pid: (name, events) for pid, (name, events) in enumerate(ranks.items(), 10)})
    assert found.is_one
    assert words in found.statement
    assert found.pids == ((11,) if outliers else tuple(range(10, 10 + len(ranks))))
    assert bool(found.against) == bool(outliers)
