"""The stacks of all threads of all ranks as one prefix tree, outermost frame first, whose nodes have sets of ranks.

A node stands for a function of a file, whatever the line, so that ranks at different lines of one loop stay together;
the lines are kept beside it. The tree is the same in whatever order and grouping stacks are added and trees merged, so
hosts can merge their own and send the result. Its size is that of the different stacks, not that of the ranks.

A rank is kept where its stacks end; the set of an inner node is the union of what is below it, made when it is read.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sglang_crashkit.analysis.rank_set import Rank, RankSet
from sglang_crashkit.model import checked_json as checked
from sglang_crashkit.model.sample import Frame

SCHEMA_VERSION = 1

#: Stacks whose place is known without comparing them.
_MOST_RECENT = 1 << 12
#: Stacks whose place is known without following it from the root.
_MOST_KNOWN = 1 << 16


class Node:
    """A function that called the functions of its children.

    Attributes:
        function: its name.
        file: the path of its file, as `stacks.Frame` has it.
        lines: where it was.
        ranks: those of which a stack ends here.
        children: by function and file.
    """

    __slots__ = ("children", "file", "function", "lines", "ranks")

    def __init__(self, function: str, file: str) -> None:
        self.function = function
        self.file = file
        self.lines: set[int] = set()
        self.ranks = RankSet()
        self.children: dict[tuple[str, str], Node] = {}

    def child(self, function: str, file: str) -> Node:
        """Return the child for a function, which is made where there is none."""
        key = (function, file)
        found = self.children.get(key)
        if found is None:
            found = self.children[key] = Node(function, file)
        return found

    def in_order(self) -> list[Node]:
        """Return the children in an order that depends on nothing but them."""
        return [child for _key, child in sorted(self.children.items())]


@dataclass(frozen=True)
class _Rows:
    """A tree as it was sent, checked and not grown: of thousands of hosts each, it is added to one that is.

    Attributes:
        parents: of each node but the root the position of its parent, which stands before it.
        names: of each of these its function and file.
        lines: of each of these its lines.
        ranks: position and ranks of each node of which a stack ends there.
    """

    parents: tuple[int, ...]
    names: list[tuple[str, str]]
    lines: tuple[list[int], ...]
    ranks: list[tuple[int, RankSet]]


class PrefixTree:
    """The merged stacks; see the module."""

    def __init__(self) -> None:
        self._root = Node("", "")
        self._rows: _Rows | None = None
        self._known: dict[tuple[Frame, ...], Node] = {}
        # With the stack itself, so that its id is not given to another one.
        self._recent: dict[int, tuple[tuple[Frame, ...], Node]] = {}

    @property
    def root(self) -> Node:
        """The node above the outermost frames, which stands for no function."""
        if self._rows is not None:
            rows, self._rows = self._rows, None
            self._grow(rows)
        return self._root

    def add(self, rank: Rank, frames: tuple[Frame, ...]) -> None:
        """Add a stack of a rank.

        Args:
            rank: whose it is.
            frames: innermost first.
        """
        recent = self._recent.get(id(frames))
        leaf = recent[1] if recent is not None else self._leaf(frames)
        leaf.ranks.add(rank)

    def merge(self, other: PrefixTree) -> None:
        """Add all of another tree, which stays as it is."""
        if other._rows is not None:
            self._grow(other._rows)
            return
        waiting = [(self.root, other.root)]
        while waiting:
            mine, theirs = waiting.pop()
            mine.lines |= theirs.lines
            mine.ranks.update(theirs.ranks)
            waiting += [(mine.child(*key), child) for key, child in theirs.children.items()]

    def everyone(self) -> RankSet:
        """Return all ranks of which there is a stack."""
        return self.sets()[id(self.root)]

    def sets(self) -> dict[int, RankSet]:
        """Return the ranks that have a stack through each node, by the node's `id`."""
        sets: dict[int, RankSet] = {}
        for node in reversed(list(self._walk())):
            # What is below stands behind, so its sets are there.
            whole = RankSet()
            whole.update(node.ranks)
            for child in node.children.values():
                whole.update(sets[id(child)])
            sets[id(node)] = whole
        return sets

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PrefixTree) and self.to_json() == other.to_json()

    __hash__ = None  # type: ignore[assignment]

    def to_json(self) -> dict[str, Any]:
        """Return the tree as JSON values.

        Each function with its file, and each set of ranks, stands once, in a table. A node is a list: the number of its
        parent, which stands before it, that of its function, its lines, and that of its ranks, null where there are
        none. The root comes first, without a parent and a function.
        """
        numbers: dict[int, int] = {}
        names: dict[tuple[str, str], int] = {}
        sets: dict[str, tuple[int, list[list[Any]]]] = {}
        nodes: list[list[Any]] = []
        for node, parent in self._walk_with_parents():
            numbers[id(node)] = len(numbers)
            ranks = None
            if len(node.ranks):
                document = node.ranks.to_json()
                ranks, _document = sets.setdefault(str(document), (len(sets), document))
            if parent is None:
                nodes.append([None, None, [], ranks])
            else:
                name = names.setdefault((node.function, node.file), len(names))
                nodes.append([numbers[id(parent)], name, sorted(node.lines), ranks])
        return {
            "schema_version": SCHEMA_VERSION,
            "names": [list(name) for name in names],
            "sets": [document for _number, document in sets.values()],
            "nodes": nodes,
        }

    @classmethod
    def from_json(cls, document: Any) -> PrefixTree:
        """Return the tree of which `document` holds the JSON values.

        Raises:
            ValueError: it is not one, or of a newer kit.
        """
        checked.check_version(document, "tree of stacks", SCHEMA_VERSION)
        tree = cls()
        try:
            tree._rows = _read(document)
        except KeyError as error:
            raise ValueError(f"not a tree of stacks: it lacks {error}") from None
        except (IndexError, OverflowError, TypeError, ValueError) as error:
            raise ValueError(f"not a tree of stacks: {error}") from None
        return tree

    def _grow(self, rows: _Rows) -> None:
        nodes = [self.root]
        for above, key, lines in zip(rows.parents, rows.names, rows.lines, strict=True):
            children = nodes[above].children
            node = children.get(key)
            if node is None:
                node = children[key] = Node(*key)
            node.lines.update(lines)
            nodes.append(node)
        for position, ranks in rows.ranks:
            nodes[position].ranks.update(ranks)

    def _leaf(self, frames: tuple[Frame, ...]) -> Node:
        leaf = self._known.get(frames)
        if leaf is None:
            leaf = self.root
            for frame in reversed(frames):
                leaf = leaf.child(frame.function, frame.file)
                leaf.lines.add(frame.line)
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self._known[frames] = leaf
        if len(self._recent) >= _MOST_RECENT:
            self._recent.clear()
        self._recent[id(frames)] = (frames, leaf)
        return leaf

    def _walk(self) -> Iterator[Node]:
        return (node for node, _parent in self._walk_with_parents())

    def _walk_with_parents(self) -> Iterator[tuple[Node, Node | None]]:
        waiting: list[tuple[Node, Node | None]] = [(self.root, None)]
        while waiting:
            node, parent = waiting.pop()
            yield node, parent
            waiting += [(child, node) for child in reversed(node.in_order())]


