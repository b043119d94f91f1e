"""Say of ranks that make no progress that they are at work, where that is what their stacks show.

What may take minutes and is no hang: a compiler that runs within the rank, such as Triton's, NVRTC or the driver's; the
export of a profile; weights that are read; a prompt of very many tokens that is taken in at once. A rank that does the
first three uses its CPU or moves on; one that stands still there, as for a lock of a compiler's cache, may hang.
"""

from __future__ import annotations

from collections.abc import Sequence

from sglang_crashkit.analysis.hang import member_of
from sglang_crashkit.analysis.member import Member, describe_some
from sglang_crashkit.analysis.outliers import find_odd
from sglang_crashkit.model.incident import ProcessReport

#: The event that opens the incident of ranks that were busy for longer than anything of theirs takes.
BUSY_TOO_LONG = "busy_too_long"
#: More tokens than upstream lets a batch take in, unless prompts are not cut into chunks.
_MANY_TOKENS = 16_384
_WORK = ("compiling", "loading", "profiling")


def find_busy(ranks: Sequence[ProcessReport]) -> str:
    """Return who is at work, in a sentence; empty where that is not plain.

    Args:
        ranks: those that make no progress together.
    """
    members = [member_of(rank) for rank in ranks]
    if not members or not all(member.seen for member in members):
        return ""
    odd = find_odd(members)
    if odd is not None and odd.level == "established":
        # One that is stopped or gone does nothing, whatever the others do.
        return ""
    elsewhere = [member for member in members if not (member.waits() or member.always("idle"))]
    if elsewhere and all(_works(member) or _takes_in(member) for member in elsewhere):
        return f"{describe_some(elsewhere)}: at work, which may take long."
    if all(_takes_in(member) for member in members):
        return f"{describe_some(members)}: at work on the GPU, as so long a prompt may take."
    return ""


def _works(member: Member) -> bool:
    """Say whether it does at most looks what may take long, and does not rest."""
    # Nobody stops it for a look, so that frames may be missing at one of them.
    working = [sight for sight in member.seen if sight.activity.kind in _WORK]
    return 2 * len(working) > len(member.seen) and not member.rests()


def _takes_in(member: Member) -> bool:
    """Say whether it is in a batch that takes in very many tokens in one piece, and waits for the GPU at most."""
    report: ProcessReport = member.source
    sign = report.last_sign
    if sign is None or sign.tokens < _MANY_TOKENS or not all(sight.activity.batch for sight in member.seen):
        return False
    return member.waits() or not member.rests()
