"""Opens an incident when a rank reports that the other server of a pair is lost.

This server goes on, so no stacks are taken.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from sglang_crashkit.handler.incident import IncidentRun
from sglang_crashkit.handler.processes import ProcessTree, TrackedProcess
from sglang_crashkit.handler.session import Session
from sglang_crashkit.handler.triage import Seen
from sglang_crashkit.model.peers import LostPeer, describe
from sglang_crashkit.policy import Event

logger = logging.getLogger(__name__)

#: An incident of losses is whole after this time, in seconds: every rank of a server reports the same one.
_OBSERVED_SECS = 2.0
#: Losses that come within this time of the last one, in seconds, belong to its incident, as in a restart of one server
#: after the other, or of one that goes and comes; however they go on, it takes in no more after the longer time.
_SAME_SECS, _LONGEST_SECS = 600.0, 3600.0


class LostPeers:
    """The losses of one server's partners."""

    def __init__(self, tree: ProcessTree, session: Session) -> None:
        self._tree = tree
        self._session = session
        self._run: IncidentRun | None = None
        self._began = self._last = 0.0

    def take(self, fields: dict[str, Any], sender: TrackedProcess) -> None:
        """Make an incident of what a rank reports, or add it to the one that is there."""
        peer = LostPeer.from_fields(fields, sender.pid)
        if peer is None:
            return
        text, shutdown = " ".join(describe([peer])), self._session.triage.shutdown
        if self._tree.root.pid in shutdown.expected or (shutdown.draining and not peer.count):
            logger.info("the server ends: %s", text)
            return
        now = time.monotonic()
        # The exits that are looked for as one is opened may be an incident of their own, which is current then.
        run = self._current(now) or self._open(sender, now) or self._current(now)
        if run is not None and run.add_peer(time.time(), peer):
            self._last = now
            logger.error("%s", text)
            self._session.log.say(text)

    def _current(self, now: float) -> IncidentRun | None:
        """Return the incident that a loss of now belongs to."""
        run = self._session.run
        if run is not None and not run.finished:
            return run
        is_same = now < self._last + _SAME_SECS and now < self._began + _LONGEST_SECS
        return self._run if is_same else None

    def _open(self, witness: TrackedProcess, now: float) -> IncidentRun | None:
        its = {"kind": "peer_lost", "trigger": "peer_lost", "event": Event.PEER_LOST}
        seen = Seen("observed", witness.pid, witness.role, secs=_OBSERVED_SECS, **its)  # type: ignore[arg-type]
        run = self._session.open_observed(seen, witness)
        if run is not None:
            self._run, self._began = run, now
            # Who is there and in which state: what happened, happened elsewhere.
            self._session.capture()
        return run
