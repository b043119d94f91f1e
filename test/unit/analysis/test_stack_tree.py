from __future__ import annotations

from sglang_crashkit.analysis.ranks import Rank, scope_of
from sglang_crashkit.analysis.stack_tree import Node, format_tree
from sglang_crashkit.model.sample import Frame


def add(tree: Node, number: int, *names: str, line: int = 1, **places: int | str) -> None:
    """Add a stack, outermost first."""
    frames = tuple(Frame(name, "x.py", line) for name in reversed(names))
    tree.add(Rank(scope_of(places), "tp", number), frames)


def test_a_very_deep_stack_is_taken() -> None:
    tree = Node()
    add(tree, 0, *(f"f{depth}" for depth in range(5000)))
    assert next(format_tree(tree)).startswith("TP0: f0 (x.py:1) > f1")


# -- as text


def test_what_few_ranks_do_comes_first() -> None:
    tree = Node()
    for number in range(8):
        add(tree, number, "main", "loop", "spin" if number == 5 else "all_reduce")
    assert list(format_tree(tree)) == [
        "TP0-7: main (x.py:1) > loop (x.py:1)",
        "  TP5: spin (x.py:1)",
        "  TP0-4,6-7: all_reduce (x.py:1)",
    ]


def test_a_long_chain_is_shortened_in_its_middle() -> None:
    tree = Node()
    add(tree, 0, *(f"f{depth}" for depth in range(20)))
    assert list(format_tree(tree)) == [
        "TP0: f0 (x.py:1) > f1 (x.py:1) > f2 (x.py:1) > (14 more)",
        "    > f17 (x.py:1) > f18 (x.py:1) > f19 (x.py:1)",
    ]


def test_who_went_no_further_is_told() -> None:
    tree = Node()
    add(tree, 0, "main")
    add(tree, 1, "main", "spin")
    assert list(format_tree(tree)) == ["TP0-1: main (x.py:1)", "  TP0: no further", "  TP1: spin (x.py:1)"]


def test_what_is_the_same_for_all_ranks_is_not_repeated() -> None:
    tree = Node()
    add(tree, 0, "main", server="n1:7", side="decode", pp=0)
    add(tree, 0, "spin", server="n1:7", side="decode", pp=1)
    assert list(format_tree(tree)) == ["PP0 TP0: main (x.py:1)", "PP1 TP0: spin (x.py:1)"]


def test_it_ends_with_how_much_was_left_out() -> None:
    tree = Node()
    for number in range(500):
        add(tree, number, "main", f"f{number:03}")
    lines = list(format_tree(tree))
    assert len(lines) == 401
    assert lines[-1] == "... and 101 more branches"
