"""Judge the ranks of one parallel group, which work together: who is to be looked at, or why nobody is.

One that is gone, stopped or in uninterruptible sleep is plain to see. Of the rest, most wait in a collective or for
their GPU, in the call in which they would also be if nothing were wrong; the few that are elsewhere are those to look
at. Where all wait, the few that do so elsewhere than most are. Where neither is the case, nobody is named.

Of one without a stack nothing is known: it may be the one. So it makes less certain whoever is named, and is reported.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sglang_crashkit.analysis.member import (
    Member,
    be,
    describe,
    describe_some,
    is_for_requests,
    motion_words,
    name_members,
)
from sglang_crashkit.model.incident import Level

#: To tell an outlier from the rest, the rest must be more than one.
_MIN_TO_COMPARE = 3
_NO_HANG = ": no hang is seen."
#: Of those that wait, this many different places are told.
_MAX_PLACES = 6


@dataclass(frozen=True)
class Finding:
    """What is seen of one group."""

    named: tuple[Member, ...]  # who is to be looked at; empty where no single rank looks responsible
    statement: str  # what is seen, in one or two sentences
    level: Level  # how well it is supported


def judge_group(members: Sequence[Member]) -> Finding:
    """Return what is seen of a group of at least one process."""
    outlier = find_outlier(members) or _find_diverged(members)
    if outlier is not None and outlier.level == "established":
        return outlier
    if _are_idle(members):
        text = f"{name_members(members)} waited for requests, as when there are none{_NO_HANG}"
        return Finding((), text, level_of(members))
    if outlier is not None and _is_convincing(outlier, members):
        return outlier
    if all(member.waits() for member in members):
        return Finding((), _waiting_text(members), "unknown")
    moving = [member for member in members if member.motion() == "moving"]
    if moving:
        text = f"{name_members(moving)} did different things in different samples{_NO_HANG}"
        return Finding((), text, "supported")
    text = _unclear_text(members) if len(members) > 1 else _sentence(members[0])
    return Finding((), text, "unknown")


# -- outliers


def find_outlier(members: Sequence[Member]) -> Finding | None:
    """Return who is the outlier of a group and does not wait for others, None where nobody does.

    ``established`` is what the kernel says of them. Of those that are alike the first one is first.
    """
    return _find_by_kernel(members) or _find_elsewhere(members) or _find_different(members)


def _find_by_kernel(members: Sequence[Member]) -> Finding | None:
    if gone := [member for member in members if member.has_ended()]:
        text = f"{name_members(gone)} {be(gone)} gone: there before, and not in the last sample."
        return _outlier(gone, text, "established")
    # A healthy process is in D for a moment now and then, so one sample says nothing.
    for kind, samples in (("stopped", 1), ("traced", 1), ("disk_sleep", 2)):
        held = [member for member in members if len(member.moments) >= samples and member.always(kind)]
        if held:
            # The words say how it is stopped, by whom it is held, or where it sleeps.
            words = held[0].moments[-1].activity.words.removeprefix("was ")
            return _outlier(held, f"{name_members(held)} {be(held)} {words}.", "established")
    return None


def _find_elsewhere(members: Sequence[Member]) -> Finding | None:
    seen = [member for member in members if member.seen]
    waiting = [member for member in seen if member.waits()]
    elsewhere = [member for member in seen if not member.waits()]
    if not waiting or not elsewhere or 2 * len(seen) <= len(members):
        return None
    if len(elsewhere) > 1 and len(elsewhere) >= len(waiting):
        return None
    return _outlier(elsewhere, _while(elsewhere, waiting, "waited in") + _unseen_text(members), level_of(members))


def _find_different(members: Sequence[Member]) -> Finding | None:
    seen = [member for member in members if member.seen]
    places = _by_place(seen)
    if len(seen) < _MIN_TO_COMPARE or 2 * len(seen) <= len(members) or len(places) != 2:
        return None
    few, many = sorted(places.values(), key=len)
    if len(few) == len(many) or any(member.waits() for member in few):
        return None
    return _outlier(few, _while(few, many, "were all in") + _unseen_text(members), level_of(members))


def _find_diverged(members: Sequence[Member]) -> Finding | None:
    """Return who waits elsewhere than most of a group, all of which wait; None where there is nobody.

    One sample of a server at work finds some ranks a call ahead of others, so it takes two in which nobody moved.
    """
    seen = [member for member in members if member.seen]
    if not all(member.waits() and member.motion() not in ("moving", "unknown") for member in seen):
        return None
    place, many = max(_by_place(seen).items(), key=lambda item: len(item[1]), default=(frozenset(), []))
    # A GPU that waits may have been given the collective before: most are to be where they wait for one another.
    if not place or 2 * len(many) <= len(members) or not all(member.always("collective", "store") for member in many):
        return None
    few = [member for member in seen if member.innermost() != place]
    if not few:
        return None
    text = f"{_while(few, many, 'waited in')} All wait, and not in the same call."
    return _outlier(few, text + _unseen_text(members), level_of(members))


def _outlier(named: Sequence[Member], statement: str, level: Level) -> Finding:
    return Finding(tuple(named), statement, level)


def _by_place(members: Sequence[Member]) -> dict[frozenset[tuple[str, str]], list[Member]]:
    places: dict[frozenset[tuple[str, str]], list[Member]] = {}
    for member in members:
        places.setdefault(member.innermost(), []).append(member)
    return places


def _is_convincing(outlier: Finding, members: Sequence[Member]) -> bool:
    """Say whether the outlier keeps the others waiting.

    One that goes on does not, unless the others rest meanwhile; and one sample of a loop for requests shows nothing.
    """
    named = {id(member) for member in outlier.named}
    others = [member for member in members if member.seen and id(member) not in named]
    if all(len(member.moments) == 1 for member in members):
        moments = [moment for member in members for moment in member.moments]
        return any(s.activity.batch for s in moments) or not any(map(is_for_requests, moments))
    is_moving = any(member.motion() == "moving" for member in outlier.named)
    return not is_moving or all(member.rests() for member in others)


def _are_idle(members: Sequence[Member]) -> bool:
    moments = [moment for member in members for moment in member.moments]
    if not moments or any(moment.activity.batch or not moment.activity.function for moment in moments):
        return False
    for member in members:
        requests = [moment.activity.requests or is_for_requests(moment) for moment in member.moments]
        if not (all(requests) or (member.motion() == "moving" and any(requests))):
            return False
    # One that never left a function of the loop may be stuck in it, and those that wait for each other as well: what
    # tells is a sign of life of one that is not itself in doubt.
    clear = [member for member in members if member.motion() == "moving" or all(map(is_for_requests, member.moments))]
    return any(
        member.always("idle") or member.motion() == "moving" or len(member.moments) == 1 or not member.rests()
        for member in clear
    )


def level_of(members: Iterable[Member]) -> Level:
    """Return how well it is supported what the samples of these show."""
    # What one sample shows may have been over a moment later.
    return "supported" if all(len(member.seen) > 1 for member in members) else "unknown"


# -- in words


def _while(few: Sequence[Member], many: Sequence[Member], words: str) -> str:
    where = many[0].seen[0].activity.function
    return f"{describe_some(few)}, while {name_members(many)} {words} {where}."


def _unseen_text(members: Sequence[Member]) -> str:
    unseen = [member for member in members if not member.seen]
    return f" Of {name_members(unseen)} no stack was seen." if unseen else ""


def _waiting_text(members: Sequence[Member]) -> str:
    places: dict[str, list[Member]] = {}
    for member in members:
        words = dict.fromkeys(moment.activity.words for moment in member.seen)
        places.setdefault(" and ".join(list(words)[:3]), []).append(member)
    if len(members) == 1:
        return f"{_sentence(members[0])} For whom is not seen."
    told = "; ".join(f"{name_members(some)} {words}" for words, some in list(places.items())[:_MAX_PLACES])
    ending = "all wait, for one another or for somebody who is not seen" if len(places) == 1 else "each waits elsewhere"
    return f"{told}: {ending}, and no single rank looks responsible."


def _unclear_text(members: Sequence[Member]) -> str:
    seen = [member for member in members if member.seen]
    unseen = [member for member in members if not member.seen]
    if unseen and seen and all(member.waits() for member in seen):
        whom = "it" if len(unseen) == 1 else "them"
        missing = f"Of {name_members(unseen)} no stack was seen: for {whom} the others may wait."
        return f"{_waiting_text(seen)} {missing}"
    return f"{name_members(members)}: no single rank looks responsible.{_unseen_text(members)}"


def _sentence(member: Member) -> str:
    if not member.moments:
        return f"{member.name} is known from before only."
    return f"{member.name} {describe(member)}{motion_words(member)}."
