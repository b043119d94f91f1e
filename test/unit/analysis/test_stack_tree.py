from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from sglang_crashkit.analysis.rank_set import Rank, scope_of
from sglang_crashkit.analysis.stack_tree import Node, PrefixTree
from sglang_crashkit.model.sample import Frame

Stack = tuple[Rank, tuple[Frame, ...]]

FRAMES = st.builds(Frame, st.sampled_from("fgh"), st.sampled_from(["a.py", "b.py"]), st.integers(0, 3))
RANKS = st.builds(Rank, st.sampled_from([(), scope_of({"pp": 1})]), st.just("tp"), st.integers(0, 2000))
STACKS = st.lists(st.tuples(RANKS, st.lists(FRAMES, max_size=4).map(tuple)), max_size=12)


def tree_of(stacks: list[Stack]) -> PrefixTree:
    tree = PrefixTree()
    for rank, frames in stacks:
        tree.add(rank, frames)
    return tree


def told(node: Node) -> Any:
    return node.function, node.file, node.lines, node.ranks, [told(child) for child in node.in_order()]


def rank(number: int) -> Rank:
    return Rank((), "tp", number)


def frame(name: str, line: int = 1) -> Frame:
    return Frame(name, "x.py", line)


def only_child(node: Node) -> Node:
    (child,) = node.children.values()
    return child


def test_common_calls_are_one_node_and_a_set_is_that_of_all_below() -> None:
    tree = tree_of(
        [
            (rank(0), (frame("wait"), frame("loop"), frame("main"))),
            (rank(1), (frame("spin"), frame("loop"), frame("main"))),
        ]
    )
    main = only_child(tree.root)
    loop = only_child(main)
    sets = tree.sets()
    assert (main.function, loop.function) == ("main", "loop")
    assert str(sets[id(loop)]) == "TP0-1"
    assert {node.function: str(sets[id(node)]) for node in loop.in_order()} == {"spin": "TP1", "wait": "TP0"}
    assert str(tree.everyone()) == "TP0-1"


def test_ranks_at_different_lines_of_a_function_stay_together() -> None:
    tree = tree_of([(rank(number), (frame("spin", number), frame("main"))) for number in range(5)])
    spin = only_child(only_child(tree.root))
    assert spin.lines == {0, 1, 2, 3, 4}
    assert str(spin.ranks) == "TP0-4"


def test_a_very_deep_stack_is_taken() -> None:
    tree = tree_of([(rank(0), tuple(frame(f"f{depth}") for depth in range(5000)))])
    assert len(tree.sets()) == 5001
    assert str(tree.everyone()) == "TP0"


@given(st.data(), STACKS)
def test_the_order_of_stacks_does_not_matter(data: st.DataObject, stacks: list[Stack]) -> None:
    assert told(tree_of(data.draw(st.permutations(stacks))).root) == told(tree_of(stacks).root)
