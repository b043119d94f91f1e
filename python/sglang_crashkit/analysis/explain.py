"""Explain a hang from what snapshots show: who is to be looked at, what that rests on, and how well it is supported."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

from sglang_crashkit.analysis.groups import (
    Finding,
    doubt_alone,
    find_outlier,
    judge_group,
    judge_untitled,
    level_of,
    name_untitled,
    untitled_role,
)
from sglang_crashkit.analysis.member import Member, SampledProcesses, describe
from sglang_crashkit.analysis.ranks import Rank, Scope, group_of, scope_of, split_replicas
from sglang_crashkit.analysis.stack_tree import PrefixTree, format_tree
from sglang_crashkit.model.incident import LEVELS, Level
from sglang_crashkit.model.sample import Sample
from sglang_crashkit.model.snapshot import Problem

SCHEMA_VERSION = 1

#: The role of a process that multiprocessing spawned and that has no title; see `titles.role_of`.
_UNTITLED = "starting"
_KINDS = ("outlier", "waiting", "unclear", "moving", "idle")
#: Beside the schedulers, those without which no request is answered; a compiler or another helper comes and goes.
NEEDED = frozenset({"server", "detokenizer", "detokenizer_router", "data_parallel_controller", "tokenizer_worker"})
_MAX_STATEMENTS = 3
#: Groups that are told one by one, and names of those to be looked at.
_MAX_GROUPS, _MAX_NAMED = 8, 8
_MAX_PROBLEMS = 10


@dataclass(frozen=True)
class Explanation:
    """What the snapshots say."""

    kind: str  # that of the finding that matters most, see `groups.FindingKind`; ``unclear`` where nothing was seen
    statement: str  # the verdict in words
    level: Level  # how well it is supported
    named: tuple[Member, ...]  # who is to be looked at
    findings: tuple[Finding, ...]  # of each group, those that matter most first
    problems: tuple[Problem, ...]  # what could not be had
    processes: int  # how many processes were seen

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values, ``schema_version`` first."""
        return {
            "schema_version": SCHEMA_VERSION,
            "kind": self.kind,
            "statement": self.statement,
            "level": self.level,
            "named": [_named_to_json(member) for member in self.named],
            "groups": [_finding_to_json(finding) for finding in self.findings],
            "problems": [vars(problem) for problem in self.problems],
            "processes": self.processes,
        }


def explain(sampled: SampledProcesses) -> Explanation:
    """Return what was seen, in words."""
    findings = _findings(sampled)
    findings.sort(key=lambda one: (_KINDS.index(one.kind), LEVELS.index(one.level), one.group))
    problems = sampled.problems()
    if not findings:
        text = "No process was seen." if not len(sampled) else "Of no process enough was seen."
        return Explanation("unclear", text, "unknown", (), (), problems, len(sampled))
    first = findings[0]
    # What is less certain than the first is evidence, and not part of the verdict.
    telling = [f for f in findings if (f.kind, f.level) == (first.kind, first.level)]
    texts = [f"{finding.group}: {finding.statement}" if finding.group else finding.statement for finding in telling]
    if len(texts) > _MAX_STATEMENTS:
        texts[_MAX_STATEMENTS:] = [f"The same kind of thing is seen of {len(texts) - _MAX_STATEMENTS} more groups."]
    if first.kind == "outlier":
        texts += [f"{f.group}: {f.statement}" for f in findings if f.kind == "waiting"][:1]
    named = tuple(member for finding in telling for member in finding.named)
    return Explanation(first.kind, " ".join(texts), first.level, named, tuple(findings), problems, len(sampled))


def _findings(sampled: SampledProcesses) -> list[Finding]:
    groups: dict[Scope, dict[Rank, list[Member]]] = {}
    untitled: dict[Scope, list[Member]] = {}
    findings = []
    judged: list[tuple[Scope, Finding, list[Member]]] = []
    sides: set[str | None] = set()
    for member in sampled.members():
        process, rank = member.source, member.rank
        assert rank is not None
        sides.add(process.side)
        role = process.role
        untitled_as = untitled_role(member) if role == _UNTITLED else None
        if role == "scheduler":
            groups.setdefault(group_of(rank), {}).setdefault(rank, []).append(member)
        elif untitled_as == "rank":
            server = scope_of({name: place for name, place in rank.scope if name != "role"})
            untitled.setdefault(server, []).append(name_untitled(member))
        elif untitled_as == "helper" and member.has_ended():
            continue
        elif (untitled_as or role in NEEDED) and (outlier := find_outlier([member])) is not None:
            findings.append(outlier)
    common = set.intersection(*(set(scope) for scope in groups)) if groups else set()
    common = {place for place in common if place[0] != "side"}
    for scope, ranks in groups.items():
        words = [str(p) if n in ("side", "server") else f"{n.upper()}{p}" for n, p in scope if (n, p) not in common]
        replicas = split_replicas(ranks)
        for dp, lists in replicas:
            name = " ".join([*words, *([] if dp is None else [f"DP{dp}"])])
            members = [member for some in lists for member in some]
            alone = len(groups) == 1 and len(replicas) == 1 and not untitled and "side" not in dict(scope)
            judged.append((scope, judge_group("" if alone else name, members), members))
    for scope, members in untitled.items():
        name = " ".join([*(str(place) for _name, place in scope), "untitled"])
        alone = len(untitled) == 1 and not groups and "side" not in dict(scope)
        findings.append(_of_pair(scope, judge_untitled("" if alone else name, members), members, sides))
    found = zip(judged, _judge_stages(judged), strict=True)
    return findings + [_of_pair(scope, finding, members, sides) for (scope, _own, members), finding in found]


