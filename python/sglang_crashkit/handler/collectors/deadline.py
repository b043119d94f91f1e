"""The one deadline of all that is held in memory and goes into an incident as it is finished."""

from __future__ import annotations

#: The longest that all of it may take, in seconds, where the incident has that much left; eight ranks take about one.
_MAX_SECS = 6.0
#: So much of an incident's time is kept for it, in seconds, and at most such a share.
_KEPT_SECS, _KEPT_SHARE = 3.0, 0.25


def secs_before(budget_secs: float) -> float:
    """Return how long an incident that may take `budget_secs` may wait before it gathers what is held in memory."""
    return budget_secs - _kept_secs(budget_secs)


def gathering_deadline(opened: float, budget_secs: float, now: float) -> float:
    """Return until when all of it is to be there, by the monotonic clock as are `opened` and `now`."""
    left_secs = max(opened + budget_secs - now, _kept_secs(budget_secs))
    return now + min(left_secs, _MAX_SECS)


def share_of(deadline: float, now: float) -> float:
    """Return until when one part of it may take, so that as much is left for the others; by the monotonic clock."""
    return now + max(0.0, deadline - now) / 2


def _kept_secs(budget_secs: float) -> float:
    return min(_KEPT_SECS, _KEPT_SHARE * budget_secs)
