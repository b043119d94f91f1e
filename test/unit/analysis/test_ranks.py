from __future__ import annotations

from dataclasses import replace

import pytest

from sglang_crashkit.analysis.ranks import Rank, RankSet, Scope, group_of, rank_of, scope_of, server_of, split_replicas
from unit.analysis.real_stacks import process


def tp(*numbers: int, scope: Scope = ()) -> list[Rank]:
    return [Rank(scope, "tp", number) for number in numbers]


STAGES = [rank for stage in range(4) for rank in tp(*range(8), scope=scope_of({"pp": stage}))]


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        (tp(8, *range(7)), "TP0-6,8"),
        (tp(3), "TP3"),
        ([], "nobody"),
        ([Rank((), "", 0)], "the only rank"),
        (STAGES, "PP0-3 TP0-7"),
        ([rank for rank in STAGES if rank != Rank((("pp", 2),), "tp", 5)], "PP0-1,3 TP0-7; PP2 TP0-4,6-7"),
        (
            [one for d in range(2) for p in range(3) for one in tp(0, 1, scope=(("dp", d), ("pp", p)))],
            "DP0-1 PP0-2 TP0-1",
        ),
    ],
)
def test_a_set_reads_as_a_person_would_write_it(ranks: list[Rank], text: str) -> None:
    assert str(RankSet(ranks)) == text


def test_what_goes_without_saying_and_small_scopes_are_left_out() -> None:
    ranks = RankSet(tp(0, 1, scope=scope_of({"side": "decode", "server": "n1:7", "pp": 1})))
    assert ranks.format() == "decode n1:7 PP1 TP0-1"
    assert ranks.format(hide=[("server", "n1:7")]) == "decode PP1 TP0-1"
    assert list(ranks.places()) == [("pp", 1), ("server", "n1:7"), ("side", "decode")]
    ranks = RankSet(rank for pp in range(20) for rank in tp(*range(pp + 1), scope=scope_of({"pp": pp})))
    assert ranks.format(most=2) == "PP19 TP0-19; PP18 TP0-18; 171 more ranks"


@pytest.mark.parametrize(
    ("axes", "replicas"),
    [
        ([{"dp": dp, "tp": tp} for dp in range(2) for tp in range(2)], {0: ["10", "11"], 1: ["12", "13"]}),
        ([{"dp": 0}, {"dp": 1}], {0: ["10"], 1: ["11"]}),
        # Data parallelism of the attention divides one group.
        ([{"dp": tp // 2, "tp": tp} for tp in range(4)], {None: ["10", "11", "12", "13"]}),
        # Where ranks are missing nothing is put together.
        ([{"dp": 0, "tp": 1}, {"dp": 1, "tp": 0}], {0: ["10"], 1: ["11"]}),
        ([{"dp": 0, "tp": 0}, {"dp": 0, "tp": 1}, {"dp": 1, "tp": 2}], {0: ["10", "11"], 1: ["12"]}),
    ],
)
def test_replicas_number_their_ranks_from_0_each(
    axes: list[dict[str, int]], replicas: dict[int | None, list[str]]
) -> None:
    members = {rank_of(process(10 + at, (), **some)): str(10 + at) for at, some in enumerate(axes)}
    assert len({group_of(rank) for rank in members}) == 1
    assert dict(split_replicas(members)) == replicas


def test_stages_sides_and_servers_are_groups() -> None:
    plain = group_of(rank_of(process(10, (), tp=0, pp=0)))
    for fields in ({"pp": 1}, {"pp": 0, "side": "prefill"}, {"pp": 0, "server": 2}):
        assert group_of(rank_of(process(11, (), tp=0, **fields))) != plain
    assert group_of(rank_of(process(14, (), tp=5, pp=0, ep=2))) == plain
    assert group_of(rank_of(process(15, (), pp=0))) != group_of(rank_of(process(16, (), pp=1)))


def test_a_server_is_known_by_rendezvous_then_root_then_host() -> None:
    one = process(10, (), tp=0)
    assert server_of(one) == "n1:1"
    assert server_of(replace(one, rendezvous="10.0.0.1:5000")) == "10.0.0.1:5000"
    assert server_of(replace(one, server=None)) == "n1"
    rank = rank_of(process(10, (), role="detokenizer"))
    assert (rank.axis, rank.number, dict(rank.scope)["role"]) == ("pid", 10, "detokenizer on n1")
