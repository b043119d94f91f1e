"""Makes incidents of what ranks report of the other servers of a pair: of a server that goes on, and without stacks."""

from __future__ import annotations

import logging
import time
from typing import Any

from sglang_crashkit.handler.incident import IncidentRun
from sglang_crashkit.handler.processes import ProcessTree
from sglang_crashkit.handler.session import Session
from sglang_crashkit.handler.state import Seen
from sglang_crashkit.model.peers import LostPeer, describe
from sglang_crashkit.policy import Event

logger = logging.getLogger(__name__)

# All times are in seconds.
#: Every rank of a server reports the same loss; so long is waited for the others.
_GATHER_SECS = 1.0
#: An incident of losses is whole after this time.
_OBSERVED_SECS = 2.0
#: Losses that come within this time of the last one belong to its incident, as in a restart of one server after the
#: other, or of one that goes and comes; however they go on, an incident takes in no more after the longer time.
_SAME_SECS, _LONGEST_SECS = 600.0, 3600.0
#: An incident names at most this many peers, and of all so many requests that wait.
_MAX_PEERS, _MAX_WAITING = 64, 1024


class LostPeers:
    """The losses of one server's partners."""

    def __init__(self, tree: ProcessTree, session: Session) -> None:
        self._tree = tree
        self._session = session
        self._gathered: list[LostPeer] = []
        self._due = float("inf")
        self._run: IncidentRun | None = None
        self._began = self._last = 0.0

    def take(self, fields: dict[str, Any], pid: int) -> None:
        """Take in what a rank reports."""
        peer = LostPeer.from_fields(fields, pid)
        if peer is None:
            return
        if not self._gathered:
            self._due = time.monotonic() + _GATHER_SECS
        _add(self._gathered, peer)

    def next_due(self) -> float:
        """Return when `act_on_time` has something to do, by the monotonic clock."""
        return self._due

    def act_on_time(self) -> None:
        """Make an incident of what was gathered, or add it to the one that is there."""
        if time.monotonic() < self._due:
            return
        peers, self._gathered, self._due = self._gathered, [], float("inf")
        shutdown = self._session.triage.shutdown
        if self._tree.root.pid in shutdown.expected or (shutdown.draining and not any(peer.count for peer in peers)):
            logger.info("the server ends; of its peers: %s", " ".join(describe(peers)))
            return
        now = time.monotonic()
        # The exits that are looked for as one is opened may be an incident of their own, which is current then.
        run = self._current(now) or self._open(peers[0], now) or self._current(now)
        if run is None:
            return
        news = [peer for peer in peers if _add(run.incident.peers, peer)]
        if not news:
            return
        text = " ".join(describe(news))
        logger.error("%s", text)
        self._session.log.say(text)
        self._last = now
        try:
            run.note_peers(time.time(), news)
        except OSError as error:
            logger.warning("incident %s could not be written anew: %s", run.path, error)

    def _current(self, now: float) -> IncidentRun | None:
        """Return the incident that a loss of now belongs to."""
        run = self._session.run
        if run is not None and not run.finished:
            return run
        is_same = now < self._last + _SAME_SECS and now < self._began + _LONGEST_SECS
        return self._run if is_same else None

    def _open(self, peer: LostPeer, now: float) -> IncidentRun | None:
        witness = self._tree.get(peer.reported_by[0]) or self._tree.root
        its = {"kind": "peer_lost", "trigger": "peer_lost", "event": Event.PEER_LOST}
        seen = Seen("observed", witness.pid, witness.role, secs=_OBSERVED_SECS, **its)  # type: ignore[arg-type]
        run = self._session.open_observed(seen, witness)
        if run is not None:
            run.list_processes()
            self._run, self._began = run, now
        return run


def _add(known: list[LostPeer], peer: LostPeer) -> bool:
    """Add a peer to those that are known, and say whether it was not among them."""
    for each in known:
        if (each.role, each.address) == (peer.role, peer.address):
            each.merge(peer)
            return False
    if len(known) >= _MAX_PEERS:
        return False
    named = sum(len(each.requests) for each in known)
    peer.requests = peer.requests[: max(0, _MAX_WAITING - named)]
    known.append(peer)
    return True
