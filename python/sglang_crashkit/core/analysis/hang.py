"""Name the rank that the others wait for, of the ranks of an incident that make no progress together."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from sglang_crashkit.core.analysis.member import Member, Sight
from sglang_crashkit.core.analysis.odd_one import find_odd
from sglang_crashkit.core.analysis.states import of_frames, of_state
from sglang_crashkit.core.incident import Look, ProcessReport
from sglang_crashkit.core.stacks import Frame

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
    # One without a stack may be the one, and whoever is named here is named without a level that says so.
    if odd is None or (odd.level != "established" and not all(member.seen for member in members)):
        return None
    return Suspect(odd.members[0].source, odd.statement)


def member_of(report: ProcessReport) -> Member:
    """Return a process of an incident as it is compared with others."""
    wchan = str((report.state or {}).get("wchan") or "")
    sights = tuple(_sight(look, wchan) for look in report.looks if look.state or look.doing)
    return Member(f"{report.title} (pid {report.pid})", sights, source=report)


def _sight(look: Look, wchan: str) -> Sight:
    frames = tuple(frame_of(text) for text in look.doing)
    return Sight(look.state, look.cpu_secs, of_state(look.state, wchan) or of_frames(frames), frames)


@lru_cache(maxsize=1024)
def frame_of(text: str) -> Frame:
    """Return the frame that `text` is the form of."""
    found = _FRAME.fullmatch(text)
    return Frame(found["function"], found["file"], int(found["line"])) if found else Frame(text, "", 0)
