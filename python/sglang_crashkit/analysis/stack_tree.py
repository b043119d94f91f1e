"""The stacks of all threads of all ranks as one prefix tree, outermost frame first, whose nodes have sets of ranks.

A node stands for a function of a file, whatever the line, so that ranks at different lines of one loop stay together;
the lines are kept beside it. The tree is the same in whatever order stacks are added. Its size is that of the different
stacks, not that of the ranks.

A rank is kept where its stacks end; the set of an inner node is the union of what is below it, made when it is read.
"""

from __future__ import annotations

from collections.abc import Iterator

from sglang_crashkit.analysis.rank_set import Rank, RankSet
from sglang_crashkit.model.sample import Frame

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


class PrefixTree:
    """The merged stacks; see the module."""

    def __init__(self) -> None:
        #: The node above the outermost frames, which stands for no function.
        self.root = Node("", "")
        self._known: dict[tuple[Frame, ...], Node] = {}
        # With the stack itself, so that its id is not given to another one.
        self._recent: dict[int, tuple[tuple[Frame, ...], Node]] = {}

    def add(self, rank: Rank, frames: tuple[Frame, ...]) -> None:
        """Add a stack of a rank.

        Args:
            rank: whose it is.
            frames: innermost first.
        """
        recent = self._recent.get(id(frames))
        leaf = recent[1] if recent is not None else self._leaf(frames)
        leaf.ranks.add(rank)

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
        """Yield each node before those below it."""
        waiting = [self.root]
        while waiting:
            node = waiting.pop()
            yield node
            waiting += node.children.values()
