from __future__ import annotations

import itertools
import sys

from hypothesis import given
from hypothesis import strategies as st

from sglang_crashkit.analysis.rank_set import Rank, RankSet, Scope, scope_of

NUMBERS = st.sets(st.integers(0, 5000), max_size=40)


def tp(*numbers: int, scope: Scope = ()) -> list[Rank]:
    return [Rank(scope, "tp", number) for number in numbers]


def test_a_set_reads_as_ranges() -> None:
    assert str(RankSet(tp(8, *range(7)))) == "TP0-6,8"
    assert str(RankSet(tp(3))) == "TP3"
    assert str(RankSet()) == "nobody"
    assert str(RankSet([Rank((), "", 0)])) == "the only rank"


@given(NUMBERS)
def test_its_ranges_are_those_of_its_numbers(numbers: set[int]) -> None:
    ranks = RankSet(tp(*numbers))
    assert len(ranks) == len(numbers)
    assert all(rank in ranks for rank in tp(*numbers))
    assert Rank((), "tp", 5001) not in ranks
    # No two ranges touch.
    text = str(ranks).removeprefix("TP") if numbers else ""
    bounds = [part.split("-") for part in text.split(",") if part]
    assert all(int(a[-1]) + 1 < int(b[0]) for a, b in itertools.pairwise(bounds))


@given(NUMBERS, NUMBERS)
def test_a_union_has_all_of_both(first: set[int], second: set[int]) -> None:
    ranks = RankSet(tp(*first))
    ranks.update(RankSet(tp(*second)))
    assert ranks == RankSet(tp(*(first | second)))


def test_a_union_leaves_the_other_set_alone() -> None:
    first, second = RankSet(), RankSet(tp(1))
    first.update(second)
    first.add(Rank((), "tp", 2))
    assert str(second) == "TP1"


def test_scopes_with_the_same_numbers_are_written_together() -> None:
    stages = [rank for stage in range(4) for rank in tp(*range(8), scope=scope_of({"pp": stage}))]
    assert str(RankSet(stages)) == "PP0-3 TP0-7"
    assert (
        str(RankSet(rank for rank in stages if rank != Rank((("pp", 2),), "tp", 5))) == "PP0-1,3 TP0-7; PP2 TP0-4,6-7"
    )


def test_replicas_and_stages_are_written_together() -> None:
    ranks = [rank for dp in range(2) for pp in range(3) for rank in tp(0, 1, scope=scope_of({"pp": pp, "dp": dp}))]
    assert str(RankSet(ranks)) == "DP0-1 PP0-2 TP0-1"


def test_what_goes_without_saying_is_left_out() -> None:
    ranks = RankSet(tp(0, 1, scope=scope_of({"side": "decode", "server": "n1:7", "pp": 1})))
    assert ranks.format() == "decode n1:7 PP1 TP0-1"
    assert ranks.format(hide=[("server", "n1:7")]) == "decode PP1 TP0-1"
    assert list(ranks.places()) == [("pp", 1), ("server", "n1:7"), ("side", "decode")]


def test_of_many_scopes_the_largest_are_named() -> None:
    ranks = RankSet(rank for pp in range(20) for rank in tp(*range(pp + 1), scope=scope_of({"pp": pp})))
    assert ranks.format(most=2) == "PP19 TP0-19; PP18 TP0-18; 171 more ranks"


def test_a_hundred_thousand_ranks_and_a_thousand_single_ones_take_little_memory() -> None:
    def size(ranks: RankSet) -> int:
        inner = list(ranks._pieces.values())
        return sum(sys.getsizeof(x) for p in inner for x in (p, *p.values()))

    assert size(RankSet(tp(*range(100_000)))) < 100_000
    assert size(RankSet(tp(99_999))) < 1000
