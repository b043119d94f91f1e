"""Judge a server that answers no health check, or has none, by samples of its processes.

A health check that fails says little by itself: it waits behind a long batch, and a paused server does not take it in.
So the ranks decide. Where the schedulers answer something else than a health check, their loops go round.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from sglang_crashkit.analysis.explain import explain, members_of
from sglang_crashkit.analysis.member import Member, name_members
from sglang_crashkit.analysis.sightings import Sightings
from sglang_crashkit.model.incident import Level
from sglang_crashkit.model.snapshot import NodeSnapshot

#: ``crash`` where a rank has ended; ``excused`` where something else than a hang is the reason; ``patience`` where it
#: may be, or too little was seen yet.
Outcome = Literal["hang", "crash", "excused", "patience"]

#: So many rounds of samples, before it is said of a process that works that it does not go on.
MIN_SAMPLES = 3
_PAUSED = "its schedulers answer other questions than a health check: it is paused, or updates its weights"
_NO_HANG = ": no hang is seen."


@dataclass(frozen=True)
class Silence:
    """What the samples say of a server that answers nothing."""

    outcome: Outcome
    reason: str  # one sentence, or the rest of one; empty where too little was seen yet
    level: Level  # how well it is supported; ``unknown`` where it is not seen that any rank stands
    ranks: tuple[Member, ...] = ()  # its schedulers on this host


def ranks_of(rounds: Iterable[NodeSnapshot]) -> tuple[Member, ...]:
    """Return the schedulers of some rounds of samples."""
    return tuple(one for one in members_of(Sightings.of(rounds)) if one.source.role == "scheduler")


def judge_silence(
    rounds: Sequence[NodeSnapshot], server_state: str = "", *, answers: bool | None = None, by_health: bool = True
) -> Silence:
    """Judge a server.

    Args:
        rounds: samples of its processes on this host; empty, or of none, where nothing is known of them.
        server_state: state letter of its main process, empty where it is not known.
        answers: whether its schedulers answered something else than a health check; None where that is not known.
        by_health: its health check failed; false where it has none, and nothing but the ranks speaks.
    """
    ranks = ranks_of(rounds)
    if not ranks:
        if answers:
            return Silence("excused", _PAUSED, "supported")
        # Of one that has no health check either, nothing can be said.
        return Silence("hang" if by_health else "excused", "nothing is known of its ranks", "unknown")
    sightings = Sightings.of(rounds)
    traced = [one for one in members_of(sightings) if one.manner() == "traced"]
    if traced:
        return Silence("excused", _last_words(traced), "established", ranks)
    if server_state in ("T", "t") and all(one.manner() == "stopped" for one in ranks):
        return Silence("excused", "the whole server is stopped (state T)", "established", ranks)
    said = explain(sightings)
    gone = [one for one in ranks if one.manner() == "gone"]
    if gone and len(gone) == len(ranks) and by_health:
        # Upstream waits for them to end before it ends itself, and answers nothing meanwhile.
        text = f"{name_members(gone)} had ended; whether the server ends too cannot be seen"
        return Silence("patience", text, "unknown", ranks)
    if said.kind == "outlier" and said.level == "established":
        return Silence("crash" if gone else "hang", said.statement, "established", ranks)
    if answers:
        return Silence("excused", _PAUSED, "supported", ranks)
    if len(rounds) < MIN_SAMPLES:
        return Silence("patience", "", "unknown", ranks)
    at_work = [one for one in ranks if one.last is not None and one.last.is_work]
    if at_work:
        return Silence("patience" if by_health else "excused", _last_words(at_work), "supported", ranks)
    if any(one.stands() and (by_health or one.rests()) for one in ranks):
        return Silence("hang", said.statement, "supported", ranks)
    if not by_health:
        return Silence("excused", "its ranks go on", "supported", ranks)
    if not any(one.seen or one.cpu_used() for one in ranks):
        return Silence("hang", said.statement, "unknown", ranks)
    text = said.statement.removesuffix(_NO_HANG).removesuffix(".")
    return Silence("patience", f"{text}; whether they get on with the batch cannot be seen", "unknown", ranks)


def _last_words(members: Sequence[Member]) -> str:
    words = members[0].last.words if members[0].last is not None else ""
    return f"{name_members(members)} {words}"
