"""The stacks of all processes of an incident as trees for an icicle, each call with the set of ranks in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from sglang_crashkit.analysis.ranks import Rank, RankSet, rank_at, scope_of
from sglang_crashkit.analysis.stack_tree import Node, PrefixTree, format_tree
from sglang_crashkit.incident.names import Names
from sglang_crashkit.model.incident import Incident
from sglang_crashkit.view import words
from sglang_crashkit.view.evidence import IncidentFiles, cut, stacks_of

#: A tree of more nodes is cut at those of the deepest calls, and at those that are thinner, in percent.
_MAX_NODES, _MAX_DEPTH, _THINNEST = 4000, 200, 0.12
#: Of more calls in a row the inner ones are drawn as one.
_LONGEST_RUN = 6
#: Characters of a line, and of an enumeration of ranks; how many sets of ranks of a tree are told.
_MAX_LINE, _MAX_NAMES, _MAX_SETS = 1000, 60, 24


@dataclass(frozen=True)
class Box:
    """One frame of the icicle; its width is the number of stacks that have it."""

    left: float  # in percent
    width: float  # in percent
    depth: int
    name: str
    place: str
    colour: str
    words: str


@dataclass(frozen=True)
class Tree:
    """Merged stacks."""

    name: str
    text: str
    #: Of each set of ranks its colour, its name and its size: that of all, then the first failure, then the smallest.
    sets: list[tuple[str, str, int]]
    boxes: list[Box]
    height: int  # how many boxes are below each other


def merge(incident: Incident, files: IncidentFiles) -> tuple[list[Tree], str]:
    """Return the trees of the main threads of the ranks, of all processes and of all threads; and who has no stack."""
    names, first = Names(incident), incident.first_failure
    ranks = {
        one.pid: rank_at({axis: number for axis, number in one.rank.items() if 0 <= number < 1 << 20})
        if one.is_rank
        else Rank(scope_of({"role": names.short(one)}), "", 0)
        for one in incident.processes
    }
    known = [(ranks[one.pid], one, stack) for one in incident.processes for stack in stacks_of(one, files)]
    alone = str(RankSet([ranks[first.pid]])) if first is not None else ""
    trees: list[Tree] = []
    before = 0
    for name, chosen in (
        ("ranks", [one for one in known if one[2].main and one[1].is_rank]),
        ("all processes", [one for one in known if one[2].main]),
        ("all threads", known),
    ):
        if len(chosen) == before:
            continue
        before = len(chosen)
        tree = PrefixTree()
        for rank, _process, stack in chosen:
            tree.add(rank, stack.frames)
        found = {key: str(one) for key, one in tree.sets().items()}
        whole = found[id(tree.root)]
        sizes = {str(one): len(one) for one in tree.sets().values()}
        in_order = sorted(sizes.keys() - {whole}, key=lambda one: (one != alone, sizes[one], one))
        # Where all are grey, the failure alone is red.
        colours = {one: f"c{2 + place % 7}" for place, one in enumerate(in_order)} | {whole: "c0", alone: "c1"}
        sets = [(colours[one], _cut_names(one), sizes[one]) for one in [whole, *in_order][:_MAX_SETS]]
        boxes = list(_boxes(tree, found, colours))
        text = "\n".join(cut(line, _MAX_LINE) for line in format_tree(tree))
        trees.append(Tree(name, text, sets, boxes, 1 + max(box.depth for box in boxes)))
    unseen = RankSet({*ranks.values()} - {rank for rank, _process, _stack in known})
    return trees, str(unseen) if len(unseen) else ""


def _cut_names(names: str) -> str:
    return names if len(names) < _MAX_NAMES else f"{names[:_MAX_NAMES].rpartition(',')[0] or names[:_MAX_NAMES]},..."


def _boxes(tree: PrefixTree, sets: Mapping[int, str], colours: Mapping[str, str]) -> Iterator[Box]:
    """Yield the calls from the outermost on; those that are too thin not."""
    values = _values(tree)
    waiting, count = [(tree.root, 0.0, 100.0, 0)], 0
    for node, left, width, depth in waiting:
        # A run of calls that nothing branches from is told by its first and its last two.
        run = [node]
        while len(only := list(run[-1].in_order())) == 1 and sets[id(only[0])] == sets[id(node)]:
            run += only
        names: list[tuple[str, str]] = [(each.function or "all stacks", cut(each.place, 300)) for each in run]
        if len(names) > _LONGEST_RUN:
            inner = " > ".join(name for name, _place in names[2:-2])
            names[2:-2] = [(f"{len(names) - 4} calls: {inner}", "")]
        told = f"{words.count(values[id(node)], 'stack')} of {_cut_names(sets[id(node)])}"
        for row, (name, place) in enumerate(names):
            at = round(left, 3), round(width, 3), depth + row
            yield Box(*at, cut(name, 400), place, colours[sets[id(node)]], told)
        count += len(names)
        for child in sorted(run[-1].in_order(), key=lambda child: -values[id(child)]):
            share = width * values[id(child)] / values[id(node)]
            if share >= _THINNEST and count < _MAX_NODES and depth < _MAX_DEPTH:
                waiting.append((child, left, share, depth + len(names)))
            left += share


def _values(tree: PrefixTree) -> dict[int, int]:
    """Return how many stacks are in each node, alike ones of a rank as one, by the node's `id`."""
    order: list[Node] = [tree.root]
    for node in order:
        order += node.children.values()
    values: dict[int, int] = {}
    for node in reversed(order):
        values[id(node)] = len(node.ranks) + sum(values[id(child)] for child in node.children.values())
    return values
