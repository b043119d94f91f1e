"""The other servers of a prefill and decode pair: one connection to each, held open, and an incident where one is lost.

The schedulers say which peers there are, and which requests wait for them (`model.peers`); they hold no
connection themselves. So the cost goes with the number of peer servers, however many ranks there are on either side.

A prefill server is named by its bootstrap address; to each of its hosts there is one connection, to the process of the
lowest rank that is known there. Of decode servers SGLang has no name, only the addresses of their ranks; to each host
there is one connection, to a process of the lowest rank. Where several have that rank, replicas of one server or
several servers, they are taken in turn, and all at once as soon as something is wrong with one.
"""

from __future__ import annotations

import logging
import select
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from sglang_crashkit.handler.incident import IncidentRun
from sglang_crashkit.handler.peers.link import ENOUGH, Link
from sglang_crashkit.handler.peers.ranks import Key, PeerRanks
from sglang_crashkit.handler.processes import ProcessTree
from sglang_crashkit.handler.session import Session
from sglang_crashkit.handler.state import Seen
from sglang_crashkit.model.incident import iso_time
from sglang_crashkit.model.peers import LostPeer, PeerProcess, Role, Sign, Waits, describe
from sglang_crashkit.policy import Event

logger = logging.getLogger(__name__)

# All times are in seconds.
#: How often something is looked at that nobody reports.
_CHECK_SECS = 1.0
#: Ranks are not asked for waiting requests more often than this: each time they go through their queues.
_ASK_WAITING_SECS = 0.25
#: How long a connection is held to one of several processes of a host.
_TURN_SECS = 15.0
#: So long all of them are watched once something was wrong with one.
_ALARM_SECS = 10.0
#: When a peer is lost, so long is waited for the ranks' answers, and for other peers that are lost with it.
_GATHER_SECS = 1.0
#: A peer that was lost is back when nothing spoke against it for this long.
_BACK_SECS = 30.0
#: A lost peer is looked for no longer than this.
_FORGET_SECS = 600.0
#: SGLang's own word that a transfer failed waits this long for the connection to say more.
_PATIENCE_SECS = 2.0
#: No more connections are held than this: the process may have 1024 descriptors.
_MAX_LINKS = 512
#: An incident of losses is whole after this time.
_OBSERVED_SECS = 2.0
#: Losses that come within this time of the last one belong to it, as in a restart of one after the other; however they
#: go on, an incident takes in no more after the longer time.
_SAME_SECS, _LONGEST_SECS = 600.0, 3600.0


@dataclass
class _Loss:
    """A peer that was lost a moment ago: by which sign, since when (UTC, ISO 8601), and when that is reported."""

    sign: Sign
    since: str
    due: float


@dataclass(eq=False)
class _Peer:
    """A peer server, or a rank of one where SGLang knows no more.

    Attributes:
        name: in SGLang's tables.
        processes: as the ranks know them; `known_to`: pids of these ranks.
        waits: what the ranks said of who waits for it, by pid, from the first sign on.
        failed_since: since when SGLang has given it up.
        lost_at: when it was lost; None while it is there. `loss`: until that is reported.
        steady_since: since when nothing speaks against it.
        is_forgotten: it was lost, and is not looked for any more.
    """

    role: Role
    name: str
    processes: frozenset[PeerProcess] = frozenset()
    known_to: frozenset[int] = frozenset()
    links: dict[PeerProcess, Link] = field(default_factory=dict)
    waits: dict[int, LostPeer] = field(default_factory=dict)
    failed_since: float | None = None
    lost_at: float | None = None
    loss: _Loss | None = None
    steady_since: float | None = None
    is_forgotten: bool = False

    @property
    def is_well(self) -> bool:
        return self.lost_at is None and any(link.is_up for link in self.links.values())

    def is_near(self, other: _Peer) -> bool:
        """Say whether two peers are ranks of one server, as far as is known."""
        same_host = self.name.rpartition(":")[0] == other.name.rpartition(":")[0]
        return self is other or (self.role == other.role == "decode" and same_host)

    def note_report(self, pid: int, said: LostPeer) -> None:
        """Take in what a rank says of who waits for it, at one moment and another."""
        if pid in self.waits:
            self.waits[pid].merge(said)
        else:
            self.waits[pid] = replace(said)

    def one_of_each_host(self) -> Iterator[PeerProcess]:
        """Yield the process of each host that is connected to, else that of the lowest rank."""
        of_host: dict[str, list[PeerProcess]] = defaultdict(list)
        for process in sorted(self.processes):
            of_host[process.host].append(process)
        for processes in of_host.values():
            yield next((process for process in processes if process in self.links), processes[0])


