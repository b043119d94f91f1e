"""Name the rank that the others wait for, of the ranks of an incident that make no progress together."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from sglang_crashkit.analysis.groups import motion_words
from sglang_crashkit.analysis.member import Member, Sight, describe, name_members
from sglang_crashkit.analysis.outliers import find_odd
from sglang_crashkit.analysis.states import activity_of
from sglang_crashkit.model.incident import ProcessReport
from sglang_crashkit.model.sample import Frame, Sample, Thread

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
    stopped = f"{name_members(members)} are all stopped (state T) until somebody sends SIGCONT"
    return f"{stopped}: no single rank looks responsible."


def member_of(report: ProcessReport) -> Member:
    """Return a process of an incident as it is compared with others."""
    seen = [sample for sample in report.samples if sample.doing]
    # It has the GIL for a moment now and then.
    holds_gil = len(seen) > 1 and all(sample.gil == "main" for sample in seen)
    sights = tuple(_sight(report, one, holds_gil=holds_gil) for one in report.samples if one.state or one.doing)
    return Member(f"{report.title} (pid {report.pid})", sights, source=report)


def _sight(report: ProcessReport, sample: Sample, *, holds_gil: bool) -> Sight:
    main = sample.main_thread
    frames = main.frames if main is not None and main.frames else tuple(frame_of(text) for text in sample.doing)
    threads = (Thread("MainThread", report.pid, False, holds_gil, frames),) if frames else ()
    wchan = str((report.state or {}).get("wchan") or "")
    process = replace(sample, pid=report.pid, wchan=wchan, threads=threads)
    return Sight(sample.state, sample.cpu_secs, activity_of(process), frames, sample.time)


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
    seen = [sample for sample in report.samples if sample.doing or sample.gil]
    if len(seen) > 1 and all(sample.gil == "taken" for sample in seen):
        return [f"No other thread of {member.name} got the GIL in time to answer."]
    return []


@lru_cache(maxsize=1024)
def frame_of(text: str) -> Frame:
    """Return the frame that `text` is the form of."""
    found = _FRAME.fullmatch(text)
    return Frame(found["function"], found["file"], int(found["line"])) if found else Frame(text, "", 0)
