from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_crashkit.analysis.explain import explain, format_explanation
from sglang_crashkit.analysis.member import SampledProcesses
from sglang_crashkit.model.snapshot import NodeSnapshot, Problem
from unit.analysis.real_stacks import (
    ALL_REDUCE,
    BROADCAST,
    LOAD,
    RECEIVE,
    SPIN,
    STORE,
    process,
    rounds,
)

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


@settings(max_examples=40, deadline=None)
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