class PeerProber:
    """Watches the peers of one server, and reports those that were lost at about the same time.

    Its descriptor has something to read when `act_on_time` has something to do, which also has when `next_due` says so.
    """

    def __init__(self, report: Callable[[list[LostPeer]], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._report = report
        self._clock = clock
        self._epoll = select.epoll()
        self._ranks = PeerRanks(self._epoll, self._merge, self._hear_waits)
        self._peers: dict[Key, _Peer] = {}
        #: By host, the decode rank that is connected to.
        self._held: dict[str, str] = {}
        self._alarmed_until: dict[str, float] = {}
        self._to_ask: set[Key] = set()
        self._next_turn = self._next_waiting = self._next_check = 0.0
        self._is_stale = self._has_said_so = False
        self._unnamed: set[str] = set()
        self._failures = 0

    def fileno(self) -> int:
        """Return the descriptor to wait for."""
        return self._epoll.fileno()

    def take_rank(self, pid: int, descriptor: int | None, fields: dict[str, object]) -> None:
        """Ask a scheduler from now on, over one end of its pair of sockets, which stays open."""
        role = fields.get("role")
        if descriptor is not None and (role == "prefill" or role == "decode") and self._failures < ENOUGH:
            self._ranks.add(pid, descriptor, role, self._clock(), is_lead=fields.get("lead") is True)

    def note_report(self, said: LostPeer) -> None:
        """Take in that a rank says itself that SGLang gave a peer up."""
        if self._failures >= ENOUGH:
            return
        key = (said.role, said.address)
        peer = self._peers.setdefault(key, _Peer(*key))
        if peer.lost_at is not None and peer.loss is None:
            # It was reported, and has not been back.
            peer.steady_since = None
            return
        for pid in said.reported_by:
            peer.note_report(pid, said)
        self._lose(peer, said.sign, said.since, self._clock())

    def next_due(self) -> float:
        """Return when `act_on_time` has something to do although nothing happens, by the monotonic clock."""
        if self._is_stale:
            return 0.0
        dues = [self._report_due(), *(link.due for peer in self._peers.values() for link in peer.links.values())]
        if self._to_ask:
            dues.append(self._next_waiting)
        if self._ranks or self._peers:
            dues.append(self._next_check)
        return min(dues)

    def act_on_time(self) -> None:
        """Do what is due by now; where that fails, peers are not watched any more, and everything else is."""
        if self._failures >= ENOUGH:
            return
        try:
            self._act()
        except Exception:
            logger.exception("the other servers of the pair could not be looked at")
            self._failures += 1
            if self._failures >= ENOUGH:
                self._give_up()

    def close(self) -> None:
        """Close all connections."""
        self._give_up()
        self._epoll.close()

    def _act(self) -> None:
        # Before what is overdue: this process may have been at work for seconds.
        for descriptor, events in self._epoll.poll(0):
            if not self._ranks.read(descriptor):
                links = ((peer, link) for peer in self._peers.values() for link in peer.links.values())
                for peer, link in [pair for pair in links if pair[1].fileno() == descriptor]:
                    self._step(peer, link, self._clock(), events)
        now = self._clock()
        for peer in list(self._peers.values()):
            for link in [link for link in peer.links.values() if link.due <= now]:
                self._step(peer, link, now, 0)
        if now >= self._next_check and (self._ranks or self._peers):
            self._next_check = now + _CHECK_SECS
            self._check(now)
        if self._is_stale:
            self._is_stale = False
            self._choose(now)
        if self._to_ask and now >= self._next_waiting:
            self._next_waiting = now + _ASK_WAITING_SECS
            self._ranks.ask_waiting(self._to_ask)
            self._to_ask.clear()
        if now >= self._report_due():
            lost = [peer for peer in self._peers.values() if peer.loss is not None]
            self._report([self._describe(peer, peer.loss) for peer in lost if peer.loss is not None])
            for peer in lost:
                peer.loss = None
                peer.waits.clear()

    def _give_up(self) -> None:
        self._failures = ENOUGH
        self._ranks.drop_all()
        for peer in self._peers.values():
            self._close_links(peer, list(peer.links))
        self._peers.clear()
        self._to_ask.clear()
        self._is_stale = False

    # -- what the ranks say

    def _hear_waits(self, pid: int, role: Role, waits: Waits) -> None:
        peer = self._peers.get((role, waits.name))
        if peer is not None:
            peer.note_report(pid, waits.told)

    def _merge(self) -> None:
        """Take in what all ranks know."""
        processes, known_to = self._ranks.known()
        for key in processes.keys() - self._peers.keys():
            self._peers[key] = _Peer(*key)
        for key, peer in self._peers.items():
            if peer.processes != processes.get(key, set()):
                peer.processes = frozenset(processes.get(key, ()))
                # It may be back where it was not before.
                peer.is_forgotten = False
            peer.known_to = frozenset(known_to.get(key, ()))
        self._is_stale = True

    # -- which connections there are

    def _choose(self, now: float) -> None:
        """Open the connections that there should be, and close the others."""
        prefill = (peer for peer in self._peers.values() if peer.role == "prefill" and not peer.is_forgotten)
        wanted = [(peer, process) for peer in prefill for process in peer.one_of_each_host()]
        wanted += self._decode_ranks(now)
        # Those that there are first: they stay where there are too many.
        wanted.sort(key=lambda pair: pair[1] not in pair[0].links)
        kept: dict[_Peer, set[PeerProcess]] = defaultdict(set)
        for peer, process in wanted[:_MAX_LINKS]:
            kept[peer].add(process)
        for peer in self._peers.values():
            self._close_links(peer, peer.links.keys() - kept[peer])
        for peer, process in wanted[:_MAX_LINKS]:
            if process not in peer.links:
                self._open_link(peer, process, now)
        if len(wanted) > _MAX_LINKS and not self._has_said_so:
            self._has_said_so = True
            logger.warning("%d connections to other servers would be needed; %d are held", len(wanted), _MAX_LINKS)

    def _decode_ranks(self, now: float) -> Iterator[tuple[_Peer, PeerProcess]]:
        """Yield one rank of each host, all of them where something is wrong; and one of those that are lost."""
        is_turn = now >= self._next_turn
        if is_turn:
            self._next_turn = now + _TURN_SECS
        for host, ranks in self._lowest_ranks().items():
            yield from [pair for pair in ranks if pair[0].lost_at is not None and not pair[0].is_forgotten][:1]
            there = [pair for pair in ranks if pair[0].lost_at is None]
            if now < self._alarmed_until.get(host, 0.0) or not there:
                yield from there
                continue
            names = [peer.name for peer, _process in there]
            held = self._held.get(host)
            at = (names.index(held) + is_turn) % len(names) if held in names else 0
            self._held[host] = names[at]
            yield there[at]

    def _lowest_ranks(self) -> dict[str, list[tuple[_Peer, PeerProcess]]]:
        """Return the decode ranks of each host that are the first of their group; the others end with them.

        Those that are lost count as well: SGLang goes on to list all ranks of a server that is gone.
        """
        of_host: dict[str, list[tuple[_Peer, PeerProcess]]] = defaultdict(list)
        for peer in self._peers.values():
            for process in peer.processes if peer.role == "decode" else ():
                of_host[process.host].append((peer, process))
        for host, pairs in of_host.items():
            lowest = min(process.rank for _peer, process in pairs)
            of_host[host] = sorted((pair for pair in pairs if pair[1].rank == lowest), key=lambda pair: pair[1])
        return of_host

    def _open_link(self, peer: _Peer, process: PeerProcess, now: float) -> None:
        try:
            peer.links[process] = Link(self._epoll, process.host, process.port)
        except ValueError as error:
            if process.host not in self._unnamed:
                self._unnamed.add(process.host)
                logger.warning("%s server %s is not watched: %s", peer.role, peer.name, error)
            return
        self._step(peer, peer.links[process], now, 0)

    def _close_links(self, peer: _Peer, processes: Iterable[PeerProcess]) -> None:
        for process in list(processes):
            peer.links.pop(process).close()

    def _step(self, peer: _Peer, link: Link, now: float, happened: int) -> None:
        failed_before = link.failures
        link.step(now, happened)
        if link.failures and not failed_before:
            self._alarm(peer, now)
        if link.lost is not None:
            self._lose(peer, link.lost, iso_time(link.since or time.time()), now)

    # -- what it means

    def _alarm(self, peer: _Peer, now: float) -> None:
        """Note that something is wrong: SGLang may end the wait of those who wait before a loss is certain."""
        if peer.lost_at is None:
            peer.waits.clear()
        self._to_ask.add((peer.role, peer.name))
        if peer.role == "decode":
            self._alarmed_until |= {process.host: now + _ALARM_SECS for process in peer.processes}
            self._is_stale = True

    def _lose(self, peer: _Peer, sign: Sign, since: str, now: float) -> None:
        """Note that a peer is lost, unless it was reported and has not come back since."""
        peer.steady_since = None
        if peer.loss is not None and sign == "refused":
            peer.loss.sign = sign
        if peer.lost_at is None:
            peer.lost_at, peer.loss = now, _Loss(sign, since, now + _GATHER_SECS)
            # Those that came since the first sign.
            self._to_ask.add((peer.role, peer.name))
            self._is_stale = True

    def _report_due(self) -> float:
        """Return when the losses are reported: together, unless more and more come."""
        dues = [peer.loss.due for peer in self._peers.values() if peer.loss is not None]
        return min(max(dues), min(dues) + _GATHER_SECS) if dues else float("inf")

    def _describe(self, peer: _Peer, loss: _Loss) -> LostPeer:
        others = [its for its in self._peers.values() if its is not peer and its.role == peer.role and its.is_well]
        lost = LostPeer.of(peer.name, peer.role, loss.sign, loss.since, alone=not others)
        for said in peer.waits.values():
            lost.merge(replace(said, sign=lost.sign, since=lost.since, alone=lost.alone))
        lost.reported_by = sorted({*lost.reported_by, *peer.known_to})
        return lost

    def _check(self, now: float) -> None:
        self._ranks.ask_on_time(now)
        failed = self._ranks.failed()
        self._check_failed(failed, now)
        for key, peer in list(self._peers.items()):
            if peer.lost_at is not None and peer.loss is None:
                self._check_lost(peer, peer.lost_at, now, is_failed=key in failed)
            is_over = peer.lost_at is None or peer.is_forgotten
            if not peer.processes and is_over and key not in failed:
                self._close_links(peer, list(peer.links))
                del self._peers[key]
        for host in [host for host, until in self._alarmed_until.items() if now >= until]:
            del self._alarmed_until[host]
            self._is_stale = True
        self._is_stale = self._is_stale or now >= self._next_turn

    def _check_failed(self, failed: set[Key], now: float) -> None:
        for key in failed:
            self._peers.setdefault(key, _Peer(*key))
        for key, peer in self._peers.items():
            if key not in failed:
                peer.failed_since = None
            elif peer.failed_since is None:
                peer.failed_since = now
                self._to_ask.add(key)
            # Another rank of the server that was lost says nothing new.
            elif now >= peer.failed_since + _PATIENCE_SECS and not any(
                its.lost_at is not None and its.is_near(peer) for its in self._peers.values()
            ):
                self._lose(peer, "failed_transfer", iso_time(time.time() - _PATIENCE_SECS), now)

    def _check_lost(self, peer: _Peer, lost_at: float, now: float, *, is_failed: bool) -> None:
        links = peer.links.values()
        if is_failed or not links or not all(link.is_up for link in links):
            peer.steady_since = None
        elif peer.steady_since is None:
            peer.steady_since = now
        elif now >= peer.steady_since + _BACK_SECS:
            peer.lost_at = peer.steady_since = None
            self._is_stale = True
            logger.info("%s server %s is back", peer.role, peer.name)
            return
        if now >= lost_at + _FORGET_SECS and not peer.is_forgotten and peer.steady_since is None:
            peer.is_forgotten = self._is_stale = True


class PeerLosses:
    """Makes incidents of losses, of a server that goes on and without stacks.

    `say` writes a line to the server's own log.
    """

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
