"""An incident, of a server that goes on and without stacks, of the servers of its pair that were lost."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from sglang_crashkit.handler.incident import IncidentRun
from sglang_crashkit.handler.processes import ProcessTree
from sglang_crashkit.handler.session import Session
from sglang_crashkit.handler.state import Seen
from sglang_crashkit.model.peers import LostPeer, describe
from sglang_crashkit.policy import Event

logger = logging.getLogger(__name__)

#: An incident of losses is whole after this time, in seconds.
_OBSERVED_SECS = 2.0
#: Losses that come within this time of the last one belong to it, as in a restart of one after the other; however they
#: go on, an incident takes in no more after the longer time. Seconds.
_SAME_SECS, _LONGEST_SECS = 600.0, 3600.0


class PeerLosses:
    """Makes incidents of losses; `say` writes a line to the server's own log."""

    def __init__(
        self,
        tree: ProcessTree,
        session: Session,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tree = tree
        self._session = session
        self._say = say
        self._clock = clock
        self._run: IncidentRun | None = None
        self._began = self._last = 0.0

    def report(self, peers: Sequence[LostPeer]) -> None:
        """Make an incident of losses at about the same time, or add them to the one that is there."""
        counting = [peer for peer in peers if self._counts(peer)]
        if not counting:
            return
        now, text = self._clock(), " ".join(describe(counting))
        # The exits that are looked for as one is opened may be an incident that is at hand from then on.
        run = self._run_at_hand(now) or self._open(counting[0], now) or self._run_at_hand(now)
        if run is None:
            logger.info("the server ends; of its peers: %s", text)
            return
        if not self._add(run, counting):
            # The oldest incidents make room for newer ones, this one too.
            run = self._open(counting[0], now)
            if run is None or not self._add(run, counting):
                logger.error("no incident names it: %s", text)
        logger.error("%s", text)
        self._say(text)
        self._last = now

    def _counts(self, peer: LostPeer) -> bool:
        """Say whether a loss is reported: while the server itself ends, only where requests wait."""
        shutdown = self._session.triage.shutdown
        waiting = peer.count + peer.unassigned_count
        if self._tree.root.pid in shutdown.expected or (shutdown.draining and not waiting):
            logger.info("%s server %s ended while this one ends", peer.role, peer.address)
            return False
        return True

    def _run_at_hand(self, now: float) -> IncidentRun | None:
        """Return the incident that a loss of now belongs to."""
        run = self._session.run
        if run is not None and not run.finished:
            return run
        is_same = now < self._last + _SAME_SECS and now < self._began + _LONGEST_SECS
        return self._run if is_same else None

    def _open(self, peer: LostPeer, now: float) -> IncidentRun | None:
        known = (self._tree.get(pid) for pid in peer.reported_by)
        witness = next((process for process in known if process is not None), self._tree.root)
        its = {"kind": "peer_lost", "trigger": "peer_lost", "event": Event.PEER_LOST}
        seen = Seen("observed", witness.pid, witness.role, secs=_OBSERVED_SECS, **its)  # type: ignore[arg-type]
        run = self._session.open_observed(seen, witness)
        if run is not None:
            run.list_processes()
            self._run, self._began = run, now
        return run

    def _add(self, run: IncidentRun, peers: Sequence[LostPeer]) -> bool:
        try:
            run.add_peers(time.time(), peers)
        except OSError as error:
            logger.warning("incident %s could not be written anew: %s", run.path, error)
            return False
        return True
