"""What a scheduler did in one step: the batch that it ran, and what it decided on the way to it.

Ranks of one pipeline stage and one data-parallel replica run the same steps in the same order, so that the step of a
number is the same on each of them; see `analysis.divergence`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from sglang_crashkit.model import lenient

#: How far a step has come, in this order.
PHASES = ("received", "scheduled", "forward_begun", "forward_done", "processed")
#: Of a request's id, which its client chooses, evidence has so many characters.
MAX_RID = 128
_RID_START, _RID_END = 96, 16

#: What differs where ranks are compared. A decision explains a batch that differs with it, so it comes first; ``hash``
#: is that of all that must agree, where nothing else tells. ``ended_earlier`` is one that stopped where others went on,
#: and no divergence.
DivergenceKind = Literal[
    "consensus", "decision", "mode", "requests", "lengths", "hash", "ended_earlier", "unknown", "none"
]
#: The kinds that are a divergence.
DIVERGED: tuple[DivergenceKind, ...] = ("consensus", "decision", "mode", "requests", "lengths", "hash")


def short_rid(rid: object) -> str:
    """Return the id of a request as all evidence has it: of a long one the start, the end and the length."""
    if not isinstance(rid, str):
        is_small = type(rid) is int and rid.bit_length() < 64
        return str(rid) if is_small else f"<{type(rid).__name__}>"
    return rid if len(rid) <= MAX_RID else f"{rid[:_RID_START]}...{rid[-_RID_END:]}/{len(rid)}"


@dataclass(frozen=True, slots=True)
class StepRequest:
    """A request in a step's batch."""

    rid: str  # its request id, see `short_rid`; a client may give several requests the same one
    tokens: int  # how many tokens the step computes for it: what an extend takes in, 1 in a decode
    length: int  # how many tokens it has with those, input and output


@dataclass(frozen=True)
class Step:
    """One step of one scheduler."""

    number: int  # counts the batches from 1, as ``Scheduler.forward_ct`` does
    began: float  # when it began, in seconds of the monotonic clock
    ended: float | None  # when its results were processed, in seconds of the monotonic clock; None where they were not
    phase: str  # how far it came; one of `PHASES`
    mode: str  # forward mode, such as ``extend`` or ``decode``; empty before it is scheduled
    #: Those of the batch, as far as there was room for them, in the batch's order; before it is scheduled, those that
    #: were received for it.
    requests: tuple[StepRequest, ...]
    size: int  # how many of them there are
    tokens: int  # how many tokens the step computes
    #: What must agree across ranks and was decided since the step before, by its name, such as ``retract``, ``abort``,
    #: ``prefetch``: a number that is the same on each rank that decided the same.
    decisions: Mapping[str, int] = field(default_factory=dict)
    agreed_hash: int = 0  # rolling hash of all that must agree, up to this step; 0 before it is scheduled
    forward: str = ""  # forward mode of the model's last pass in it, such as ``target_verify``; empty if not known

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON object: a line of ``ranks/<rank>.steps.jsonl``."""
        requests = [{"rid": one.rid, "tokens": one.tokens, "length": one.length} for one in self.requests]
        # Not `asdict`, which takes ten times as long over many requests.
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return fields | {"requests": requests, "decisions": dict(self.decisions)}

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> Step:
        """Return the step that `to_json` wrote; raises ValueError for anything else."""
        return lenient.read_whole(document, Step, "step")