def _of_pair(scope: Scope, finding: Finding, members: list[Member], seen: Collection[str | None]) -> Finding:
    """Return the finding of a group with what it is worth where it is of a pair, of which these sides were seen."""
    side = dict(scope).get("side")
    other = {"prefill": "decode", "decode": "prefill"}.get(str(side))
    return finding if other is None or other in seen else doubt_alone(finding, members, other)


def _judge_stages(judged: list[tuple[Scope, Finding, list[Member]]]) -> list[Finding]:
    """Return the findings, with the one pipeline stage named for which all others wait, where there is one."""
    pipelines: dict[tuple[Scope, str], list[int]] = {}
    for position, (scope, finding, _members) in enumerate(judged):
        replica = finding.group.rpartition(" ")[2]
        without = tuple(place for place in scope if place[0] != "pp")
        pipelines.setdefault((without, replica if replica.startswith("DP") else ""), []).append(position)
    findings = [finding for _scope, finding, _members in judged]
    for stages in pipelines.values():
        working = [position for position in stages if not findings[position].waits]
        if len(working) != 1 or len(stages) == 1 or findings[working[0]].kind != "unclear":
            continue
        (position,) = working
        members, finding = judged[position][2], findings[position]
        others = ", ".join(findings[other].group for other in stages if other != position)
        text = f"{finding.statement} All of {others} waited meanwhile."
        named, level = tuple(members), level_of(members)
        findings[position] = replace(finding, kind="outlier", named=named, statement=text, level=level)
    return findings


def _finding_to_json(finding: Finding) -> dict[str, Any]:
    named = [_named_to_json(member) for member in finding.named]
    told = {name: getattr(finding, name) for name in ("group", "kind", "statement", "level")}
    return {**told, "named": named, "evidence": list(finding.evidence)}


def _named_to_json(member: Member) -> dict[str, Any]:
    process: Sample = member.source
    place = {"host": process.host, "pid": process.pid, "title": process.title, "side": process.side}
    return {**place, "doing": describe(member)}


def format_explanation(explanation: Explanation, tree: PrefixTree | None = None) -> Iterator[str]:
    """Yield the explanation line by line, and behind it the merged stacks where they are given."""
    yield f"Verdict ({explanation.level}): {explanation.statement}"
    for member in explanation.named[:_MAX_NAMED]:
        yield f"Look at: {member.name}"
    if len(explanation.named) > _MAX_NAMED:
        yield f"Look at: {len(explanation.named) - _MAX_NAMED} more"
    findings = explanation.findings
    for finding in findings[:_MAX_GROUPS]:
        if finding.evidence:
            yield ""
            yield f"{finding.group or 'Evidence'} ({finding.kind}, {finding.level}):"
            yield from (f"  {line}" for line in finding.evidence)
    if left := findings[_MAX_GROUPS:]:
        kinds = ", ".join(f"{sum(f.kind == kind for f in left)} {kind}" for kind in dict.fromkeys(f.kind for f in left))
        yield ""
        yield f"{len(left)} more groups: {kinds}"
    if explanation.problems:
        yield ""
        yield "Not collected:"
    for problem in explanation.problems[:_MAX_PROBLEMS]:
        yield f"  {problem.what}: {problem.why}" + (f"; next: {problem.next}" if problem.next else "")
    if len(explanation.problems) > _MAX_PROBLEMS:
        yield f"  {len(explanation.problems) - _MAX_PROBLEMS} more"
    if tree is not None and tree.root.children:
        yield ""
        # Threads of native libraries, such as NCCL's, have no such stacks.
        yield "Python stacks of all threads, outermost call first, what the fewest ranks do first:"
        yield from (f"  {line}" for line in format_tree(tree))
