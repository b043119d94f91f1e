"""Name the rank that the others wait for, of ranks that make no progress together.

A rank that is stopped or in uninterruptible sleep is plain to see. Of the rest, most wait in a collective or for their
GPU, in the call in which they would also be if nothing were wrong; the one that is elsewhere is the one to look at.
Where all wait, or several are elsewhere, nobody is named.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sglang_crashkit.core.incident import Look, ProcessReport

#: Files of the innermost frame of one that waits for other ranks, or for a GPU that may wait for them.
_WAITING = re.compile(r"\((?:\S*/)?(?:torch/(?:distributed|cuda)|sglang/srt/distributed)/")
#: "function (file:line)" without the line, which changes from round to round of a loop.
_LINE = re.compile(r":\d+\)$")
#: To tell one that is odd from the rest, the rest must be more than one.
_FEWEST_TO_COMPARE = 3


@dataclass(frozen=True)
class Suspect:
    """The rank that the others wait for, as far as can be seen.

    Attributes:
        process: its report.
        statement: what is seen, one sentence.
    """

    process: ProcessReport
    statement: str


def find_suspect(ranks: Sequence[ProcessReport]) -> Suspect | None:
    """Return the rank to look at; None where none stands out.

    Args:
        ranks: those that make no progress, in the order of their last signs of life.
    """
    for find in (_find_stopped, _find_sleeping, _find_elsewhere, _find_odd):
        suspect = find(ranks)
        if suspect is not None:
            return suspect
    return None


def name_some(names: Sequence[str], most: int = 8) -> str:
    """Return the names as part of a sentence, at most `most` of them."""
    shown = list(names[:most])
    if len(names) > most:
        shown.append(f"{len(names) - most} more")
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"


def _find_stopped(ranks: Sequence[ProcessReport]) -> Suspect | None:
    stopped = [rank for rank in ranks if _always(rank, lambda look: look.state == "T")]
    if not stopped:
        return None
    return Suspect(stopped[0], f"{_names(stopped)} {_are(stopped)} stopped (state T) until somebody sends SIGCONT.")


def _find_sleeping(ranks: Sequence[ProcessReport]) -> Suspect | None:
    # A healthy process is in D for a moment now and then, so one look says nothing.
    asleep = [rank for rank in ranks if len(rank.looks) > 1 and _always(rank, lambda look: look.state == "D")]
    if not asleep:
        return None
    wchan = (asleep[0].state or {}).get("wchan")
    where = f" in the kernel's {wchan}" if wchan else ""
    return Suspect(asleep[0], f"{_names(asleep)} {_are(asleep)} in uninterruptible sleep (state D){where}.")


def _find_elsewhere(ranks: Sequence[ProcessReport]) -> Suspect | None:
    seen = [rank for rank in ranks if _frames(rank)]
    waiting = [rank for rank in seen if _waits(rank)]
    elsewhere = [rank for rank in seen if rank not in waiting]
    if not waiting or len(elsewhere) != 1 or len(seen) < len(ranks):
        return None
    return Suspect(elsewhere[0], f"{_place(elsewhere[0])}, while {_names(waiting)} waited in {_frames(waiting[0])[0]}.")


def _find_odd(ranks: Sequence[ProcessReport]) -> Suspect | None:
    if len(ranks) < _FEWEST_TO_COMPARE or not all(_frames(rank) for rank in ranks):
        return None
    places = [frozenset(_LINE.sub("", frame) for frame in _frames(rank)) for rank in ranks]
    odd = [rank for rank, place in zip(ranks, places, strict=True) if places.count(place) == 1]
    if len(odd) != 1 or len(set(places)) != 2 or _waits(odd[0]):
        return None
    others = [rank for rank in ranks if rank is not odd[0]]
    return Suspect(odd[0], f"{_place(odd[0])}, while {_names(others)} were all in {_frames(others[0])[0]}.")


def _always(rank: ProcessReport, is_so: Callable[[Look], bool]) -> bool:
    return bool(rank.looks) and all(is_so(look) for look in rank.looks)


def _frames(rank: ProcessReport) -> list[str]:
    """Return the innermost frame of each look that has one."""
    return [look.doing[0] for look in rank.looks if look.doing]


def _waits(rank: ProcessReport) -> bool:
    return all(_WAITING.search(frame) for frame in _frames(rank))


def _place(rank: ProcessReport) -> str:
    first, last = rank.looks[0], rank.looks[-1]
    used = last.cpu_secs - first.cpu_secs
    cpu = f" and used {used:.1f} s of CPU time meanwhile" if len(rank.looks) > 1 else ""
    looks = f" at {len(rank.looks)} looks" if len(rank.looks) > 1 else ""
    return f"{_names([rank])} was in {' and '.join(dict.fromkeys(_frames(rank)))}{looks}{cpu}"


def _names(ranks: Sequence[ProcessReport]) -> str:
    return name_some([f"{rank.title} (pid {rank.pid})" for rank in ranks])


def _are(ranks: Sequence[ProcessReport]) -> str:
    return "is" if len(ranks) == 1 else "are"
