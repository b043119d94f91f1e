"""The stacks of all threads of all ranks as one prefix tree, outermost frame first, and its text.

A node is a function of a file, without the line, so that ranks at different lines of one loop share it; the node keeps
its lines. The tree does not depend on the order in which stacks are added. Its size depends on the number of different
stacks, not on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from sglang_crashkit.analysis.ranks import Rank, RankSet
from sglang_crashkit.model.sample import Frame

_MAX_LINES_OF_A_FILE = 4
#: Of a longer chain of calls that all ranks of a node share, this many outermost and innermost ones are shown.
_MAX_OF_A_CHAIN = 3
#: Levels deeper than this are not indented further.
_MAX_INDENTED = 20
#: Most lines of the text; it then ends with the number of entries that are left out.
_MAX_LINES = 400


@dataclass(slots=True, eq=False)
class Node:
    """A function that called the functions of its children; the root, above the outermost frames, has no function."""

    function: str = ""
    file: str = ""  # its path, in the form of `sample.Frame`
    lines: set[int] = field(default_factory=set)  # the lines at which it was
    ranks: RankSet = field(default_factory=RankSet)  # the ranks with a stack that ends here
    through: RankSet = field(default_factory=RankSet)  # the ranks with a stack through it
    children: dict[tuple[str, str], Node] = field(default_factory=dict)  # by function and file

    @property
    def place(self) -> str:
        """Its file with the first few lines; without lines if none is known."""
        lines = sorted(line for line in self.lines if line)
        shown = ",".join(map(str, lines[:_MAX_LINES_OF_A_FILE])) + ",..." * (len(lines) > _MAX_LINES_OF_A_FILE)
        return f"{self.file}:{shown}" if shown else self.file

    def in_order(self) -> list[Node]:
        """Return the children, sorted by function and file."""
        return [child for _key, child in sorted(self.children.items())]

    def add(self, rank: Rank, frames: tuple[Frame, ...]) -> None:
        """Add a stack of a rank below this node, innermost frame first."""
        node = self
        node.through.add(rank)
        for frame in reversed(frames):
            key = (frame.function, frame.file)
            node = node.children.setdefault(key, Node(*key))
            node.lines.add(frame.line)
            node.through.add(rank)
        node.ranks.add(rank)

    def all(self) -> list[Node]:
        """Return this node and all nodes below it, each caller before the functions that it called."""
        nodes = [self]
        for node in nodes:
            nodes += node.children.values()
        return nodes


def format_tree(tree: Node) -> Iterator[str]:
    """Yield the tree line by line.

    A chain of calls without a branch is one entry. Of several branches, the branch of the fewest ranks comes first, so
    that ranks that are elsewhere are seen at once.
    """
    hide = list(tree.through.places())
    waiting = [(child, 0) for child in reversed(_by_rarity(tree))]
    lines = 0
    while waiting:
        node, depth = waiting.pop()
        # The calls from this node on, up to a branch or the end of a stack.
        chain = [node]
        while len(chain[-1].children) == 1 and not len(chain[-1].ranks):
            chain.append(next(iter(chain[-1].children.values())))
        indent = "  " * min(depth, _MAX_INDENTED)
        words = node.through.format(hide)
        told = [f"{one.function} ({one.place})" if one.place else one.function for one in chain]
        lines_of_chain = [" > ".join(told)]
        if left_out := max(0, len(told) - 2 * _MAX_OF_A_CHAIN):
            outer, inner = told[:_MAX_OF_A_CHAIN], told[-_MAX_OF_A_CHAIN:]
            lines_of_chain = [f"{' > '.join(outer)} > ({left_out} more)", f"> {' > '.join(inner)}"]
        for position, text in enumerate(lines_of_chain):
            if lines >= _MAX_LINES:
                yield f"... and {len(waiting) + 1} more branches"
                return
            lead = f"{words}: " if position == 0 else "    "
            yield f"{indent}{lead}{text}"
            lines += 1
        below = _by_rarity(chain[-1])
        if below and len(chain[-1].ranks) and lines < _MAX_LINES:
            yield f"{indent}  {chain[-1].ranks.format(hide)}: no further"
            lines += 1
        waiting += [(child, depth + 1) for child in reversed(below)]


def _by_rarity(node: Node) -> list[Node]:
    return sorted(node.in_order(), key=lambda child: len(child.through))
