"""What follows once an incident is whole: each in a process of its own, which no server and no incident waits for.

Where a container ends with its server, it ends with that, too; so the next crash handler on the same crash folder does
what was not done of the last hour's incidents.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from sglang_crashkit.handler.publishing.children import Child
from sglang_crashkit.incident.store import is_finished, parse_name
from sglang_crashkit.notifications import plan

logger = logging.getLogger(__name__)

#: How far it looks back, in seconds.
_RECENT_SECS = 3600.0
#: A server in a crash loop, and whoever is told hangs.
_MAX_AT_ONCE = 4


class AfterIncident:
    """Starts what follows.

    Args:
        environ: says what that is.
    """

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._is_wanted = plan.is_wanted(environ)
        self._children: list[Child] = []
        self._waiting: list[Path] = []

    def begin(self, folder: Path) -> None:
        """Have it started for the finished incident in a folder, once the server was answered and there is room."""
        if self._is_wanted:
            self._waiting.insert(0, folder)

    def act_on_time(self) -> None:
        """Start what waits, the newest incident first, as far as there is room; what cannot be started is logged."""
        self._children = [child for child in self._children if not child.has_ended()]
        while self._waiting and len(self._children) < _MAX_AT_ONCE:
            self._start(self._waiting.pop(0))

    def _start(self, folder: Path) -> None:
        try:
            self._children.append(Child([sys.executable, "-m", "sglang_crashkit.notifications", str(folder)]))
        except OSError as error:
            logger.error("nobody is notified of incident %s: %s", folder, error)

    def catch_up(self, incidents: Path) -> None:
        """Have it started for the incidents of the last hour in a folder that nobody was notified of."""
        if not self._is_wanted:
            return
        with contextlib.suppress(OSError):
            for path in sorted(incidents.iterdir()):
                name = parse_name(path.name)
                if name is None or name.kind in plan.QUIET_KINDS or not 0 <= time.time() - name.seconds < _RECENT_SECS:
                    continue
                if is_finished(path.name) and not (path / plan.OUTCOME).exists():
                    self.begin(path)

    def close(self) -> None:
        """Start what there is room for, and leave those alone that are at work: each has a deadline of its own."""
        self.act_on_time()
        for child in self._children:
            child.leave()
