"""What is done about peer servers that were lost: an incident of a server that goes on, without stacks."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from sglang_crashkit.handler.current import CurrentIncident
from sglang_crashkit.handler.incident_run import IncidentRun
from sglang_crashkit.handler.outlook import Outlook
from sglang_crashkit.handler.tree import ProcessTree, TrackedProcess
from sglang_crashkit.model.peers import LostPeer, describe
from sglang_crashkit.policy import Event

logger = logging.getLogger(__name__)

#: The incident is whole after this time, in seconds.
_OBSERVED_SECS = 2.0
#: Losses that come within this time of the last one, in seconds, belong to it: as in a restart of one after the other.
_SAME_SECS = 600.0
#: However they go on, an incident takes in no more after this time, in seconds.
_LONGEST_SECS = 3600.0


class PeerLosses:
    """Tells of lost peers.

    Args:
        tree: the server's processes.
        outlook: what was announced of the server's end.
        current: the incident at hand.
        say: writes a line to the server's own log.
        clock: the monotonic clock.
    """

    def __init__(
        self,
        tree: ProcessTree,
        outlook: Outlook,
        current: CurrentIncident,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tree = tree
        self._outlook = outlook
        self._current = current
        self._say = say
        self._clock = clock
        self._run: IncidentRun | None = None
        self._began = self._last = 0.0

    def tell(self, peers: Sequence[LostPeer]) -> None:
        """Make an incident of losses, or add them to the one that is there.

        Args:
            peers: what was lost at about the same time.
        """
        counting = [peer for peer in peers if self._counts(peer)]
        if not counting:
            return
        now = self._clock()
        # The exits that are looked for as one is opened may be an incident that is at hand from then on.
        run = self._run_at_hand(now) or self._open(counting[0], now) or self._run_at_hand(now)
        if run is None:
            logger.info("the server ends; of its peers: %s", " ".join(describe(counting)))
            return
        text = " ".join(describe(counting))
        if not self._add(run, counting):
            # The oldest incidents make room for newer ones, this one too.
            run = self._open(counting[0], now)
            if run is None or not self._add(run, counting):
                logger.error("no incident tells of it: %s", text)
        logger.error("%s", text)
        self._say(f"crash kit: {text}")
        self._last = now

    def _counts(self, peer: LostPeer) -> bool:
        """Say whether a loss is told: while the server itself ends, only where requests wait."""
        outlook = self._outlook
        if self._tree.root.pid in outlook.expected or (outlook.draining and not peer.count + peer.unassigned_count):
            logger.info("%s server %s ended while this one ends", peer.role, peer.address)
            return False
        return True

    def _run_at_hand(self, now: float) -> IncidentRun | None:
        """Return the incident that a loss of now belongs to."""
        run = self._current.run
        if run is not None and not run.finished:
            return run
        is_same = now < self._last + _SAME_SECS and now < self._began + _LONGEST_SECS
        return self._run if self._run is not None and is_same else None

    def _open(self, peer: LostPeer, now: float) -> IncidentRun | None:
        witness = self._witness_of(peer)
        run = self._current.open_observed("peer_lost", "peer_lost", witness, time.time(), Event.PEER_LOST)
        if run is not None:
            self._current.observe(_OBSERVED_SECS)
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

    def _witness_of(self, peer: LostPeer) -> TrackedProcess:
        known = (self._tree.get(pid) for pid in peer.reported_by)
        return next((process for process in known if process is not None), self._tree.root)
