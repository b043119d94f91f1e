"""What is known of a server's requests, from what its processes say that they saved and from its journals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sglang_crashkit.model.incident import JournaledRequests, Requests


def requests_of(fields: dict[str, Any]) -> Requests:
    """Return the requests that one process says it saved.

    Args:
        fields: ``path`` of the file, ``finished`` and ``unfinished``; where nothing was saved ``error`` or ``reason``.
    """
    path = fields.get("path")
    reason = None if path else str(fields.get("error") or fields.get("reason") or "there were no requests to save")
    return Requests(
        finished=_count(fields.get("finished")),
        unfinished=_count(fields.get("unfinished")),
        path=str(path) if path else None,
        reason=reason,
        source="pickle" if path else None,
    )


def add(before: Requests, now: Requests) -> Requests:
    """Return what two processes saved as one."""
    if before.finished is None and before.unfinished is None:
        return now
    path = before.path or now.path
    return replace(
        now,
        finished=(now.finished or 0) + (before.finished or 0),
        unfinished=(now.unfinished or 0) + (before.unfinished or 0),
        path=path,
        reason=None if path else now.reason,
        source="pickle" if path else None,
    )


def add_journal(requests: Requests, told: JournaledRequests) -> None:
    """Add what the journals told, which counts where the server did not."""
    requests.journal = told
    if requests.source is None and told.path:
        requests.finished, requests.unfinished, requests.source = told.finished, told.unfinished, "journal"


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
