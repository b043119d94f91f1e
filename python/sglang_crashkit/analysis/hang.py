"""Name the rank that the others wait for, of the ranks of an incident that make no progress together."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import lru_cache

from sglang_crashkit.analysis.groups import motion_words
from sglang_crashkit.analysis.member import Member, Sight, describe, name_members
from sglang_crashkit.analysis.outliers import find_odd
from sglang_crashkit.analysis.states import activity_of
from sglang_crashkit.model.incident import ProcessReport
from sglang_crashkit.model.look import Look
from sglang_crashkit.model.snapshot import ProcessSnapshot
from sglang_crashkit.model.stacks import Frame, Thread

#: Of so many ranks it is told what holds them.
_MOST_TOLD = 3
_FRAME = re.compile(r"(?P<function>.*) \((?P<file>.*):(?P<line>\d+)\)")


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
    members = [member_of(rank) for rank in ranks]
    odd = find_odd(members)
    if odd is None:
        return None
    if odd.level == "established":
        # What the kernel says of it is all there is to say.
        return Suspect(odd.members[0].source, odd.statement)
    # One without a stack may be the one, and whoever is named here is named without a level that says so.
    if not all(member.seen for member in members):
        return None
    more = [sentence for member in odd.members[:_MOST_TOLD] for sentence in _more_of(member)]
    return Suspect(odd.members[0].source, " ".join([odd.statement, *more]))


def tell(report: ProcessReport | None) -> list[str]:
    """Return what one rank alone was seen doing, in sentences; nothing where it was not seen."""
    member = member_of(report) if report is not None else None
    if member is None:
        return []
    if not member.seen:
        return _of_lock(member)
    return [f"{member.name} {describe(member)}.", *_more_of(member)]


def all_stopped(ranks: Sequence[ProcessReport]) -> str:
    """Return what is seen where all of several ranks are stopped, so that none of them stands out; empty otherwise."""
    members = [member_of(rank) for rank in ranks]
    if len(members) < 2 or not all(member.always("stopped") for member in members):
        return ""
    return f"{name_members(members)} are all stopped (state T) until somebody sends SIGCONT: none of them stands out."


def member_of(report: ProcessReport) -> Member:
    """Return a process of an incident as it is compared with others."""
    seen = [look for look in report.looks if look.doing]
    # It has the lock for a moment now and then.
    holds_lock = len(seen) > 1 and all(look.lock == "main" for look in seen)
    sights = tuple(_sight(report, look, holds_lock=holds_lock) for look in report.looks if look.state or look.doing)
    return Member(f"{report.title} (pid {report.pid})", sights, source=report)


def _sight(report: ProcessReport, look: Look, *, holds_lock: bool) -> Sight:
    frames = look.frames or tuple(frame_of(text) for text in look.doing)
    seconds = _seconds_of(look.time)
    threads = (Thread("MainThread", report.pid, False, holds_lock, frames),) if frames else ()
    wchan = str((report.state or {}).get("wchan") or "")
    process = ProcessSnapshot(
        "",
        report.pid,
        0,
        report.title,
        report.role,
        report.rank,
        seconds,
        state=look.state,
        wchan=wchan,
        threads=threads,
    )
    return Sight(look.state, look.cpu_secs, activity_of(process), frames, seconds)


def _more_of(member: Member) -> list[str]:
    """Return in sentences what the looks at one say together."""
    # The CPU time is that of all threads; a main thread that is asleep at each look does not use it.
    sleeps = all(sight.state == "S" for sight in member.sights)
    is_known = member.seconds() > 0 and not (sleeps and member.motion() == "spinning")
    motion = motion_words(member).removeprefix("; it ") if is_known else ""
    return [*([f"{member.name} {motion}."] if motion else []), *_of_lock(member)]


def _of_lock(member: Member) -> list[str]:
    """Return in a sentence that nobody in a process got its GIL, where that is so."""
    report: ProcessReport = member.source
    seen = [look for look in report.looks if look.doing or look.lock]
    if len(seen) > 1 and all(look.lock == "taken" for look in seen):
        return [f"No other thread of {member.name} got its interpreter lock in time to answer."]
    return []


def _seconds_of(time: str) -> float:
    """Return a time of `iso_time` in seconds since the epoch, 0 where it is none."""
    try:
        return datetime.strptime(time, "%Y-%m-%dT%H:%M:%S.%fZ").replace(tzinfo=timezone.utc).timestamp()
    except ValueError:
        return 0.0


@lru_cache(maxsize=1024)
def frame_of(text: str) -> Frame:
    """Return the frame that `text` is the form of."""
    found = _FRAME.fullmatch(text)
    return Frame(found["function"], found["file"], int(found["line"])) if found else Frame(text, "", 0)
