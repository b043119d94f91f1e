"""Why an incident happened: the class of the cause, what speaks for it, what to do next, and what is known upstream.

Pure and deterministic: the same incident has the same cause. "Unknown" is a good answer where it is true.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from sglang_crashkit.analysis.causes.advice import ADVICE, INCIDENT, hint_of
from sglang_crashkit.analysis.causes.case import Case, Finding
from sglang_crashkit.analysis.causes.known_issues import load_issues, matching
from sglang_crashkit.analysis.causes.rules import RULES

logger = logging.getLogger(__name__)


def explain(
    document: Mapping[str, Any],
    records: Mapping[int, Mapping[str, Any]] | None = None,
    stacks: Mapping[int, Sequence[str]] | None = None,
    logs: Mapping[int, Sequence[str]] | None = None,
) -> dict[str, Any]:
    """Return the cause of an incident, as ``incident.json`` holds it under ``cause``.

    Args:
        document: the incident; see `Incident.to_json`.
        records: by pid what failing processes wrote of themselves, as ``ranks/*.exception.json`` holds it.
        stacks: by pid the frames of the main thread, innermost first, where they are at hand.
        logs: by pid the lines of ``logs/*.log``.

    Returns:
        ``class``, one of `advice.ADVICE`, and what it is in ``words``; ``level``; ``reasons`` and ``next_steps``,
        sentences; ``known_issues`` with ``issue``, ``title``, ``fixed_in`` and ``workaround``; ``restart_helps``:
        ``yes``, ``no`` or ``unknown``. A rule or a data file that is broken is logged, and left out.
    """
    case = Case(document, records, stacks, logs)
    try:
        case.known = matching(load_issues(), case)
    except Exception as error:
        logger.error("known issues could not be looked up", exc_info=error)
    for name, rule in RULES:
        try:
            finding = rule(case)
        except Exception as error:
            logger.error("the rule for %s failed", name, exc_info=error)
            continue
        if finding is not None:
            return _to_json(name, finding, case)
    return _to_json("unknown", Finding("unknown", ("No rule applies to what is known of this incident.",)), case)


def _to_json(name: str, finding: Finding, case: Case) -> dict[str, Any]:
    advice, incident = ADVICE[name], str(case.document.get("id") or "latest")
    hint = hint_of(case.error.text) if case.error else ""
    steps = [*finding.steps, *([hint] if hint else []), *(step.replace(INCIDENT, incident) for step in advice.steps)]
    if name == "poison_request" or case.suspected:
        steps.insert(0, f'`sglang-crashkit replay {incident} --bisect --serve "COMMAND"` finds the request')
    return {
        "class": name,
        "words": advice.words,
        "level": finding.level,
        "reasons": [*finding.reasons, *case.control, *case.last_step],
        "next_steps": steps,
        "known_issues": [issue.to_json() for issue in case.known],
        # What is raised at one start is raised at the next one, unless it was chance.
        "restart_helps": "unknown" if case.error and case.is_starting and advice.restart == "yes" else advice.restart,
    }
