from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_crashkit.analysis.explain import explain, format_explanation
from sglang_crashkit.analysis.member import Member, Moment, SampledProcesses, describe, name_members
from sglang_crashkit.analysis.ranks import Rank
from sglang_crashkit.analysis.waits import of_frames
from sglang_crashkit.model.snapshot import NodeSnapshot, Problem
from unit.analysis.real_stacks import (
    ALL_REDUCE,
    BROADCAST,
    LOAD,
    MATMUL,
    RECEIVE,
    SPIN,
    STORE,
    member,
    process,
    rounds,
    stack,
)


@pytest.mark.parametrize(
    ("motion", "one"),
    [
        ("unknown", member(SPIN)),
        ("unknown", member(SPIN, ())),
        ("still", member(ALL_REDUCE, ALL_REDUCE, cpu=0.1)),
        ("spinning", member(SPIN, SPIN, cpu=5.0)),
        ("moving", member(SPIN, ALL_REDUCE)),
    ],
)
def test_looks_are_compared(motion: str, one: Member) -> None:
    assert one.motion() == motion


def test_another_line_of_the_same_functions_is_no_other_place() -> None:
    later = tuple(text.replace("sitecustomize.py:12", "sitecustomize.py:13") for text in SPIN)
    assert member(SPIN, later, cpu=5.0).motion() == "spinning"


def test_one_that_rests_uses_hardly_any_cpu_time() -> None:
    assert member(ALL_REDUCE, ALL_REDUCE, cpu=0.1).rests()
    assert not member(ALL_REDUCE, ALL_REDUCE, cpu=1.0).rests()
    assert not member(ALL_REDUCE).rests()


def test_one_waits_where_it_waited_at_each_look() -> None:
    assert member(ALL_REDUCE, BROADCAST).waits()
    assert not member(ALL_REDUCE, SPIN).waits()
    assert not member().waits()


def test_it_is_described_with_its_places_and_cpu_time() -> None:
    assert describe(member(SPIN)) == "was in spin (sitecustomize.py:12)"
    assert describe(member(SPIN, MATMUL, cpu=2.0)) == (
        "was in spin (sitecustomize.py:12) and linear (torch/nn/functional.py:2300) in 2 samples"
        " and used 2.0 s of CPU time meanwhile"
    )
    assert describe(member()) == "was not seen"


def test_of_many_different_places_some_are_told() -> None:
    looks = [stack(f"f{number} (x.py:1)") for number in range(6)]
    one = Member("x", tuple(Moment("S", 0.0, of_frames(frames), frames) for frames in looks))
    assert "3 more places" in describe(one)


def test_what_all_looks_have_in_common_is_found() -> None:
    assert member(SPIN, MATMUL).common_function() == "LlamaModel.forward"
    assert Member("x", (Moment("S", 0.0, of_frames(()), ()),)).common_function() == ""


def test_many_are_named_as_a_set() -> None:
    many = [Member(f"TP{n} (pid {n})", (), Rank((("server", "n1:1"),), "tp", n)) for n in range(9)]
    assert name_members(many[:2]) == "TP0 (pid 0) and TP1 (pid 1)"
    assert name_members(many) == "9 ranks (TP0-8)"
    assert name_members([*many, Member("x", ())]).endswith("TP7 (pid 7) and 2 more")


@pytest.mark.parametrize(
    ("manner", "one"),
    [
        ("still", member(ALL_REDUCE, ALL_REDUCE, ALL_REDUCE)),
        ("spinning", member(SPIN, SPIN, cpu=5.0)),
        ("moving", member(SPIN, MATMUL, cpu=5.0)),
        ("unknown", member(SPIN)),
        ("still", member(SPIN, ("spin (sitecustomize.py:13)", *SPIN[1:]))),
        ("still", member(BROADCAST, BROADCAST)),
        ("stopped", member(SPIN, SPIN, state="T")),
        ("asleep", member(SPIN, SPIN, state="D")),
        ("gone", member(SPIN, SPIN, state="Z")),
    ],
)
def test_how_it_fared(manner: str, one: Member) -> None:
    assert one.manner() == manner


PROCESSES = st.builds(
    process,
    st.integers(10, 13),
    st.sampled_from([(), ALL_REDUCE, BROADCAST, RECEIVE, SPIN, STORE, LOAD]),
    tp=st.integers(0, 2),
    title=st.sampled_from(["sglang::scheduler_TP1", "python3 -m sglang.launch_server"]),
    role=st.sampled_from(["scheduler", "scheduler", "server", "starting"]),
    state=st.sampled_from(["S", "R", "T", "D", ""]),
    cpu_secs=st.sampled_from([0.0, 1.0, 9.5]),
    time=st.sampled_from([5.0, 10.0, 10.5]),
    side=st.sampled_from([None, "prefill", "decode"]),
    server=st.sampled_from([None, 7]),
    problem=st.sampled_from(["", "not allowed"]),
)
NODES = st.builds(
    NodeSnapshot,
    st.sampled_from(["n1", "n2"]),
    st.sampled_from([5.0, 10.0]),
    st.lists(PROCESSES, max_size=4, unique_by=lambda one: one.pid).map(tuple),
    st.lists(st.builds(Problem, st.sampled_from("ab"), st.sampled_from("xy"), st.sampled_from(["", "z"]))).map(tuple),
)


def told(sampled: SampledProcesses) -> tuple[Any, list[str]]:
    explanation = explain(sampled)
    return explanation.to_json(), list(format_explanation(explanation, sampled.tree))


@settings(max_examples=100, deadline=None)
@given(st.data(), st.lists(NODES, max_size=8))
def test_the_order_of_snapshots_does_not_matter(data: st.DataObject, nodes: list[NodeSnapshot]) -> None:
    assert told(SampledProcesses.of(data.draw(st.permutations(nodes)))) == told(SampledProcesses.of(nodes))


def test_a_process_is_called_as_it_was_last() -> None:
    early = process(10, LOAD, title="python3 -m sglang.launch_server", role="server")
    nodes = rounds([early], [process(10, LOAD, tp=1)])
    for order in (nodes, nodes[::-1]):
        (seen,) = SampledProcesses.of(order).processes()
        assert (seen.process.title, seen.process.role) == ("sglang::scheduler_TP1", "scheduler")
        assert seen.rank.number == 1
        assert [moment.time for moment in seen.in_order()] == sorted(node.time for node in nodes)


def test_all_threads_of_all_ranks_are_in_the_tree() -> None:
    tree = SampledProcesses.of(rounds([process(10, ALL_REDUCE, tp=0), process(11, SPIN, tp=1)])).tree
    everyone = tree.everyone()
    assert everyone.format(list(everyone.places())) == "TP0-1"
    assert {child.function for child in tree.root.in_order()} == {"<module>", "Thread._bootstrap"}
