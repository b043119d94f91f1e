"""Upstream's issues by which a failure is known already: the judge's ``known_issues.yaml``.

An entry is claimed where all of its conditions hold: ``error``, the pattern that the exception of the first failure
begins with (its class without the module, and its text); ``frames``, patterns of places that it came through; of a hang
(``hang: true``), in which a process stands, or each rank (``all_ranks: true``); ``arguments``, patterns of the server's
arguments, such as ``--speculative-algorithm=EAGLE*``. A release from ``fixed_in`` on does not have the issue, nor one
before ``since``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from sglang_crashkit.analysis.causes.case import Case, KnownIssue
from sglang_crashkit.analysis.causes.no_progress import hangs_by_itself
from sglang_crashkit.judge.knowledge import load
from sglang_crashkit.judge.matching import are_in, release_parts

#: An entry's frame in which a rank waits for the others.
_COLLECTIVE = re.compile(r"all_reduce|all_gather|broadcast")


def _applies(issue: KnownIssue, case: Case) -> bool:
    release = release_parts(case.release)
    if (issue.fixed_in and release >= release_parts(issue.fixed_in)) or (
        issue.since and release < release_parts(issue.since)
    ):
        return False
    if not are_in(issue.arguments, case.arguments):
        return False
    if issue.hang:
        # Others that wait for one show nothing but that; it may be a rank of another node.
        if case.has_other_nodes and any(map(_COLLECTIVE.search, issue.frames)):
            return False
        its = [case.first] if hangs_by_itself(case) else case.schedulers if issue.all_ranks else case.processes
        found = [are_in(issue.frames, case.doing(process)) for process in its]
        return case.is_hang and any(found) and (all(found) or not issue.all_ranks)
    error = case.error
    return error is not None and bool(re.match(issue.error, error.line)) and are_in(issue.frames, error.places)


def matching(issues: Iterable[KnownIssue], case: Case) -> list[KnownIssue]:
    """Return the issues that an incident shows, those with the most conditions first."""
    found = [issue for issue in issues if _applies(issue, case)]
    return sorted(found, key=lambda issue: -len(issue.frames) - len(issue.arguments) - len(issue.error) / 1000)


@lru_cache(maxsize=1)
def load_issues() -> tuple[KnownIssue, ...]:
    """Return the entries of the data file; it raises where that is broken."""
    entries: list[dict[str, Any]] = [dict(entry) for entry in load("known_issues")]
    for fields in entries:
        fields |= {name: tuple(fields[name]) for name in ("frames", "arguments") if name in fields}
    return tuple(KnownIssue(**fields) for fields in entries)
