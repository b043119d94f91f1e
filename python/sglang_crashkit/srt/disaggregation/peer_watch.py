"""Watch the other servers of a prefill and decode pair from inside a scheduler, and tell the crash handler of a loss.

SGLang itself learns of a lost prefill server by a heartbeat, after 5 to 10 s; of a lost decode server only when it
sends to it: a request that waits to be asked for by a decode server waits for 300 s
(``SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT``) and nothing says why. A thread of the scheduler therefore holds one
connection (`Link`) to each peer that SGLang has spoken to. What becomes of the requests is left to SGLang.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections import deque
from dataclasses import dataclass, field

from sglang_crashkit.core.incident import iso_time
from sglang_crashkit.core.peers import LostPeer, Sign, WaitingRequest, describe
from sglang_crashkit.core.settings import SOCKET_VARIABLE, Settings
from sglang_crashkit.srt.disaggregation.link import Link
from sglang_crashkit.srt.disaggregation.view import Endpoint, Look, View
from sglang_crashkit.srt.hooks import never_raises, notify

logger = logging.getLogger(__name__)


_LOOK_SECS = 1.0
#: A peer that was lost is back when nothing spoke against it for this long, in seconds.
_BACK_SECS = 30.0
#: A lost peer that nobody asks for is looked for no longer than this, in seconds.
_FORGET_SECS = 600.0
#: SGLang's own word that a transfer failed waits this long for the connection to say more, in seconds.
_PATIENCE_SECS = 2.0
#: The watch ends when it fails this often in a row.
_ENOUGH_FAILURES = 3
#: A scheduler has more descriptors than this, and more peers were never seen.
_MOST_LINKS = 512


@dataclass
class _Watched:
    """A peer.

    Attributes:
        address: its name.
        links: the connections to its processes.
        waited: the requests that were seen to wait for it lately.
        failed_since: since when SGLang has given it up, by the monotonic clock.
        lost_at: when it was reported, by the monotonic clock; None while it is there.
        steady_since: since when nothing speaks against it.
    """

    address: str
    links: dict[Endpoint, Link] = field(default_factory=dict)
    waited: list[WaitingRequest] = field(default_factory=list)
    failed_since: float | None = None
    lost_at: float | None = None
    steady_since: float | None = None

    @property
    def sign(self) -> Sign | None:
        return next((link.lost for link in self.links.values() if link.lost), None)

    @property
    def is_well(self) -> bool:
        return self.lost_at is None and bool(self.links) and not any(link.failures for link in self.links.values())

    @property
    def since(self) -> float:
        return min((link.since for link in self.links.values() if link.since), default=time.time())

    def see(self, look: Look) -> None:
        """Note who waits for it now; from the first sign on those who waited are kept."""
        kept = self.waited if any(link.since for link in self.links.values()) else []
        self.waited = list(dict.fromkeys([*kept, *look.waiting_for(self.address)]))

    def close(self) -> None:
        for link in self.links.values():
            link.close()
        self.links.clear()


class PeerWatch:
    """Watches the peers of one scheduler until `stop`, or until SGLang's tables are gone.

    Args:
        view: where the peers are found.
    """

    def __init__(self, view: View) -> None:
        self._view = view
        self._peers: dict[str, _Watched] = {}
        self._told: deque[tuple[str, Look]] = deque(maxlen=64)
        self._stopped = threading.Event()
        self._look: Look = Look({})
        self._next_look = 0.0

    def start(self) -> None:
        """Begin, in a thread that ends with the process."""
        threading.Thread(target=self._run, name="crashkit-peers", daemon=True).start()

    def stop(self) -> None:
        """End within a second."""
        self._stopped.set()

    def note_heartbeat(self, address: str) -> None:
        """Note that SGLang's heartbeat gave a peer up, before SGLang forgets which requests wait for it.

        May be called from any thread.
        """
        look = self._view.look()
        if look is not None:
            self._told.append((address, look))

    def _run(self) -> None:
        failures = 0
        while failures < _ENOUGH_FAILURES and not self._stopped.wait(failures):
            goes_on = self._turn()
            if goes_on is False:
                break
            failures = 0 if goes_on else failures + 1
        if failures:
            logger.warning("crash kit: the other servers of the pair are watched no longer")
        for peer in self._peers.values():
            peer.close()

    @never_raises
    def _turn(self) -> bool:
        """Go round once, within `_LOOK_SECS`; say whether there is anything left to watch."""
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + _LOOK_SECS
            look = self._view.look()
            if look is None:
                return False
            self._take(look, now)
        self._wait()
        self._judge(time.monotonic())
        return True

    # -- what is there

    def _take(self, look: Look, now: float) -> None:
        self._look = look
        for address, endpoints in look.peers.items():
            peer = self._peers.setdefault(address, _Watched(address))
            peer.see(look)
            if peer.lost_at is not None and now - peer.lost_at > _FORGET_SECS and not peer.waited:
                # Its port may be another program's by now.
                peer.close()
            elif endpoints != peer.links.keys():
                self._connect(peer, endpoints)
        for address in [address for address in self._peers if address not in look.peers]:
            peer = self._peers[address]
            peer.close()
            if peer.lost_at is None or now - peer.lost_at > _FORGET_SECS:
                del self._peers[address]

    def _connect(self, peer: _Watched, endpoints: frozenset[Endpoint]) -> None:
        for gone in peer.links.keys() - endpoints:
            peer.links.pop(gone).close()
        for new in sorted(endpoints - peer.links.keys()):
            if sum(len(peer.links) for peer in self._peers.values()) < _MOST_LINKS:
                peer.links[new] = Link(*new)

    def _wait(self) -> None:
        """Wait until something happens on a connection, or is due, and let the connections go on."""
        links = [(peer, link) for peer in self._peers.values() for link in peer.links.values()]
        poller = select.poll()
        for _peer, link in links:
            if link.fileno() >= 0:
                poller.register(link.fileno(), link.events)
        due = min([self._next_look, *(link.due for _peer, link in links)])
        happened = dict(poller.poll(max(0.0, due - time.monotonic()) * 1000 + 1))
        now = time.monotonic()
        for peer, link in links:
            was_well = link.since is None
            link.step(now, happened.get(link.fileno(), 0))
            if was_well and link.since is not None:
                self._look_again(peer)

    def _look_again(self, peer: _Watched) -> None:
        """Note who waits at the first sign: SGLang may end their wait before the loss is certain."""
        look = self._view.look()
        if look is not None:
            peer.see(look)
            self._look = look

    # -- what it means

    def _judge(self, now: float) -> None:
        while self._told:
            address, look = self._told.popleft()
            self._lose(self._peers.setdefault(address, _Watched(address)), "heartbeat", look, now)
        for peer in self._peers.values():
            failed = peer.address in self._look.failed
            peer.failed_since = (peer.failed_since or now) if failed else None
            if peer.sign is not None:
                self._lose(peer, peer.sign, self._look, now)
            elif peer.failed_since is not None and now >= peer.failed_since + _PATIENCE_SECS:
                self._lose(peer, "failed_transfer", self._look, now)
            elif peer.lost_at is not None:
                self._welcome(peer, now)

    def _lose(self, peer: _Watched, sign: Sign, look: Look, now: float) -> None:
        """Report a peer, unless it was reported and has not come back since."""
        peer.steady_since = None
        if peer.lost_at is not None:
            return
        peer.lost_at = now
        # Those that came since the first sign, and those whose wait SGLang has ended since.
        look = self._view.look() or look if sign != "heartbeat" else look
        waiting = list(dict.fromkeys([*peer.waited, *look.waiting_for(peer.address)]))
        others = [its for its in self._peers.values() if its is not peer and its.is_well]
        lost = LostPeer.of(
            peer.address,
            self._view.role,
            sign,
            iso_time(peer.since),
            waiting,
            look.waiting_for(None),
            alone=not others,
        )
        logger.error("crash kit: %s", " ".join(describe([lost])))
        notify("peer_lost", **lost.to_fields())

    def _welcome(self, peer: _Watched, now: float) -> None:
        if any(link.failures for link in peer.links.values()):
            peer.steady_since = None
        elif peer.steady_since is None and peer.links and all(link.is_up for link in peer.links.values()):
            peer.steady_since = now
        elif peer.steady_since is not None and now >= peer.steady_since + _BACK_SECS:
            peer.lost_at = peer.steady_since = None
            logger.info("crash kit: %s server %s is back", self._view.role, peer.address)


_current: list[PeerWatch] = []
_current_lock = threading.Lock()


def replace_watch(view: View) -> None:
    """Watch the peers of `view` from now on, and no others: a scheduler that changes its role has new ones.

    Where nobody would be told of a loss, nothing is watched.
    """
    settings = Settings.from_environ()
    wanted = settings.enabled and settings.peer_watch and SOCKET_VARIABLE in os.environ
    with _current_lock:
        while _current:
            _current.pop().stop()
        if wanted:
            _current.append(PeerWatch(view))
            _current[0].start()


def current_watch() -> PeerWatch | None:
    """Return the watch of this process, None where there is none."""
    with _current_lock:
        return _current[0] if _current else None
