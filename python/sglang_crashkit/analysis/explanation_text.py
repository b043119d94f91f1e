"""An explanation as text for a person: the verdict first, then what it rests on, group by group."""

from __future__ import annotations

from collections.abc import Iterator

from sglang_crashkit.analysis.explain import Explanation
from sglang_crashkit.analysis.groups import Finding
from sglang_crashkit.analysis.stack_tree import PrefixTree
from sglang_crashkit.analysis.tree_text import format_tree

#: Groups that are told one by one, and names of those to be looked at.
_MOST_GROUPS, _MOST_NAMED = 8, 8
_MOST_PROBLEMS = 10


def format_explanation(explanation: Explanation, tree: PrefixTree | None = None) -> Iterator[str]:
    """Yield the explanation line by line.

    Args:
        explanation: what is told.
        tree: the merged stacks, which follow where they are given.
    """
    yield f"Verdict ({explanation.level}): {explanation.statement}"
    for member in explanation.named[:_MOST_NAMED]:
        yield f"Look at: {member.name}"
    if len(explanation.named) > _MOST_NAMED:
        yield f"Look at: {len(explanation.named) - _MOST_NAMED} more"
    yield from _format_groups(explanation.findings)
    if explanation.problems:
        yield ""
        yield "Not collected:"
    for problem in explanation.problems[:_MOST_PROBLEMS]:
        yield f"  {problem.what}: {problem.why}" + (f"; next: {problem.next}" if problem.next else "")
    if len(explanation.problems) > _MOST_PROBLEMS:
        yield f"  {len(explanation.problems) - _MOST_PROBLEMS} more"
    if tree is not None and tree.root.children:
        yield ""
        # Threads of native libraries, such as NCCL's, have no such stacks.
        yield "Python stacks of all threads, outermost call first, what the fewest ranks do first:"
        yield from (f"  {line}" for line in format_tree(tree))


def _format_groups(findings: tuple[Finding, ...]) -> Iterator[str]:
    for finding in findings[:_MOST_GROUPS]:
        if not finding.evidence:
            continue
        yield ""
        yield f"{finding.group or 'Evidence'} ({finding.kind}, {finding.level}):"
        yield from (f"  {line}" for line in finding.evidence)
    if len(findings) > _MOST_GROUPS:
        left = findings[_MOST_GROUPS:]
        kinds = ", ".join(f"{sum(f.kind == kind for f in left)} {kind}" for kind in dict.fromkeys(f.kind for f in left))
        yield ""
        yield f"{len(left)} more groups: {kinds}"
