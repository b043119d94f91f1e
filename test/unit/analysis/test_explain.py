from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_crashkit.analysis.explain import Explanation, format_explanation
from sglang_crashkit.analysis.explain import explain as explain_sampled
from sglang_crashkit.analysis.member import SampledProcesses
from sglang_crashkit.model.sample import Sample
from sglang_crashkit.model.snapshot import Problem
from unit.analysis.real_stacks import (
    ALL_REDUCE,
    BROADCAST,
    CHECK,
    COMPILE,
    DECODE,
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
from unit.analysis.scenarios import ranks

SPAWNED = "python3 -c multiprocessing.spawn"


def explain(*rows: Sequence[Sample]) -> Explanation:
    return explain_sampled(SampledProcesses.of(rounds(*rows)))


def pids(explanation: Explanation) -> list[int]:
    return [member.source.pid for member in explanation.named]


@pytest.mark.parametrize(
    ("stacks", "words"),
    [
        (["ALL_REDUCE", "SPIN"], "was in spin (sitecustomize.py:12) in 3 samples and used 10.0 s of CPU time"),
        (["ALL_REDUCE", "SPIN"], "while sglang::scheduler_TP0 (pid 10) waited in all_reduce"),
        (["ALL_REDUCE", "HOLD_GIL"], "holding the GIL in native code"),
        (["ALL_REDUCE", "SPIN", "-"], "Of sglang::scheduler_TP2 (pid 12) no stack was seen."),
        ([*["ALL_REDUCE"] * 5, "STORE"], "while 5 ranks (TP0-4) waited in all_reduce"),
        ([*["ALL_REDUCE"] * 6, "SPIN", "SPIN"], "TP6 (pid 16) and sglang::scheduler_TP7 (pid 17) were in spin"),
        (["ALL_REDUCE", "BROADCAST"], "each waits elsewhere, and no single rank looks responsible"),
    ],
)
def test_what_was_seen_is_told(stacks: list[str], words: str) -> None:
    assert words in explain(*ranks(stacks, 3)).statement


# -- groups


def test_groups_and_servers_are_not_mixed() -> None:
    row = [process(10 + tp, ALL_REDUCE, dp=0, tp=tp) for tp in range(2)]
    row += [process(20 + tp, BROADCAST if tp else RECEIVE, dp=1, tp=tp) for tp in range(2)]
    told = explain(row, row, row)
    assert [(finding.group, finding.kind) for finding in told.findings] == [("DP0", "waiting"), ("DP1", "idle")]
    row = [process(10 + tp, ALL_REDUCE, tp=tp, server=1) for tp in range(2)]
    row += [process(20 + tp, SPIN if tp else ALL_REDUCE, tp=tp, server=2) for tp in range(2)]
    told = explain(row, row)
    assert (pids(told), told.findings[0].group) == ([21], "n1:2")


def test_replicas_of_the_attention_alone_are_one_group() -> None:
    row = [process(10 + tp, SPIN if tp == 2 else ALL_REDUCE, dp=tp, tp=tp, ep=tp) for tp in range(4)]
    told = explain(row, row)
    assert (pids(told), len(told.findings)) == ([12], 1)


def test_ranks_of_one_server_on_several_hosts_are_one_group() -> None:
    def host(number: int) -> list[Sample]:
        numbers = range(4 * number, 4 * number + 4)
        return [process(10 + n, SPIN if n == 6 else ALL_REDUCE, tp=n, server=5, rendezvous="r:1") for n in numbers]

    told = explain_sampled(
        SampledProcesses.of([node for n in range(2) for node in rounds(host(n), host(n), host=f"n{n}")])
    )
    assert (pids(told), len(told.findings)) == ([16], 1)
    assert "sglang::scheduler_TP6 (pid 16 on n1)" in told.statement
    assert "while 7 ranks (TP0-5,7) waited in all_reduce" in told.statement


# -- prefill and decode


def side(frames: tuple[str, ...], name: str = "decode", **fields: Any) -> Sample:
    return process(20 if name == "decode" else 10, frames, side=name, server=2 if name == "decode" else 1, **fields)


def test_a_prefill_side_that_died_is_named() -> None:
    decode = side(DECODE)
    told = explain([decode, side(BROADCAST, "prefill")], [decode], [decode])
    assert (told.kind, told.level, pids(told)) == ("outlier", "established", [10])
    assert told.statement.startswith("prefill n1:1: sglang::scheduler (pid 10) of the prefill side is gone")


@pytest.mark.parametrize(
    ("frames", "kind"),
    [
        ([DECODE, DECODE], "unclear"),
        ([("helper (x.py:1)", *DECODE[1:]), ("other (x.py:2)", *DECODE[1:])], "unclear"),
        ([MATMUL, ALL_REDUCE], "moving"),
        ([BROADCAST, BROADCAST], "waiting"),
    ],
)
def test_a_side_alone_is_told_that_the_other_is_missing(frames: list[tuple[str, ...]], kind: str) -> None:
    told = explain(*([side(some)] for some in frames))
    assert told.kind == kind
    assert "No process of the prefill side was found." in told.findings[0].evidence
    if frames[0] is DECODE:
        assert told.statement.endswith(
            "waited for requests or for the other side of its pair, as when there are none. "
            "No process of the prefill side was found: whether that hangs, or is gone, is not seen."
        )
        untitled = side((*DECODE, "run_scheduler_process (scheduler.py:4045)"), role="starting")
        assert explain([untitled], [untitled]).kind == "unclear"
        pair = [untitled, side(DECODE, "prefill")]
        assert explain(pair, pair).kind == "idle"


# -- processes that are no ranks, or have no titles


def test_a_stopped_process_is_named_unlike_an_ended_helper() -> None:
    stopped = process(5, ("poll (x.py:1)",), title="sglang::detokenizer", role="detokenizer", state="T")
    assert pids(explain(*[[process(10, RECEIVE), stopped]] * 2)) == [5]
    rank, helper = process(10, RECEIVE), process(6, (), title="cc1plus", role="helper")
    assert explain([rank, helper], [rank], [rank]).kind == "idle"


def untitled(pid: int, frames: tuple[str, ...] = (), **fields: Any) -> Sample:
    return process(pid, frames, title=SPAWNED, role="starting", **fields)


HUNG = [untitled(number, ALL_REDUCE) for number in range(10, 14)]


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        ([untitled(10, BROADCAST), untitled(11, ALL_REDUCE, state="T")], ("outlier", "established", [11])),
        ([untitled(11, state="T")], ("outlier", "established", [11])),
        ([untitled(10, STORE), untitled(11, IMPORT), untitled(12, STORE)], ("outlier", "unknown", [11])),
        ([untitled(10, STORE), untitled(11, LOAD), untitled(12, STORE)], ("outlier", "supported", [11])),
        ([*HUNG, untitled(20, DETOKENIZE)], ("waiting", "unknown", [])),
        ([*HUNG, untitled(20, DETOKENIZE, state="T")], ("outlier", "established", [20])),
        ([*HUNG, untitled(20, RECEIVE), untitled(21, BROADCAST)], ("unclear", "unknown", [])),
        ([untitled(10, RECEIVE), untitled(11, BROADCAST)], ("idle", "supported", [])),
    ],
)
def test_of_processes_without_titles(members: list[Sample], expected: tuple[str, str, list[int]]) -> None:
    told = explain(members, members, members)
    assert (told.kind, told.level, pids(told)) == expected


