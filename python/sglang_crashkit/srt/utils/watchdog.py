"""Hook of ``sglang/srt/utils/watchdog.py``: a process of the server has made no progress within the time limit."""

from __future__ import annotations

import logging
from typing import Any

from sglang_crashkit.srt.hooks import CAPTURE_WAIT_SECS, never_raises, request

logger = logging.getLogger(__name__)


@never_raises
def on_watchdog_timeout(watchdog: Any) -> None:
    """Have the stacks of all processes captured before the calling thread of a ``WatchdogRaw`` goes on."""
    answer = request(
        "watchdog_timeout",
        CAPTURE_WAIT_SECS,
        name=str(getattr(watchdog, "debug_name", ""))[:100],
        silent_secs=getattr(watchdog, "watchdog_timeout", None),
        soft=bool(getattr(watchdog, "soft", False)),
    )
    if answer and answer.get("incident"):
        logger.error("crash kit: watchdog timeout, stacks of all ranks are in incident %s", answer["incident"])
