"""The merged stacks as text, what few ranks do first."""

from __future__ import annotations

from collections.abc import Iterator

from sglang_crashkit.analysis.rank_set import RankSet
from sglang_crashkit.analysis.stack_tree import Node, PrefixTree

_MOST_LINES_OF_A_FILE = 4
#: Of a chain of calls that all ranks of a node share, the innermost and outermost are told.
_MOST_OF_A_CHAIN = 3
#: No deeper than this does the text move to the right.
_MOST_INDENTED = 20


def format_tree(tree: PrefixTree, most_lines: int = 400) -> Iterator[str]:
    """Yield the tree line by line.

    A chain of calls in which nothing branches is one entry. Where it branches, the branch of the fewest ranks comes
    first, so that who is elsewhere is seen at once.

    Args:
        tree: the merged stacks.
        most_lines: after so many lines it ends with how many entries were left out.
    """
    sets = tree.sets()
    hide = list(tree.everyone().places())
    waiting = [(child, 0) for child in _by_rarity(tree.root, sets)]
    waiting.reverse()
    lines = 0
    while waiting:
        node, depth = waiting.pop()
        chain = _chain(node)
        indent = "  " * min(depth, _MOST_INDENTED)
        words = sets[id(node)].format(hide)
        for position, text in enumerate(_chain_lines(chain)):
            if lines >= most_lines:
                yield f"... and {len(waiting) + 1} more branches"
                return
            lead = f"{words}: " if position == 0 else "    "
            yield f"{indent}{lead}{text}"
            lines += 1
        below = _by_rarity(chain[-1], sets)
        if below and len(chain[-1].ranks) and lines < most_lines:
            yield f"{indent}  {chain[-1].ranks.format(hide)}: no further"
            lines += 1
        waiting += [(child, depth + 1) for child in reversed(below)]


def _by_rarity(node: Node, sets: dict[int, RankSet]) -> list[Node]:
    return sorted(node.in_order(), key=lambda child: len(sets[id(child)]))


def _chain(node: Node) -> list[Node]:
    """Return the calls from `node` on in which nothing branches and nobody ends."""
    chain = [node]
    while len(chain[-1].children) == 1 and not len(chain[-1].ranks):
        chain.append(next(iter(chain[-1].children.values())))
    return chain


def _chain_lines(chain: list[Node]) -> Iterator[str]:
    if len(chain) <= 2 * _MOST_OF_A_CHAIN:
        yield " > ".join(_name(node) for node in chain)
        return
    left_out = len(chain) - 2 * _MOST_OF_A_CHAIN
    yield " > ".join(_name(node) for node in chain[:_MOST_OF_A_CHAIN]) + f" > ({left_out} more)"
    yield "> " + " > ".join(_name(node) for node in chain[-_MOST_OF_A_CHAIN:])


def _name(node: Node) -> str:
    lines = sorted(node.lines)
    shown = ",".join(str(line) for line in lines[:_MOST_LINES_OF_A_FILE] if line)
    more = ",..." if len(lines) > _MOST_LINES_OF_A_FILE else ""
    place = f"{node.file}:{shown}{more}" if shown else node.file
    return f"{node.function} ({place})" if place else node.function
