from __future__ import annotations

import pytest

from sglang_crashkit.analysis.ranks import rank_at
from sglang_crashkit.cli.reporters.merged_stacks import Stack, merge, ranks_by_pid
from sglang_crashkit.model.sample import Frame

OUTER = Frame("event_loop", "scheduler.py", 9)


def stack(tp: int, function: str, *, scheduler: bool = True, main: bool = True) -> Stack:
    return Stack(rank_at({"tp": tp}), scheduler, main, (Frame(function, "x.py", 1), OUTER))


def test_each_call_is_as_wide_as_its_ranks() -> None:
    (tree,) = merge([stack(0, "forward"), stack(1, "forward"), stack(2, "sample")], rank_at({"tp": 2}))
    boxes = {
        box["name"]: (box["depth"], box["left"], box["width"], box["colour"], box["words"]) for box in tree["boxes"]
    }
    assert boxes == {
        "all stacks": (0, 0.0, 100.0, "c0", "3 stacks of TP0-2"),
        "event_loop": (1, 0.0, 100.0, "c0", "3 stacks of TP0-2"),
        "forward": (2, 0.0, 66.667, "c3", "2 stacks of TP0-1"),
        "sample": (2, 66.667, 33.333, "c1", "1 stack of TP2"),
    }
    # All of them, then the one that failed first.
    assert [one["words"] for one in tree["sets"]] == ["TP0-2", "TP2", "TP0-1"]
    assert tree["height"] == 3


def test_the_inner_calls_of_a_long_run_are_one() -> None:
    frames = tuple(Frame(f"f{number}", "x.py", number) for number in range(9))
    (tree,) = merge([Stack(rank_at({"tp": 0}), True, True, frames)], None)
    names = [box["name"] for box in tree["boxes"]]
    assert names == ["all stacks", "f8", "6 calls: f7 > f6 > f5 > f4 > f3 > f2", "f1", "f0"]


@pytest.mark.parametrize(
    ("more", "names"),
    [
        ([], ["ranks"]),
        ([stack(0, "wait", scheduler=False)], ["ranks", "all processes"]),
        ([stack(0, "wait", main=False)], ["ranks", "all threads"]),
    ],
)
def test_a_tree_that_shows_no_more_is_left_out(more: list[Stack], names: list[str]) -> None:
    assert [tree["name"] for tree in merge([stack(0, "forward"), *more], None)] == names


def test_every_process_has_a_place_among_all() -> None:
    roles = [("scheduler", {"tp": 1}), ("detokenizer", None), ("tokenizer", None), ("tokenizer", None)]
    processes = [{"pid": pid, "role": role, "rank": rank} for pid, (role, rank) in enumerate(roles)]
    found = ranks_by_pid({"processes": [*processes, {"role": "scheduler"}, 5]})
    assert found[0] == rank_at({"tp": 1})
    assert len(set(found.values())) == len(found) == 4
