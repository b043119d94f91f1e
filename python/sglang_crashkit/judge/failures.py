"""What failed: exceptions, ends, kernel lines and words of a start, by the tables of ``families.yaml``."""

from __future__ import annotations

from sglang_crashkit.judge.finding import Finding
from sglang_crashkit.model.case import Case


def find_failures(case: Case) -> list[Finding]:  # noqa: ARG001
    """Return what explains a failure in the case."""
    return []
