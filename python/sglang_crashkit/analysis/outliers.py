"""Name the one that the others of its group wait for.

One that is gone, stopped or in uninterruptible sleep is plain to see. Of the rest, most wait in a collective or for
their GPU, in the call in which they would also be if nothing were wrong; the few that are elsewhere are those to look
at. Where all wait, the few that do so elsewhere than most are. Where neither is the case, nobody is named.

Of one without a stack nothing is known: it may be the one. So it makes less certain whoever is named, and is told of.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sglang_crashkit.analysis.member import Member, be, describe_some, name_members
from sglang_crashkit.model.incident import Level

#: To tell one that is odd from the rest, the rest must be more than one.
_FEWEST_TO_COMPARE = 3


@dataclass(frozen=True)
class Odd:
    """Who is to be looked at.

    Attributes:
        members: they; of those that are alike the first one first.
        statement: what is seen, one sentence, and another one where some were not seen.
        level: how well that is supported; ``established`` is what the kernel says of them.
    """

    members: tuple[Member, ...]
    statement: str
    level: Level


def find_odd(members: Sequence[Member]) -> Odd | None:
    """Return who stands out in a group and does not wait for others, None where nobody does.

    Args:
        members: of one group; in the order in which they are named where several stand out alike.
    """
    for find in (_find_gone, _find_stopped, _find_sleeping, _find_elsewhere, _find_different):
        odd = find(members)
        if odd is not None:
            return odd
    return None


def _find_gone(members: Sequence[Member]) -> Odd | None:
    gone = _all_that(members, Member.has_ended)
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


def find_astray(members: Sequence[Member]) -> Odd | None:
    """Return who waits elsewhere than most of a group, all of which wait; None where there is nobody.

    One look at a server at work finds some of its ranks a call ahead of others, so it takes two in which nobody moved.

    Args:
        members: of one group; in the order in which they are named.
    """
    seen = [member for member in members if member.seen]
    if not all(member.waits() and member.motion() not in ("moving", "unknown") for member in seen):
        return None
    by_place: dict[frozenset[tuple[str, str]], list[Member]] = {}
    for member in seen:
        by_place.setdefault(member.innermost(), []).append(member)
    place, many = max(by_place.items(), key=lambda item: len(item[1]), default=(frozenset(), []))
    # A GPU that waits may have been given the collective before: most are to be where they wait for one another.
    if not place or 2 * len(many) <= len(members) or not all(member.always("collective", "store") for member in many):
        return None
    few = tuple(member for member in seen if member.innermost() != place)
    if not few:
        return None
    text = f"{_while(few, many, 'waited in')} All wait, and not in the same call."
    return Odd(few, text + _unseen_text(members), _level(members))


def _find_elsewhere(members: Sequence[Member]) -> Odd | None:
    seen = [member for member in members if member.seen]
    waiting = [member for member in seen if member.waits()]
    elsewhere = tuple(member for member in seen if not member.waits())
    if not waiting or not elsewhere or 2 * len(seen) <= len(members):
        return None
    if len(elsewhere) > 1 and len(elsewhere) >= len(waiting):
        return None
    return Odd(elsewhere, _while(elsewhere, waiting, "waited in") + _unseen_text(members), _level(members))


def _find_different(members: Sequence[Member]) -> Odd | None:
    seen = [member for member in members if member.seen]
    if len(seen) < _FEWEST_TO_COMPARE or 2 * len(seen) <= len(members):
        return None
    places: dict[frozenset[tuple[str, str]], list[Member]] = {}
    for member in seen:
        places.setdefault(member.innermost(), []).append(member)
    if len(places) != 2:
        return None
    few, many = sorted(places.values(), key=len)
    if len(few) == len(many) or any(member.waits() for member in few):
        return None
    return Odd(tuple(few), _while(few, many, "were all in") + _unseen_text(members), _level(members))


def _while(few: Sequence[Member], many: Sequence[Member], words: str) -> str:
    where = many[0].seen[0].activity.function
    return f"{describe_some(few)}, while {name_members(many)} {words} {where}."


def _unseen_text(members: Sequence[Member]) -> str:
    unseen = [member for member in members if not member.seen]
    return f" Of {name_members(unseen)} no stack was seen." if unseen else ""


def _all_that(members: Sequence[Member], is_so: Callable[[Member], bool]) -> tuple[Member, ...]:
    return tuple(member for member in members if is_so(member))


def _level(members: Sequence[Member]) -> Level:
    # What one look shows may have been over a moment later.
    return "supported" if all(len(member.seen) > 1 for member in members) else "unknown"
