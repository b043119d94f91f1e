"""Where the ranks of the server went different ways, by the steps that they noted."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sglang_crashkit.analysis.divergence import Moment, RankSteps, find_divergence
from sglang_crashkit.analysis.ranks import rank_at
from sglang_crashkit.incident.steps import read_steps
from sglang_crashkit.model.incident import Incident
from sglang_crashkit.model.step import Step

logger = logging.getLogger(__name__)


def without_requests(steps: Sequence[Step]) -> list[Step]:
    """Return steps without their requests, which of a thousand steps take tens of megabytes; the file has them."""
    return [replace(step, requests=()) for step in steps]


def divergence_of(
    incident: Incident, steps: Mapping[int, Sequence[Step]], folder: Path, opened: float, read_at: float
) -> dict[str, Any] | None:
    """Return what an incident tells of it; None where no rank noted its steps, or none has another to agree with.

    Args:
        incident: with its processes.
        steps: the last steps of the schedulers, by pid; the hashes of the steps stand for the requests.
        folder: the incident's, which has the steps with their requests.
        opened: since when the incident is gathered, in seconds of the monotonic clock.
        read_at: when the first of the steps were read, by the same clock.
    """
    name = "the hang was noticed" if incident.kind == "hang" else "the incident"
    moment = Moment(opened, name, read_at)
    ranks = [
        RankSteps(rank_at(report.rank), steps.get(report.pid, ()), report.pid)
        for report in incident.processes
        if report.role == "scheduler"
    ]
    if not any(one.steps for one in ranks):
        return None
    try:
        found = find_divergence(ranks, moment)
        if found is not None and found.step is not None:
            told = {one.pid: one.steps for one in read_steps(folder, found.step)}
            found = find_divergence([_with(one, told.get(one.pid, ())) for one in ranks], moment) or found
    except Exception:
        # What is known beside it is worth more.
        logger.exception("the steps of the ranks cannot be compared")
        return None
    return found.to_json() if found is not None else None


def _with(one: RankSteps, told: Sequence[Step]) -> RankSteps:
    """Return the steps of a rank, some of them as they were told elsewhere."""
    return replace(one, steps=[*{step.number: step for step in (*one.steps, *told)}.values()])
