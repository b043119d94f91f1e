from __future__ import annotations

import pytest

from sglang_crashkit.analysis.ranks import Rank, RankSet, Scope, scope_of


def tp(*numbers: int, scope: Scope = ()) -> list[Rank]:
    return [Rank(scope, "tp", number) for number in numbers]


STAGES = [rank for stage in range(4) for rank in tp(*range(8), scope=scope_of({"pp": stage}))]


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        (tp(8, *range(7)), "TP0-6,8"),
        (tp(3), "TP3"),
        ([], "no rank"),
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
    assert ranks.format().startswith("PP19 TP0-19; PP18 TP0-18; ")
    assert ranks.format().endswith("; PP12 TP0-12; 78 more ranks")