def test_a_rank_without_a_title_that_spins_is_named() -> None:
    told = explain(*([untitled(10, ALL_REDUCE), untitled(11, SPIN, cpu_secs=5.0 * n)] for n in range(3)))
    assert told.statement.startswith("untitled scheduler (pid 11) was in spin (sitecustomize.py:12) in 3 samples")
    assert told.to_json()["named"][0]["title"] == SPAWNED
    assert any("without titles do not tell their ranks" in line for line in told.findings[0].evidence)
    assert pids(explain(HUNG, HUNG[:-1])) == [13]
    assert pids(explain([*HUNG, untitled(12, IMPORT)], HUNG)) == []
    working = ([*HUNG, untitled(20, frames, cpu_secs=9.0 * n)] for n, frames in enumerate([MATMUL, CHECK, MATMUL]))
    assert "no hang is seen" not in explain(*working).statement


# -- the whole


def test_json_and_text_say_who_is_named_and_missing() -> None:
    nodes = rounds(*ranks(["ALL_REDUCE", "SPIN"], 2))
    nodes[0] = replace(nodes[0], problems=(Problem("pid 12", "it ended", "look again"), Problem("n2", "silent")))
    sampled = SampledProcesses.of(nodes)
    told = explain_sampled(sampled)
    document = json.loads(json.dumps(told.to_json()))
    assert document["schema_version"] == 1
    (named,) = document["named"]
    assert (named["host"], named["pid"], named["title"]) == ("n1", 11, "sglang::scheduler_TP1")
    assert document["groups"][0]["named"] == document["named"]
    assert document["problems"][0] == {"what": "n2", "why": "silent", "next": ""}
    lines = list(format_explanation(told, sampled.tree))
    assert lines[0].startswith("Verdict (supported): sglang::scheduler_TP1 (pid 11) was in spin (sitecustomize.py:12)")
    assert lines[1] == "Look at: sglang::scheduler_TP1 (pid 11)"
    assert "Evidence (outlier, supported):" in lines
    assert lines[lines.index("Not collected:") + 1 :][:2] == ["  n2: silent", "  pid 12: it ended; next: look again"]
    assert any(line.startswith("Python stacks of all threads, outermost call first") for line in lines)


def test_of_many_groups_and_problems_some_are_told() -> None:
    row = [process(100 * pp + tp, ALL_REDUCE, tp=tp, pp=pp, state="T") for pp in range(20) for tp in range(2)]
    nodes = rounds(row, row)
    nodes[0] = replace(nodes[0], problems=tuple(Problem(f"pid {n}", "it ended") for n in range(30)))
    lines = list(format_explanation(explain_sampled(SampledProcesses.of(nodes))))
    assert {"Look at: 32 more", "12 more groups: 12 outlier", "  20 more"} <= set(lines)
    assert len(lines) < 80


STATES = st.sampled_from(["S", "R", "T", "D", "t", "Z", ""])
STACKS = st.sampled_from([(), ALL_REDUCE, BROADCAST, RECEIVE, SPIN, STORE, COMPILE, LOAD, MATMUL])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.tuples(STATES, STACKS, st.floats(0, 50)), min_size=1, max_size=4), min_size=1, max_size=3))
def test_only_outliers_are_named_and_waiters_only_beside_more(told: Any) -> None:
    explanation = explain(
        *(
            [process(10 + tp, frames, tp=tp, state=state, cpu_secs=cpu) for tp, (state, frames, cpu) in enumerate(look)]
            for look in told
        )
    )
    assert bool(explanation.named) == (explanation.kind == "outlier")
    for member in explanation.named:
        is_among_few = 2 * len(explanation.named) < explanation.processes
        assert explanation.level == "established" or not member.waits() or is_among_few
    assert explanation.statement.endswith(".")
    json.dumps(explanation.to_json())
