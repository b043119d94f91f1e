from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from sglang_crashkit.judge import topology
from sglang_crashkit.model.case import Process, ranks_in
from unit.judge.stack_events import case


def layout_of(arguments: dict[str, Any], *names: str) -> topology.Topology:
    return topology.topology_of(case(arguments=arguments), "", [ranks_in(name) for name in names])


@pytest.mark.parametrize(
    ("arguments", "seen", "nodes"),
    [
        ({"tp_size": 8, "nnodes": 2}, ("TP0", "TP1", "TP2", "TP3"), [1]),
        ({"tp_size": 8, "nnodes": 2}, ("TP4",), [0]),
        ({"tp_size": 16, "nnodes": 4}, ("TP0", "TP11", "TP15"), [1]),
        ({"tp_size": 4, "pp_size": 2, "nnodes": 2}, ("PP1 TP0",), [0]),
        ({"tp_size": 8, "pp_size": 2, "nnodes": 4}, ("PP1 TP5",), [0, 1, 2]),
        ({"tp_size": 2, "pp_size": 4, "nnodes": 2}, ("PP2 TP1",), [0]),
        ({"tp_size": 8, "nnodes": 2}, ("TP0", "TP7"), []),
        ({"tp_size": 8}, ("TP0",), []),
        ({"tp_size": "8", "nnodes": "2"}, ("TP0",), [1]),
        ({"tp_size": "many", "nnodes": None}, ("TP0",), []),
    ],
)
def test_nodes_of_which_no_rank_is_seen(arguments: dict[str, Any], seen: tuple[str, ...], nodes: list[int]) -> None:
    assert layout_of(arguments, *seen).unseen_nodes == nodes


def test_ranks_of_which_nothing_is_seen() -> None:
    layout = layout_of({"tp_size": 2, "pp_size": 2})
    assert topology.unseen_ranks(layout, map(ranks_in, ("PP0 TP0", "PP1 TP1"))) == ["PP0 TP1", "PP1 TP0"]
    assert topology.unseen_ranks(layout_of({}), []) == []


def test_what_is_seen_tells_sizes_that_no_argument_does() -> None:
    layout = layout_of({}, "PP0 TP0", "PP1 TP3")
    assert (layout.tp, layout.pp, layout.is_known) == (4, 2, False)


@pytest.mark.parametrize(
    ("names", "arguments", "groups"),
    [
        # Replicas number their ranks from 0 each, and work apart.
        (("DP0 TP0", "DP0 TP1", "DP1 TP0", "DP1 TP1"), {}, [2, 2]),
        # With data-parallel attention all ranks are numbered as one, and work together.
        (("DP0 TP0", "DP0 TP1", "DP1 TP2", "DP1 TP3"), {}, [4]),
        (("DP0 TP0", "DP1 TP1"), {"enable_dp_attention": True, "dp_size": 2}, [2]),
        (("PP0 TP0", "PP0 TP1", "PP1 TP0", "PP1 TP1"), {}, [2, 2]),
        (("TP0", "TP1", "TP2"), {}, [3]),
    ],
)
def test_which_ranks_work_together(names: tuple[str, ...], arguments: dict[str, Any], groups: list[int]) -> None:
    layout = layout_of(arguments, *names)
    assert [*Counter(layout.group_of(ranks_in(name)) for name in names).values()] == groups


def test_the_side_of_a_pair_has_its_own_sizes() -> None:
    from sglang_crashkit.model.event import Arguments

    both = case(
        Arguments(values={"tp_size": 8, "disaggregation_mode": "prefill"}, side="prefill", order=1),
        Arguments(values={"tp_size": 2, "disaggregation_mode": "decode"}, side="decode", order=2),
    )
    assert topology.topology_of(both, "prefill").tp == 8
    assert topology.topology_of(both, "decode").tp == 2


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["TP3"], "TP3"),
        (["TP0", "TP1"], "TP0 and TP1"),
        ([f"TP{number}" for number in range(8)], "8 ranks (TP0-7)"),
        (["TP0", "TP1", "TP2", "TP5", "TP7"], "5 ranks (TP0-2,5,7)"),
    ],
)
def test_names_of_ranks(names: list[str], expected: str) -> None:
    assert topology.name_ranks(names) == expected


def test_the_short_name_of_a_rank_leaves_out_what_says_nothing() -> None:
    who = "DP3 TP3 EP3"
    assert topology.short_name(Process(who=who, ranks=ranks_in(who))) == "DP3 TP3"
    assert topology.short_name(Process(who="detokenizer")) == "detokenizer"
