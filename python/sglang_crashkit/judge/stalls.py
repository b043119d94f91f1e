"""What does not come back: hangs, and the calm states that look like them."""

from __future__ import annotations

from sglang_crashkit.judge.finding import Finding
from sglang_crashkit.model.case import Case


def find_stalls(case: Case) -> list[Finding]:  # noqa: ARG001
    """Return what explains that a process makes no progress."""
    return []
