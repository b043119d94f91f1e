from __future__ import annotations

import json
from typing import Any

import pytest
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


def merged(*trees: PrefixTree) -> PrefixTree:
    whole = PrefixTree()
    for tree in trees:
        whole.merge(tree)
    return whole


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


def test_a_very_deep_stack_is_taken_and_survives_its_json() -> None:
    tree = tree_of([(rank(0), tuple(frame(f"f{depth}") for depth in range(5000)))])
    assert PrefixTree.from_json(json.loads(json.dumps(tree.to_json()))) == tree
    assert merged(tree, tree) == tree


@given(st.data(), STACKS)
def test_the_order_of_stacks_does_not_matter(data: st.DataObject, stacks: list[Stack]) -> None:
    assert tree_of(data.draw(st.permutations(stacks))) == tree_of(stacks)


@given(STACKS, STACKS, STACKS)
def test_merging_is_associative_and_commutative(first: list[Stack], second: list[Stack], third: list[Stack]) -> None:
    one, two, three = tree_of(first), tree_of(second), tree_of(third)
    whole = tree_of(first + second + third)
    assert merged(merged(one, two), three) == whole
    assert merged(one, merged(two, three)) == whole
    assert merged(three, one, two) == whole
    # Those merged from are as they were.
    assert (one, two, three) == (tree_of(first), tree_of(second), tree_of(third))


@given(st.data(), STACKS)
def test_any_grouping_gives_the_same_tree(data: st.DataObject, stacks: list[Stack]) -> None:
    groups: list[list[Stack]] = [[] for _ in range(4)]
    for stack in data.draw(st.permutations(stacks)):
        groups[data.draw(st.integers(0, 3))].append(stack)
    trees = data.draw(st.permutations([tree_of(group) for group in groups]))
    while len(trees) > 1:
        one, two = trees.pop(data.draw(st.integers(0, len(trees) - 1))), trees.pop()
        trees.append(merged(one, two))
    assert trees[0] == tree_of(stacks)


@given(STACKS)
def test_a_tree_survives_its_json_and_grows_on_from_it(stacks: list[Stack]) -> None:
    tree = tree_of(stacks)
    read = PrefixTree.from_json(json.loads(json.dumps(tree.to_json())))
    assert read == tree
    for one, frames in stacks:
        read.add(one, frames)
    assert read == tree


ROOT = [None, None, [], None]


def document_of(*nodes: Any, **parts: Any) -> dict[str, Any]:
    return {"schema_version": 1, "names": [["f", "x"]], "sets": [], "nodes": [ROOT, *nodes], **parts}


def test_a_newer_tree_is_refused_with_both_versions() -> None:
    with pytest.raises(ValueError, match="schema_version 2, this kit reads up to 1"):
        PrefixTree.from_json(document_of(schema_version=2))


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (None, "there is no schema_version"),
        ({}, "there is no schema_version"),
        ({"schema_version": 1}, "it lacks 'names'"),
        (document_of(nodes=5), "5 is not a list"),
        (document_of(nodes=[]), "the first node is no root"),
        (document_of(nodes=[[0, 0, [], None]]), "the first node is no root"),
        (document_of([1]), "a row of a table is not of 4 values"),
        (document_of([1, 0, [], None]), "a node has no parent before it"),
        (document_of([-1, 0, [], None]), "a node has no parent before it"),
        (document_of([None, 0, [], None]), "a node has no parent before it"),
        (document_of([0, 1, [], None]), "from 1 to 1 in a table of 1"),
        (document_of([0, 0, ["a"], None]), "the lines of a node are not whole numbers"),
        (document_of([0, 0, [1], 0]), "from 0 to 0 in a table of 0"),
        (document_of([0, 0, [1], 0], sets=[[5]]), "not a set of ranks"),
        (document_of(names=[[5, "x"]]), "5 is not text"),
    ],
)
def test_what_is_no_tree_is_refused_with_one_reason(document: Any, message: str) -> None:
    with pytest.raises(ValueError, match=r"^not a tree of stacks: ") as caught:
        PrefixTree.from_json(document)
    assert message in str(caught.value)
