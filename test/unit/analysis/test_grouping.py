from __future__ import annotations

from dataclasses import replace

from sglang_crashkit.analysis.grouping import group_of, rank_of, server_of, split_replicas
from sglang_crashkit.analysis.rank_set import Rank
from unit.analysis.real_stacks import process


def replicas(*ranks: dict[str, int]) -> list[tuple[int | None, list[str]]]:
    members: dict[Rank, str] = {}
    for position, axes in enumerate(ranks):
        one = process(10 + position, (), **axes)
        members[rank_of(one)] = one.title.removeprefix("sglang::scheduler_")
    assert len({group_of(rank) for rank in members}) == 1
    return split_replicas(members)


def test_replicas_number_their_ranks_from_0_each() -> None:
    assert replicas(*({"dp": dp, "tp": tp} for dp in range(2) for tp in range(2))) == [
        (0, ["DP0_TP0", "DP0_TP1"]),
        (1, ["DP1_TP0", "DP1_TP1"]),
    ]
    assert replicas({"dp": 0}, {"dp": 1}) == [(0, ["DP0"]), (1, ["DP1"])]


def test_data_parallelism_of_the_attention_divides_one_group() -> None:
    assert replicas(*({"dp": tp // 2, "tp": tp} for tp in range(4))) == [
        (None, ["DP0_TP0", "DP0_TP1", "DP1_TP2", "DP1_TP3"])
    ]


def test_where_ranks_are_missing_nothing_is_put_together() -> None:
    assert [dp for dp, _members in replicas({"dp": 0, "tp": 1}, {"dp": 1, "tp": 0})] == [0, 1]
    assert [dp for dp, _members in replicas({"dp": 0, "tp": 0}, {"dp": 0, "tp": 1}, {"dp": 1, "tp": 2})] == [0, 1]


def test_stages_sides_and_servers_are_groups() -> None:
    plain = process(10, (), tp=0, pp=0)
    other = [
        process(11, (), tp=0, pp=1),
        process(12, (), tp=0, pp=0, side="prefill"),
        process(13, (), tp=0, pp=0, server=2),
    ]
    assert group_of(rank_of(plain)) not in [group_of(rank_of(one)) for one in other]
    assert group_of(rank_of(plain)) == group_of(rank_of(process(14, (), tp=5, pp=0, ep=2)))
    assert group_of(rank_of(process(15, (), pp=0))) != group_of(rank_of(process(16, (), pp=1)))


def test_a_server_is_known_by_its_rendezvous_else_by_its_root_else_by_its_host() -> None:
    one = process(10, (), tp=0)
    assert server_of(one) == "n1:1"
    assert server_of(replace(one, rendezvous="10.0.0.1:5000")) == "10.0.0.1:5000"
    assert server_of(replace(one, server=None)) == "n1"


def test_a_process_that_is_no_rank_is_known_by_its_role_and_pid() -> None:
    rank = rank_of(process(10, (), role="detokenizer"))
    assert (rank.axis, rank.number, dict(rank.scope)["role"]) == ("pid", 10, "detokenizer on n1")
