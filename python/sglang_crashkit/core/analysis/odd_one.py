"""Name the one that the others of its group wait for.

One that is gone, stopped or in uninterruptible sleep is plain to see. Of the rest, most wait in a collective or for
their GPU, in the call in which they would also be if nothing were wrong; the one that is elsewhere is the one to look
at. Where all wait, or several are elsewhere, nobody is named.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sglang_crashkit.core.analysis.member import Member, be, describe, name_members
from sglang_crashkit.core.incident import Level

#: To tell one that is odd from the rest, the rest must be more than one.
_FEWEST_TO_COMPARE = 3


@dataclass(frozen=True)
class Odd:
    """Who is to be looked at.

    Attributes:
        members: they; of those that are alike the first one first.
        statement: what is seen, one sentence.
        level: how well that is supported; ``established`` is what the kernel says of them.
    """

    members: tuple[Member, ...]
    statement: str
    level: Level


def find_odd(members: Sequence[Member]) -> Odd | None:
    """Return who stands out in a group, None where nobody does.

    Args:
        members: of one group; in the order in which they are named where several stand out alike.
    """
    for find in (_find_gone, _find_stopped, _find_sleeping, _find_elsewhere, _find_different):
        odd = find(members)
        if odd is not None:
            return odd
    return None


def _find_gone(members: Sequence[Member]) -> Odd | None:
    gone = tuple(member for member in members if member.is_gone or (member.last and member.last.kind == "gone"))
    if not gone:
        return None
    return Odd(gone, f"{name_members(gone)} {be(gone)} gone: there before, and not at the last look.", "established")


def _find_stopped(members: Sequence[Member]) -> Odd | None:
    stopped = _all_that(members, lambda member: member.always("stopped"))
    if stopped:
        text = f"{name_members(stopped)} {be(stopped)} stopped (state T) until somebody sends SIGCONT."
        return Odd(stopped, text, "established")
    held = _all_that(members, lambda member: member.always("traced"))
    if held and held[0].last is not None:
        # Its words say by whom.
        words = held[0].last.words.removeprefix("was ")
        return Odd(held, f"{name_members(held)} {be(held)} {words}.", "established")
    return None


def _find_sleeping(members: Sequence[Member]) -> Odd | None:
    # A healthy process is in D for a moment now and then, so one look says nothing.
    asleep = _all_that(members, lambda member: len(member.sights) > 1 and member.always("disk_sleep"))
    if not asleep or asleep[0].last is None:
        return None
    words = asleep[0].last.words.removeprefix("was ")
    return Odd(asleep, f"{name_members(asleep)} {be(asleep)} {words}.", "established")


def _find_elsewhere(members: Sequence[Member]) -> Odd | None:
    seen = [member for member in members if member.seen]
    waiting = [member for member in seen if member.waits()]
    elsewhere = [member for member in seen if not member.waits()]
    if not waiting or len(elsewhere) != 1 or len(seen) < len(members):
        return None
    where = waiting[0].seen[0].activity.function
    text = f"{elsewhere[0].name} {describe(elsewhere[0])}, while {name_members(waiting)} waited in {where}."
    return Odd((elsewhere[0],), text, _level(members))


def _find_different(members: Sequence[Member]) -> Odd | None:
    if len(members) < _FEWEST_TO_COMPARE or not all(member.seen for member in members):
        return None
    places: dict[frozenset[tuple[str, str]], list[Member]] = {}
    for member in members:
        places.setdefault(member.innermost(), []).append(member)
    if len(places) != 2:
        return None
    few, many = sorted(places.values(), key=len)
    if len(few) != 1 or few[0].waits():
        return None
    where = many[0].seen[0].activity.function
    text = f"{few[0].name} {describe(few[0])}, while {name_members(many)} were all in {where}."
    return Odd((few[0],), text, _level(members))


def _all_that(members: Sequence[Member], is_so: Callable[[Member], bool]) -> tuple[Member, ...]:
    return tuple(member for member in members if is_so(member))


def _level(members: Sequence[Member]) -> Level:
    # What one look shows may have been over a moment later.
    return "supported" if all(len(member.seen) > 1 for member in members) else "unknown"
