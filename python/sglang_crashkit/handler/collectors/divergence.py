"""Where the ranks of the server went different ways, by the steps that they noted."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from sglang_crashkit.analysis.divergence import Moment, RankSteps, find_divergence
from sglang_crashkit.analysis.ranks import rank_at
from sglang_crashkit.model.incident import Incident
from sglang_crashkit.model.step import Step

logger = logging.getLogger(__name__)


def divergence_of(
    incident: Incident, steps: Mapping[int, Sequence[Step]], opened: float, read_at: float
) -> dict[str, Any] | None:
    """Return what an incident tells of it; None where no rank noted its steps, or none has another to agree with.

    Args:
        incident: with its processes.
        steps: the last steps of the schedulers, by pid.
        opened: since when the incident is gathered, in seconds of the monotonic clock.
        read_at: when the first of the steps were read, by the same clock.
    """
    name = "the hang was noticed" if incident.kind == "hang" else "the incident"
    ranks = [
        RankSteps(rank_at(report.rank), steps.get(report.pid, ()), report.pid)
        for report in incident.processes
        if report.role == "scheduler"
    ]
    if not any(one.steps for one in ranks):
        return None
    try:
        found = find_divergence(ranks, Moment(opened, name, read_at))
    except Exception:
        # What is known beside it is worth more.
        logger.exception("the steps of the ranks cannot be compared")
        return None
    return found.to_json() if found is not None else None
