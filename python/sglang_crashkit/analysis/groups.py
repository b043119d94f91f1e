"""Judge one parallel group: who is to be looked at, or why nobody is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from sglang_crashkit.analysis.member import Member, describe, describe_several, is_for_requests, name_members
from sglang_crashkit.analysis.outliers import Odd, find_astray, find_odd
from sglang_crashkit.model.incident import Level

#: ``odd``: somebody stands out; ``waiting``: all wait, and nobody does; ``idle``: they wait for requests; ``moving``:
#: they go on; ``unclear``: none of that.
FindingKind = Literal["outlier", "waiting", "idle", "moving", "unclear"]

_NO_HANG = ": no hang is seen."
#: Of the others of a group, this many different things are told.
_MOST_EVIDENCE = 6


@dataclass(frozen=True)
class Finding:
    """What is seen of one group.

    Attributes:
        group: its name, empty where it is the only one.
        kind: see `FindingKind`.
        named: who is to be looked at; empty where nobody stands out.
        statement: what is seen, in one or two sentences.
        evidence: what it rests on, a sentence each.
        level: how well it is supported.
        waits: all that is left of the group waits for others.
    """

    group: str
    kind: FindingKind
    named: tuple[Member, ...]
    statement: str
    evidence: tuple[str, ...]
    level: Level
    waits: bool = False


def judge_group(name: str, members: Sequence[Member]) -> Finding:
    """Return what is seen of a group.

    Args:
        name: of the group.
        members: its processes, of which there is at least one.
    """
    evidence = _evidence(members)
    all_wait = all(member.waits() for member in members)
    odd = find_odd(members) or find_astray(members)
    if odd is not None and odd.level == "established":
        return Finding(name, "outlier", odd.members, odd.statement, evidence, odd.level)
    if _are_idle(members):
        text = f"{name_members(members)} waited for {_awaited(members)}, as when there are none{_NO_HANG}"
        return Finding(name, "idle", (), text, evidence, _level(members))
    if odd is not None and _is_convincing(odd, members):
        return Finding(name, "outlier", odd.members, odd.statement, evidence, odd.level)
    if all_wait:
        return Finding(name, "waiting", (), _waiting_text(members), evidence, "unknown", waits=True)
    moving = [member for member in members if member.motion() == "moving"]
    if moving:
        text = f"{name_members(moving)} did different things at different looks{_NO_HANG}"
        return Finding(name, "moving", (), text, evidence, "supported")
    text = _unclear_text(members) if len(members) > 1 else _sentence(members[0])
    return Finding(name, "unclear", (), text, evidence, "unknown")


def doubt_alone(finding: Finding, members: Sequence[Member], side: str) -> Finding:
    """Return what is left of a finding where nothing was seen of the other side of a pair.

    What a side without work waits for may come from there.

    Args:
        finding: of a group of one side.
        members: its processes.
        side: the other one, ``prefill`` or ``decode``.
    """
    missing = f"No process of the {side} side was found"
    finding = replace(finding, evidence=(*finding.evidence, f"{missing}."))
    works = any(sight.activity.batch for member in members for sight in member.sights)
    if finding.kind != "idle" and (finding.kind != "moving" or works):
        return finding
    text = f"{finding.statement.removesuffix(_NO_HANG)}. {missing}: whether that hangs, or is gone, is not seen."
    return replace(finding, kind="unclear", statement=text, level="unknown")


def _is_convincing(odd: Odd, members: Sequence[Member]) -> bool:
    """Say whether the odd one keeps the others waiting.

    One that goes on does not, unless the others rest meanwhile; and one look at a loop for requests shows nothing.
    """
    named = {id(member) for member in odd.members}
    others = [member for member in members if member.seen and id(member) not in named]
    if all(len(member.sights) == 1 for member in members):
        sights = [sight for member in members for sight in member.sights]
        return any(s.activity.batch for s in sights) or not any(map(is_for_requests, sights))
    return not any(member.motion() == "moving" for member in odd.members) or all(member.rests() for member in others)


def _are_idle(members: Sequence[Member]) -> bool:
    sights = [sight for member in members for sight in member.sights]
    if not sights or any(sight.activity.batch or not sight.activity.function for sight in sights):
        return False
    if not all(_takes_requests(member) for member in members):
        return False
    # One that never left a function of the loop may be stuck in it, and those that wait for each other as well: what
    # tells is a sign of life of one that is not itself in doubt.
    clear = [member for member in members if member.motion() == "moving" or all(map(is_for_requests, member.sights))]
    return any(
        member.always("idle") or member.motion() == "moving" or len(member.sights) == 1 or not member.rests()
        for member in clear
    )


def _awaited(members: Sequence[Member]) -> str:
    # In its loop a decode server also asks all the time for what prefill sends, and the other way round.
    is_of_pair = any(place[0] == "side" for member in members if member.rank for place in member.rank.scope)
    return "requests or for the other side of its pair" if is_of_pair else "requests"


def _takes_requests(member: Member) -> bool:
    requests = [sight.activity.requests or is_for_requests(sight) for sight in member.sights]
    return all(requests) or (member.motion() == "moving" and any(requests))


def _waiting_text(members: Sequence[Member]) -> str:
    places: dict[str, list[Member]] = {}
    for member in members:
        words = dict.fromkeys(sight.activity.words for sight in member.seen)
        places.setdefault(" and ".join(list(words)[:3]), []).append(member)
    if len(members) == 1:
        return f"{_sentence(members[0])} For whom is not seen."
    told = "; ".join(f"{name_members(some)} {words}" for words, some in list(places.items())[:_MOST_EVIDENCE])
    ending = "all wait, for one another or for somebody who is not seen" if len(places) == 1 else "each waits elsewhere"
    return f"{told}: {ending}, and no single rank looks responsible."


def _unclear_text(members: Sequence[Member]) -> str:
    seen = [member for member in members if member.seen]
    unseen = [member for member in members if not member.seen]
    if not unseen:
        return f"{name_members(members)}: no single rank looks responsible."
    missing = f"Of {name_members(unseen)} no stack was seen"
    if seen and all(member.waits() for member in seen):
        return f"{_waiting_text(seen)} {missing}: for {'it' if len(unseen) == 1 else 'them'} the others may wait."
    return f"{name_members(members)}: no single rank looks responsible. {missing}."


def _evidence(members: Sequence[Member]) -> tuple[str, ...]:
    """Return what the members did, those alike together, the rarest first."""
    alike: dict[tuple[str, str], list[Member]] = {}
    for member in members:
        last = member.sights[-1].activity.words if member.sights else "is known from before only"
        alike.setdefault((last, member.motion()), []).append(member)
    groups = sorted(alike.values(), key=len)
    lines = [_sentence(some[0]) if len(some) == 1 else f"{describe_several(some)}." for some in groups[:_MOST_EVIDENCE]]
    if len(groups) > _MOST_EVIDENCE:
        lines.append(f"{sum(len(some) for some in groups[_MOST_EVIDENCE:])} more did other things.")
    return tuple(lines)


def _sentence(member: Member) -> str:
    if not member.sights:
        return f"{member.name} is known from before only."
    return f"{member.name} {describe(member)}{motion_words(member)}."


def motion_words(member: Member) -> str:
    """Return what its looks say together, as the end of a sentence about it; empty where they say nothing."""
    motion = member.motion()
    if motion == "moving":
        common = member.common_function()
        return f"; it moved below {common}" if common else "; it moved"
    # One that waits may be busy with waiting.
    if motion == "unknown" or member.waits():
        return ""
    return "; it was stuck there" if motion == "still" else "; it spun there, busy all the time"


def _level(members: Iterable[Member]) -> Level:
    return "supported" if all(len(member.seen) > 1 for member in members) else "unknown"
