"""What a scheduler did in one step: the batch that it ran, and its decisions since the step before.

Ranks of one pipeline stage and one data-parallel replica run the same steps in the same order, so a step number means
the same step on each of them; see `analysis.divergence`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from sglang_crashkit.model import lenient

#: How far a step has come, in this order.
PHASES = ("received", "scheduled", "forward_begun", "forward_done", "processed")
#: Evidence shortens a request's id, which its client chooses, to about this many characters.
MAX_RID = 128
_RID_START, _RID_END = 96, 16

#: How ranks differ. A decision explains the batch that differs because of it, so it comes first; ``hash`` means that
#: only the hash of all that must agree differs. ``ended_earlier`` means that a rank stopped while others continued,
#: which is not a divergence.
DivergenceKind = Literal[
    "consensus", "decision", "mode", "requests", "lengths", "hash", "ended_earlier", "unknown", "none"
]
#: The kinds that are a divergence.
DIVERGED: tuple[DivergenceKind, ...] = ("consensus", "decision", "mode", "requests", "lengths", "hash")


def short_rid(rid: object) -> str:
    """Return the id of a request as all evidence shows it; a long id as its start, end and length."""
    if not isinstance(rid, str):
        is_small = type(rid) is int and rid.bit_length() < 64
        return str(rid) if is_small else f"<{type(rid).__name__}>"
    return rid if len(rid) <= MAX_RID else f"{rid[:_RID_START]}...{rid[-_RID_END:]}/{len(rid)}"


@dataclass(frozen=True, slots=True)
class StepRequest:
    """A request in a step's batch."""

    rid: str  # its request id, see `short_rid`; a client may give several requests the same one
    tokens: int  # how many tokens the step computes for it: the tokens that an extend takes in, 1 in a decode
    length: int  # how many tokens it has including those, input and output


@dataclass(frozen=True)
class Step:
    """One step of one scheduler."""

    number: int  # counts the batches from 1, as ``Scheduler.forward_ct`` does
    began: float  # when it began, in seconds of the monotonic clock
    ended: float | None  # when its results were processed, in seconds of the monotonic clock; None if they were not
    phase: str  # how far it came; one of `PHASES`
    mode: str  # forward mode, such as ``extend`` or ``decode``; empty before it is scheduled
    #: The requests of the batch in its order, as many as fit into the record; before the step is scheduled, the
    #: requests that were received for it.
    requests: tuple[StepRequest, ...]
    size: int  # how many requests there are, including those that did not fit
    tokens: int  # how many tokens the step computes
    #: Decisions since the step before that must agree across ranks, by name, such as ``retract``, ``abort``,
    #: ``prefetch``: a number that is equal on ranks that decided the same.
    decisions: Mapping[str, int] = field(default_factory=dict)
    agreed_hash: int = 0  # rolling hash of all that must agree, up to this step; 0 before the step is scheduled
    forward: str = ""  # forward mode of the model's last pass in the step, such as ``target_verify``; empty if unknown

    def to_json(self) -> dict[str, Any]:
        """Return the step as a JSON object, a line of ``ranks/<rank>.steps.jsonl``."""
        requests = [{"rid": one.rid, "tokens": one.tokens, "length": one.length} for one in self.requests]
        # `asdict` takes ten times as long for many requests.
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return fields | {"requests": requests, "decisions": dict(self.decisions)}

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> Step:
        """Return the step in a result of `to_json`; raises ValueError for anything else."""
        return lenient.read_whole(document, Step, "step")
