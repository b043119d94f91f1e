"""Judge processes that multiprocessing spawned for a server and that have no title, so that nobody knows their ranks.

SGLang's ranks look like that where setproctitle is missing, and until they have got as far as to take a title. What is
on the stack tells which of them are ranks.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from sglang_crashkit.analysis.groups import Finding, judge_group
from sglang_crashkit.analysis.member import Member, is_for_requests, name_members
from sglang_crashkit.analysis.states import bare_name

#: As `titles.role_of` has it.
ROLE = "starting"

#: ``rank``: it runs a scheduler, or nothing says that it runs anything else; ``worker``: it runs something else of
#: SGLang's, such as the detokenizer; ``helper``: something else, which may come and go.
UntitledRole = Literal["rank", "worker", "helper"]

#: What SGLang lets multiprocessing call in the processes that it spawns.
_ENTRY = re.compile(r"run_\w+_process(_\w+)?")
_RANK = re.compile(r"run_scheduler_process(_\w+)?")
_NOTE = "Processes without titles do not tell their ranks, so those of different groups may be among them."


def untitled_role(member: Member) -> UntitledRole:
    """Return what a process without a title does for its server, by all looks at it."""
    entries = _entries(member)
    if any(_RANK.fullmatch(entry) for entry in entries):
        return "rank"
    if entries:
        return "worker"
    is_serving = any(sight.activity.kind == "idle" for sight in member.sights)
    return "helper" if is_serving or member.has_ended() or not member.sights else "rank"


def name_untitled(member: Member) -> Member:
    """Return a rank with a name that says more than its command line."""
    process = member.source
    if not any(_RANK.fullmatch(entry) for entry in _entries(member)):
        return member
    return replace(member, name=member.name.replace(process.title, "untitled scheduler", 1))


def judge_untitled(group: str, members: Sequence[Member]) -> Finding:
    """Return what is seen of the ranks of one server that have no titles.

    They may be of several groups. Then those of a group that waits for requests, or works, are elsewhere than those of
    a group that hangs, and are not to be looked at.

    Args:
        group: its name.
        members: those that are ranks, see `untitled_role`; at least one.
    """
    finding = judge_group(group, members)
    if finding.level == "established" or len(members) == 1:
        return finding
    finding = replace(finding, evidence=(*finding.evidence, _NOTE))
    if finding.kind == "moving" and not all(member.motion() == "moving" for member in members):
        text = f"{name_members(members)}: some did different things at different looks"
        text += ", and no single rank looks responsible."
        return replace(finding, kind="unclear", statement=text, level="unknown")
    if finding.kind != "outlier":
        return finding
    if any(member.motion() == "moving" or all(map(is_for_requests, member.sights)) for member in finding.named):
        return replace(finding, kind="unclear", named=(), level="unknown")
    # What has not got as far as to run a scheduler may never do so.
    is_certain = all(_entries(member) for member in members)
    return finding if is_certain else replace(finding, level="unknown")


def _entries(member: Member) -> set[str]:
    names = (bare_name(frame) for sight in member.sights for frame in sight.frames)
    return {name for name in names if _ENTRY.fullmatch(name)}
