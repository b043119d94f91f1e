from __future__ import annotations

from typing import Any

import pytest

from sglang_crashkit.analysis.explain import Explanation
from sglang_crashkit.analysis.explain import explain as explain_sightings
from sglang_crashkit.analysis.sightings import Sightings
from sglang_crashkit.model.sample import Sample
from unit.analysis.real_stacks import (
    ALL_REDUCE,
    BROADCAST,
    CHECK,
    DETOKENIZE,
    IMPORT,
    LOAD,
    MATMUL,
    RECEIVE,
    SPIN,
    STORE,
    process,
    rounds,
)

SPAWNED = "python3 -c multiprocessing.spawn"


def untitled(pid: int, frames: tuple[str, ...] = (), **fields: Any) -> Sample:
    return process(pid, frames, title=SPAWNED, role="starting", **fields)


def explain(*rows: list[Sample]) -> Explanation:
    return explain_sightings(Sightings.of(rounds(*rows)))


def told(*members: Sample) -> tuple[str, str, list[int]]:
    explanation = explain(list(members), list(members), list(members))
    return explanation.kind, explanation.level, [member.source.pid for member in explanation.named]


@pytest.mark.parametrize("frames", [ALL_REDUCE, IMPORT, ()])
def test_one_that_is_stopped_is_named(frames: tuple[str, ...]) -> None:
    assert told(untitled(10, BROADCAST), untitled(11, frames, state="T")) == ("outlier", "established", [11])
    assert told(untitled(11, frames, state="T")) == ("outlier", "established", [11])


def test_one_in_uninterruptible_sleep_or_held_by_a_debugger_is_named() -> None:
    assert told(untitled(10, ALL_REDUCE), untitled(11, ALL_REDUCE, state="D")) == ("outlier", "established", [11])
    assert told(untitled(10, ALL_REDUCE), untitled(11, ALL_REDUCE, state="t")) == ("outlier", "established", [11])


def test_one_that_spins_while_the_others_wait_is_named() -> None:
    spinning = [[untitled(10, ALL_REDUCE), untitled(11, SPIN, state="R", cpu_secs=5.0 * n)] for n in range(3)]
    explanation = explain(*spinning)
    assert (explanation.kind, explanation.level) == ("outlier", "supported")
    assert explanation.statement.startswith("untitled scheduler (pid 11) was in spin (sitecustomize.py:12) at 3 looks")
    assert explanation.to_json()["named"][0]["title"] == SPAWNED
    assert any("without titles do not tell their ranks" in line for line in explanation.findings[0].evidence)


def test_the_odd_one_among_equals_is_named() -> None:
    rest = [untitled(number, ALL_REDUCE) for number in range(10, 17)]
    assert told(*rest, untitled(17, BROADCAST[:1] + ALL_REDUCE[1:])) == ("outlier", "supported", [17])


def test_one_that_was_there_before_is_named_where_it_was_a_scheduler() -> None:
    ranks = [untitled(10, ALL_REDUCE), untitled(11, ALL_REDUCE)]
    explanation = explain(ranks, ranks[:1])
    assert [member.source.pid for member in explanation.named] == [11]
    helper = untitled(12, IMPORT)
    assert not explain([*ranks, helper], ranks).named


def test_one_that_has_not_got_as_far_as_the_others_is_named_but_it_may_be_no_rank() -> None:
    assert told(untitled(10, STORE), untitled(11, IMPORT), untitled(12, STORE)) == ("outlier", "unknown", [11])
    assert told(untitled(10, STORE), untitled(11, LOAD), untitled(12, STORE)) == ("outlier", "supported", [11])


def test_what_is_no_rank_is_not_compared_with_ranks_but_named_when_it_is_stopped() -> None:
    ranks = [untitled(10, ALL_REDUCE), untitled(11, ALL_REDUCE)]
    assert told(*ranks, untitled(12, DETOKENIZE)) == ("waiting", "unknown", [])
    assert told(*ranks, untitled(12, DETOKENIZE, state="T")) == ("outlier", "established", [12])
    explanation = explain([*ranks, untitled(12, DETOKENIZE)], ranks)
    assert [member.source.pid for member in explanation.named] == [12]


def test_a_group_that_is_idle_or_works_is_not_named_for_one_that_hangs() -> None:
    hung = [untitled(number, ALL_REDUCE) for number in range(10, 14)]
    assert told(*hung, untitled(20, RECEIVE)) == ("unclear", "unknown", [])
    assert told(*hung, untitled(20, RECEIVE), untitled(21, BROADCAST)) == ("unclear", "unknown", [])
    working = [[*hung, untitled(20, frames, cpu_secs=9.0 * n)] for n, frames in enumerate([MATMUL, CHECK, MATMUL])]
    explanation = explain(*working)
    assert (explanation.kind, explanation.named) == ("unclear", ())
    assert "no hang is seen" not in explanation.statement


def test_an_idle_server_without_titles_does_not_hang() -> None:
    assert told(untitled(10, RECEIVE), untitled(11, BROADCAST))[0] == "idle"


def test_servers_are_not_mixed() -> None:
    one = [untitled(10 + n, ALL_REDUCE, server=1) for n in range(2)]
    two = [untitled(20 + n, SPIN if n else ALL_REDUCE, server=2) for n in range(2)]
    explanation = explain([*one, *two], [*one, *two])
    assert [member.source.pid for member in explanation.named] == [21]
    assert [finding.group for finding in explanation.findings] == ["n1:2 untitled", "n1:1 untitled"]


def test_it_is_a_rank_again_once_it_has_its_title() -> None:
    early = [untitled(10, STORE), untitled(11, STORE)]
    late = [process(10, ALL_REDUCE, tp=0), process(11, SPIN, tp=1)]
    late = [Sample(**{**vars(one), "time": 1.0}) for one in late]
    explanation = explain(early, late, late)
    assert [finding.group for finding in explanation.findings] == [""]
    assert explanation.findings[0].evidence[0].startswith("sglang::scheduler_TP")
