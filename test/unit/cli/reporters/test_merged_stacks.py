from __future__ import annotations

from typing import Any

import pytest

from sglang_crashkit.analysis.ranks import rank_at
from sglang_crashkit.cli.reporters.merged_stacks import Stack, merge, ranks_by_pid
from sglang_crashkit.model.sample import Frame

OUTER = Frame("event_loop", "scheduler.py", 9)


def stack(tp: int, function: str, *, scheduler: bool = True, main: bool = True) -> Stack:
    return Stack(rank_at({"tp": tp}), scheduler, main, (Frame(function, "x.py", 1), OUTER))


def words(merged: dict[str, Any], tree: int = 0) -> list[str]:
    return [merged["sets"][number]["words"] for number in merged["trees"][tree]["sets"]]


def test_each_node_has_the_ranks_in_it() -> None:
    merged = merge([stack(0, "forward"), stack(1, "forward"), stack(2, "sample")], rank_at({"tp": 2}))
    (tree,) = merged["trees"]
    loop = tree["root"][4][0]
    assert (loop[0], loop[3], sorted(child[0] for child in loop[4])) == ("event_loop", 3, ["forward", "sample"])
    # All of them, then the one that failed first.
    assert words(merged)[:2] == ["TP0-2", "TP2"]
    assert [one["words"] for one in merged["sets"] if one["first"]] == ["TP2"]


@pytest.mark.parametrize(
    ("more", "names"),
    [
        ([], ["ranks"]),
        ([stack(0, "wait", scheduler=False)], ["ranks", "all processes"]),
        ([stack(0, "wait", main=False)], ["ranks", "all threads"]),
    ],
)
def test_a_tree_that_shows_no_more_is_left_out(more: list[Stack], names: list[str]) -> None:
    assert [tree["name"] for tree in merge([stack(0, "forward"), *more], None)["trees"]] == names


def test_every_process_has_a_place_among_all() -> None:
    roles = [("scheduler", {"tp": 1}), ("detokenizer", None), ("tokenizer", None), ("tokenizer", None)]
    processes = [{"pid": pid, "role": role, "rank": rank} for pid, (role, rank) in enumerate(roles)]
    found = ranks_by_pid({"processes": [*processes, {"role": "scheduler"}, 5]})
    assert found[0] == rank_at({"tp": 1})
    assert len(set(found.values())) == len(found) == 4
