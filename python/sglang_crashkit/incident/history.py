"""What crashed on this host a moment ago, in one line: a server that starts may be in a crash loop."""

from __future__ import annotations

import time
from collections import Counter
from datetime import datetime
from pathlib import Path

from sglang_crashkit.incident.fingerprint import read_faults
from sglang_crashkit.incident.store import parse_name
from sglang_crashkit.model.checked_json import mapping_of

#: How far it looks back, in seconds.
RECENT_SECS = 3600.0
#: Kinds of incidents of servers that went on.
_OBSERVED = frozenset({"hang", "peer_lost", "snapshot"})


def recent_crashes(incidents: Path, now: float | None = None) -> str:
    """Return in one line what crashed within `RECENT_SECS`; empty where nothing did.

    Only names and the index of faults are read, however many incidents there are.

    Args:
        incidents: the folder of all incidents of this host.
        now: the time, in seconds since the epoch; by default that of the call.
    """
    now = time.time() if now is None else now
    try:
        names = [parse_name(path.name) for path in incidents.iterdir()]
    except OSError:
        # There is none, or it may not be read.
        return ""
    kinds = Counter(
        name.kind for name in names if name and name.kind not in _OBSERVED and 0 <= now - name.seconds < RECENT_SECS
    )
    if not kinds:
        return ""
    count = kinds.total()
    told = ", ".join(f"{number} {kind}" for kind, number in kinds.most_common())
    text = f"{count} crash{'es' if count > 1 else ''} on this host in the last hour ({told})"
    latest = max(read_faults(incidents).values(), key=lambda entry: str(entry.get("last")), default={})
    fault = mapping_of(latest.get("fault"))
    if fault and now - _seconds(latest.get("last")) < RECENT_SECS:
        text += f"; the latest: {fault.get('what')} of {fault.get('who')}, seen {latest.get('count')} times in all"
    return f"{text}; next: sglang-crashkit incidents {incidents.parent.parent}"


def _seconds(text: object) -> float:
    try:
        return datetime.fromisoformat(str(text).replace("Z", "+00:00")).timestamp()
    except ValueError:
        return 0.0