def _read(document: Mapping[str, Any]) -> _Rows:
    functions, files = _columns(document["names"], 2)
    names = list(zip(checked.texts(functions), checked.texts(files), strict=True))
    sets = [RankSet.from_json(entry) for entry in document["sets"]]
    parents, numbers, lines, ranks = _columns(document["nodes"], 4)
    if not parents or parents[0] is not None or numbers[0] is not None:
        raise ValueError("the first node is no root")
    parents, count = parents[1:], len(parents)
    if (
        {*map(type, parents)} - {int}
        or not all(map(operator.lt, parents, range(1, count)))
        or min(parents, default=0) < 0
    ):
        raise ValueError("a node has no parent before it")
    if {*map(type, lines)} - {list} or {*map(type, itertools.chain.from_iterable(lines))} - {int}:
        raise ValueError("the lines of a node are not whole numbers")
    ending = [position for position in range(count) if ranks[position] is not None]
    sets = checked.pick(sets, [ranks[position] for position in ending])
    return _Rows(parents, checked.pick(names, numbers[1:]), lines[1:], list(zip(ending, sets, strict=True)))


def _columns(rows: Any, width: int) -> list[tuple[Any, ...]]:
    """Return the columns of a table."""
    if {*map(len, checked.entries(rows))} - {width}:
        raise ValueError(f"a row of a table is not of {width} values")
    return list(zip(*rows, strict=True)) or [()] * width
