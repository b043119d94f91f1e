"""One TCP connection to a peer server, held open: the kernel tells at once when the process behind it is gone.

Nothing is sent over it, and what comes is not read as anything. The listener may close it for being silent, as ZeroMQ's
does after 30 s (ZMQ_HANDSHAKE_IVL); then it is made anew. A peer that is slow, busy or stopped keeps it, because it is
the peer's kernel that holds the other end.

Watch the other servers of a prefill and decode pair, for the whole server: one connection to each, held open.

The schedulers say which peers there are, and which requests wait for them (`core.peer_report`); they hold no connection
themselves. So the cost goes with the number of peer servers, however many ranks there are on either side.

A prefill server is told by its bootstrap address; to each of its hosts there is one connection, to the process of the
lowest rank that is known there. Of decode servers SGLang has no name, only the addresses of their ranks; to each host
there is one connection, to a process of the lowest rank. Where several have that rank, replicas of one server or
several servers, they are taken in turn, and all at once as soon as something is wrong with one.

What is done about peer servers that were lost: an incident of a server that goes on, without stacks.
"""

from __future__ import annotations

import contextlib
import errno
import heapq
import itertools
import logging
import os
import random
import select
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from sglang_crashkit.handler.current import CurrentIncident
from sglang_crashkit.handler.incident import IncidentRun
from sglang_crashkit.handler.outlook import Outlook
from sglang_crashkit.handler.processes import ProcessTree, TrackedProcess
from sglang_crashkit.model.incident import iso_time
from sglang_crashkit.model.peer_report import (
    MOST_ASKED,
    MOST_BYTES,
    AnswerReader,
    KnownPeers,
    Waits,
    known_question,
    waiting_question,
)
from sglang_crashkit.model.peers import LostPeer, PeerProcess, Role, Sign, describe
from sglang_crashkit.policy import Event

logger = logging.getLogger(__name__)

#: This many failures in a row are no accident.
_ENOUGH = 3
_RETRY_SECS = 0.25
_RETRY_LATER_SECS = 1.0
#: A peer that stays away is tried again after this time, in seconds, then after twice, four times as long, and so on.
_LOST_RETRY_SECS, _LONGEST_RETRY_SECS = 5.0, 120.0
#: Each pause is longer or shorter by up to this part of it, so that the servers that lost a peer come one by one.
_JITTER = 0.2
#: The kernel gives up the search for a host of the same network after 3 s, and says so.
_CONNECT_SECS = 4.0
#: A connection that was closed sooner than this after it was made, in seconds, was turned away.
_TURNED_AWAY_SECS = 1.0
#: A host that is silent is noticed after 5 + 3 * 2 s (tcp(7)).
_KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)
_REFUSED = frozenset({errno.ECONNREFUSED, errno.ECONNRESET, errno.EPIPE, errno.ECONNABORTED})
_SILENT = frozenset({errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN})
_HANG_UP = select.POLLHUP | select.POLLERR | select.POLLRDHUP


class Link:
    """A connection to one address.

    Times are by the monotonic clock unless it says otherwise.

    Args:
        host: an IP address; a name is not looked up, which might take any time.
        port: where a process of the peer listens.

    Attributes:
        since: the first sign that something is wrong, in seconds since the epoch; None while nothing is.
        opened: how many sockets it has had; a descriptor of an earlier one may be anybody's by now.

    Raises:
        ValueError: `host` is no IP address.
    """

    def __init__(self, host: str, port: int) -> None:
        try:
            found = socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
            )
        except OSError as error:
            raise ValueError(f"{host} is no IP address") from error
        self._family, self._address = found[0][0], found[0][4]
        self._socket: socket.socket | None = None
        self._connecting = False
        self._changed = 0.0
        self._due = 0.0
        self._was_silent = False
        self._refusals = 0
        self._silences = 0
        self._tries = 0
        self.since: float | None = None
        self.opened = 0

    @property
    def lost(self) -> Sign | None:
        """The sign by which the peer is gone; None while it may be there."""
        if self._refusals >= _ENOUGH:
            return "refused"
        return "unreachable" if self._silences >= _ENOUGH else None

    @property
    def failures(self) -> int:
        """How often in a row the peer could not be reached."""
        return self._refusals + self._silences

    @property
    def is_up(self) -> bool:
        """Whether the peer took the connection and kept it."""
        return self._socket is not None and not self._connecting and self.since is None

    @property
    def due(self) -> float:
        """When `step` has something to do although nothing happens on the connection."""
        if self._socket is None:
            return self._due
        if self._connecting:
            return self._changed + _CONNECT_SECS
        return self._changed + _TURNED_AWAY_SECS if self.since is not None else float("inf")

    def fileno(self) -> int:
        """Return the descriptor to poll, -1 where there is none now."""
        return -1 if self._socket is None else self._socket.fileno()

    @property
    def events(self) -> int:
        """What to poll it for."""
        return select.POLLOUT if self._connecting else select.POLLIN | select.POLLRDHUP

    def step(self, now: float, happened: int) -> None:
        """Go on.

        Args:
            now: the time.
            happened: what poll(2) said of the descriptor, 0 for nothing.
        """
        if self._socket is None:
            if now >= self._due:
                self._connect(now)
        elif self._connecting:
            if happened:
                self._take_outcome(self._socket, now)
            elif now >= self._changed + _CONNECT_SECS:
                self._fail(errno.ETIMEDOUT, now)
        elif happened:
            self._read(self._socket, now, hung_up=bool(happened & _HANG_UP))
        elif now >= self._changed + _TURNED_AWAY_SECS:
            self._recover()

    def close(self) -> None:
        """Close the connection."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.close()
        self._socket = None

    def _connect(self, now: float) -> None:
        self._changed, self._connecting = now, True
        try:
            self._socket = socket.socket(self._family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
            self.opened += 1
            for option in _KEEPALIVE:
                self._socket.setsockopt(*option)
            outcome = self._socket.connect_ex(self._address)
        except OSError as error:
            outcome = error.errno or errno.EIO
        if outcome not in (0, errno.EINPROGRESS):
            self._fail(outcome, now)

    def _take_outcome(self, connection: socket.socket, now: float) -> None:
        outcome = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if outcome:
            self._fail(outcome, now)
        else:
            self._changed, self._connecting = now, False

    def _read(self, connection: socket.socket, now: float, *, hung_up: bool) -> None:
        try:
            data = connection.recv(65536)
        except BlockingIOError:
            return
        except OSError as error:
            # Of a connection that stood this is no refusal yet, unless it stood for a moment only.
            self._end(now, error.errno or errno.EIO)
            return
        if not data or (hung_up and len(data) < 65536):
            self._end(now, errno.ECONNRESET)

    def _end(self, now: float, error: int) -> None:
        """Note that a connection that stood is closed."""
        if now - self._changed < _TURNED_AWAY_SECS:
            self._fail(error, now)
            return
        self.close()
        self._was_silent = error in _SILENT
        self.since = self.since or time.time()
        self._due = now

    def _fail(self, error: int, now: float) -> None:
        self.close()
        self.since = self.since or time.time()
        if error in _REFUSED:
            self._refusals += 1
        elif error in _SILENT and (error != errno.ETIMEDOUT or self._was_silent):
            # Without more a connection that is not taken in time may be a full backlog.
            self._silences += 1
        self._tries += 1
        pause = _RETRY_SECS if error in _REFUSED else _RETRY_LATER_SECS
        if self._tries >= _ENOUGH:
            pause = min(_LONGEST_RETRY_SECS, _LOST_RETRY_SECS * 2.0 ** min(self._tries - _ENOUGH, 16))
        self._due = now + pause * random.uniform(1 - _JITTER, 1 + _JITTER)  # noqa: S311 - it guards no secret

    def _recover(self) -> None:
        self._was_silent = False
        self._refusals = self._silences = self._tries = 0
        self.since = None


#: How often something is looked at that nobody tells of, in seconds.
_CHECK_SECS = 1.0
#: How often a rank is asked for its peers; one that only knows of failed transfers less often. Seconds.
_ASK_SECS, _ASK_OTHERS_SECS = 5.0, 15.0
#: A rank that has not answered for this long is asked again, in seconds.
_ANSWER_SECS = 60.0
#: Ranks are not asked for waiting requests more often than this, in seconds: each time they go through their queues.
_ASK_WAITING_SECS = 0.25
#: How long a connection is held to one of several processes of a host, in seconds.
_TURN_SECS = 15.0
#: So long all of them are watched once something was wrong with one, in seconds.
_ALARM_SECS = 10.0
#: When a peer is lost, so long is waited for the ranks' answers, and for other peers that are lost with it. Seconds.
_GATHER_SECS = 1.0
#: A peer that was lost is back when nothing spoke against it for this long, in seconds.
_BACK_SECS = 30.0
#: A lost peer is looked for no longer than this, in seconds.
_FORGET_SECS = 600.0
#: SGLang's own word that a transfer failed waits this long for the connection to say more, in seconds.
_PATIENCE_SECS = 2.0
#: No more connections are held than this: the process may have 1024 descriptors.
_MOST_LINKS = 512
#: The watch ends when it fails this often.
_ENOUGH_FAILURES = 3

_Key = tuple[Role, str]


@dataclass(eq=False)
class _Rank:
    """A scheduler that answers.

    Attributes:
        pid: who it is.
        connection: how it is asked.
        role: what its peers do.
        is_lead: it knows its group's peers; another one knows of failed transfers only.
        reader: puts its answers together.
        next_ask: when it is asked for its peers again, by the monotonic clock.
        asked_at: since when it has not answered; None where it has.
        known: what it answered last.
    """

    pid: int
    connection: socket.socket
    role: Role
    is_lead: bool
    reader: AnswerReader
    next_ask: float = 0.0
    asked_at: float | None = None
    known: KnownPeers = field(default_factory=KnownPeers)


@dataclass(eq=False)
class _Peer:
    """A peer server, or a rank of one where SGLang knows no more; times are by the monotonic clock.

    Attributes:
        role: what it does.
        name: its name in SGLang's tables.
        processes: its processes as the ranks know them.
        known_to: pids of these ranks.
        links: the connections to its processes.
        waits: what the ranks said of who waits for it, by pid, from the first sign on.
        failed_since: since when SGLang has given it up.
        lost_at: when it was lost; None while it is there.
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
    steady_since: float | None = None
    is_forgotten: bool = False

    @property
    def host(self) -> str:
        return self.name.rpartition(":")[0]

    @property
    def is_well(self) -> bool:
        return self.lost_at is None and any(link.is_up for link in self.links.values())


@dataclass
class _Loss:
    """A peer that was lost a moment ago.

    Attributes:
        peer: which.
        sign: how it was noticed.
        since: the first sign, UTC in ISO 8601.
        due: when the ranks have said who waits for it, by the monotonic clock.
    """

    peer: _Peer
    sign: Sign
    since: str
    due: float


class PeerProber:
    """Watches the peers of one server.

    Its descriptor has something to read when `act_on_time` has something to do, which also has when `next_due` says so.

    Args:
        tell: told of peers that were lost at about the same time.
    """

    def __init__(self, tell: Callable[[list[LostPeer]], None]) -> None:
        self._tell = tell
        self._epoll = select.epoll()
        self._by_descriptor: dict[int, Link | _Rank] = {}
        self._ranks: dict[int, _Rank] = {}
        self._peers: dict[_Key, _Peer] = {}
        self._peer_of: dict[Link, _Peer] = {}
        self._registered: dict[Link, tuple[int, int, int]] = {}
        self._dues: list[tuple[float, int, Link]] = []
        self._due_of: dict[Link, float] = {}
        self._numbers = itertools.count()
        self._losses: dict[_Key, _Loss] = {}
        #: By host, the decode rank that is connected to.
        self._held: dict[str, str] = {}
        self._next_turn = 0.0
        self._alarmed_until: dict[str, float] = {}
        self._to_ask: set[_Key] = set()
        self._next_waiting = self._next_check = 0.0
        self._is_stale = False
        self._has_said_so = False
        self._unnamed: set[str] = set()
        self._failures = 0

    def fileno(self) -> int:
        """Return the descriptor to wait for."""
        return self._epoll.fileno()

    def take_rank(self, pid: int, descriptor: int | None, fields: dict[str, object]) -> None:
        """Ask a scheduler from now on.

        Args:
            pid: who it is.
            descriptor: one end of its pair of sockets, which stays open; None where none came.
            fields: the rest of its message: ``role``, that of its peers, and ``lead``.
        """
        role = fields.get("role")
        if descriptor is None or (role != "prefill" and role != "decode") or self._failures >= _ENOUGH_FAILURES:
            return
        self._drop_rank(pid)
        connection = socket.socket(fileno=os.dup(descriptor))
        connection.setblocking(False)
        if connection.family != socket.AF_UNIX or connection.type != socket.SOCK_SEQPACKET:
            connection.close()
            return
        rank = _Rank(pid, connection, role, fields.get("lead") is True, AnswerReader(pid))
        self._ranks[pid] = rank
        self._by_descriptor[connection.fileno()] = rank
        self._epoll.register(connection, select.EPOLLIN)
        self._ask(rank, time.monotonic())

    def hear(self, told: LostPeer) -> None:
        """Take in that a rank says itself that SGLang gave a peer up."""
        if self._failures >= _ENOUGH_FAILURES:
            return
        now, key = time.monotonic(), (told.role, told.address)
        peer = self._peers.setdefault(key, _Peer(*key))
        if peer.lost_at is not None and key not in self._losses:
            # It was told, and has not been back.
            peer.steady_since = None
            return
        for pid in told.reported_by:
            peer.waits[pid] = _both(peer.waits.get(pid), told)
        self._lose(peer, told.sign, told.since, now)

    def next_due(self) -> float:
        """Return when `act_on_time` has something to do although nothing happens, by the monotonic clock."""
        dues = [self._report_due()]
        if self._is_stale:
            dues.append(0.0)
        if self._to_ask:
            dues.append(self._next_waiting)
        if self._dues and self._peer_of:
            dues.append(self._dues[0][0])
        if self._ranks or self._peers:
            dues.append(self._next_check)
        return min(dues, default=float("inf"))

    def act_on_time(self) -> None:
        """Do what is due by now; where that fails, peers are not watched any more, and everything else is."""
        if self._failures >= _ENOUGH_FAILURES:
            return
        try:
            self._act()
        except Exception:
            logger.exception("the other servers of the pair could not be looked at")
            self._failures += 1
            if self._failures >= _ENOUGH_FAILURES:
                self._give_up()

    def _act(self) -> None:
        # Before what is overdue: this process may have been at work for seconds.
        for descriptor, events in self._epoll.poll(0):
            its = self._by_descriptor.get(descriptor)
            if isinstance(its, Link):
                self._step(its, time.monotonic(), events)
            elif its is not None:
                self._read(its)
        now = time.monotonic()
        while self._dues and self._dues[0][0] <= now:
            due, _number, link = heapq.heappop(self._dues)
            # Whatever happened on it since has put it off.
            if self._due_of.get(link) == due:
                del self._due_of[link]
                self._step(link, now, 0)
        if now >= self._next_check and (self._ranks or self._peers):
            self._next_check = now + _CHECK_SECS
            self._check(now)
        if self._is_stale:
            self._is_stale = False
            self._choose(now)
        if self._to_ask and now >= self._next_waiting:
            self._ask_waiting(now)
        self._report(now)

    def close(self) -> None:
        """Close all connections."""
        self._give_up()
        self._epoll.close()

    def _give_up(self) -> None:
        self._failures = _ENOUGH_FAILURES
        for pid in list(self._ranks):
            self._drop_rank(pid)
        for peer in self._peers.values():
            self._close_links(peer, list(peer.links))
        self._peers.clear()
        self._losses.clear()
        self._to_ask.clear()
        self._dues.clear()
        self._is_stale = False

    # -- what the ranks say

    def _ask(self, rank: _Rank, now: float) -> None:
        rank.next_ask = now + (_ASK_SECS if rank.is_lead else _ASK_OTHERS_SECS)
        # One that is stuck does not find a heap of questions when it goes on.
        is_waited_for = rank.asked_at is not None and now < rank.asked_at + _ANSWER_SECS
        if not is_waited_for and self._send(rank, known_question()):
            rank.asked_at = now

    def _ask_waiting(self, now: float) -> None:
        self._next_waiting = now + _ASK_WAITING_SECS
        for rank in list(self._ranks.values()):
            names = [name for role, name in sorted(self._to_ask) if role == rank.role and rank.is_lead]
            for begin in range(0, len(names), MOST_ASKED):
                self._send(rank, waiting_question(names[begin : begin + MOST_ASKED]))
        self._to_ask.clear()

    def _send(self, rank: _Rank, question: bytes) -> bool:
        try:
            rank.connection.send(question)
        except BlockingIOError:
            return False
        except OSError:
            self._drop_rank(rank.pid)
            return False
        return True

    def _read(self, rank: _Rank) -> None:
        while self._ranks.get(rank.pid) is rank:
            try:
                packet = rank.connection.recv(MOST_BYTES)
            except BlockingIOError:
                return
            except OSError:
                packet = b""
            if not packet:
                self._drop_rank(rank.pid)
                return
            try:
                self._take(rank, rank.reader.take(packet))
            except (ValueError, RecursionError) as error:
                logger.warning("rank %d tells nothing of its peers: %s", rank.pid, error)
                self._drop_rank(rank.pid)

    def _take(self, rank: _Rank, answer: KnownPeers | Waits | bool) -> None:
        if isinstance(answer, Waits):
            peer = self._peers.get((rank.role, answer.name))
            if peer is not None:
                peer.waits[rank.pid] = _both(peer.waits.get(rank.pid), answer.told)
            return
        if answer is False:
            return
        rank.asked_at = None
        if isinstance(answer, KnownPeers) and answer != rank.known:
            rank.known = answer
            self._merge()

    def _drop_rank(self, pid: int) -> None:
        rank = self._ranks.pop(pid, None)
        if rank is not None:
            self._by_descriptor.pop(rank.connection.fileno(), None)
            rank.connection.close()
            self._merge()

    def _merge(self) -> None:
        """Put together what all ranks know."""
        processes: dict[_Key, set[PeerProcess]] = defaultdict(set)
        known_to: dict[_Key, set[int]] = defaultdict(set)
        for rank in self._ranks.values():
            for name, its in rank.known.peers.items():
                processes[rank.role, name] |= its
                known_to[rank.role, name].add(rank.pid)
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
        wanted: list[tuple[_Peer, PeerProcess]] = []
        for peer in self._peers.values():
            if peer.role == "prefill" and not peer.is_forgotten:
                wanted += [(peer, process) for process in _one_of_each_host(peer)]
        wanted += self._decode_ranks(now)
        # Those that there are first: they stay where there are too many.
        wanted.sort(key=lambda pair: pair[1] not in pair[0].links)
        kept: dict[_Peer, set[PeerProcess]] = defaultdict(set)
        for peer, process in wanted[:_MOST_LINKS]:
            kept[peer].add(process)
        for peer in self._peers.values():
            self._close_links(peer, peer.links.keys() - kept[peer])
        for peer, process in wanted[:_MOST_LINKS]:
            if process not in peer.links:
                self._open_link(peer, process, now)
        if len(wanted) > _MOST_LINKS and not self._has_said_so:
            self._has_said_so = True
            logger.warning("%d connections to other servers would be needed; %d are held", len(wanted), _MOST_LINKS)

    def _decode_ranks(self, now: float) -> Iterator[tuple[_Peer, PeerProcess]]:
        """Yield one rank of each host, all of them where something is wrong; and one of those that are lost."""
        is_turn = now >= self._next_turn
        if is_turn:
            self._next_turn = now + _TURN_SECS
        for host, ranks in self._lowest_ranks().items():
            lost = [pair for pair in ranks if pair[0].lost_at is not None and not pair[0].is_forgotten]
            yield from lost[:1]
            there = [pair for pair in ranks if pair[0].lost_at is None]
            if now < self._alarmed_until.get(host, 0.0) or not there:
                yield from there
                continue
            names = [peer.name for peer, _process in there]
            held = self._held.get(host)
            at = names.index(held) if held in names else 0
            if is_turn and held in names:
                at = (at + 1) % len(names)
            self._held[host] = names[at]
            yield there[at]

    def _lowest_ranks(self) -> dict[str, list[tuple[_Peer, PeerProcess]]]:
        """Return the decode ranks of each host that are the first of their group; the others end with them.

        Those that are lost count as well: SGLang goes on to list all ranks of a server that is gone.
        """
        of_host: dict[str, list[tuple[_Peer, PeerProcess]]] = defaultdict(list)
        for peer in self._peers.values():
            if peer.role == "decode":
                for process in peer.processes:
                    of_host[process.host].append((peer, process))
        for host, pairs in of_host.items():
            lowest = min(process.rank for _peer, process in pairs)
            of_host[host] = sorted((pair for pair in pairs if pair[1].rank == lowest), key=lambda pair: pair[1])
        return of_host

    def _open_link(self, peer: _Peer, process: PeerProcess, now: float) -> None:
        try:
            link = Link(process.host, process.port)
        except ValueError as error:
            if process.host not in self._unnamed:
                self._unnamed.add(process.host)
                logger.warning("%s server %s is not watched: %s", peer.role, peer.name, error)
            return
        peer.links[process] = link
        self._peer_of[link] = peer
        self._step(link, now, 0)

    def _close_links(self, peer: _Peer, processes: Iterable[PeerProcess]) -> None:
        for process in list(processes):
            link = peer.links.pop(process)
            link.close()
            self._peer_of.pop(link)
            self._note(link)

    def _step(self, link: Link, now: float, happened: int) -> None:
        peer, failed_before = self._peer_of[link], link.failures
        link.step(now, happened)
        self._note(link)
        if link.failures and not failed_before:
            self._alarm(peer, now)
        if link.lost is not None:
            self._lose(peer, link.lost, iso_time(link.since or time.time()), now)

    def _note(self, link: Link) -> None:
        """Have the link's descriptor polled for what it waits for now, and its next due noted."""
        descriptor = link.fileno()
        wanted = (link.opened, descriptor, link.events) if descriptor >= 0 else None
        had = self._registered.get(link)
        if wanted != had:
            if had is not None and (wanted is None or wanted[0] != had[0]):
                # It was closed, which the kernel takes for the end of its registration.
                if self._by_descriptor.get(had[1]) is link:
                    del self._by_descriptor[had[1]]
                del self._registered[link]
                had = None
            if wanted is not None:
                if had is None:
                    self._epoll.register(descriptor, link.events)
                else:
                    self._epoll.modify(descriptor, link.events)
                self._by_descriptor[descriptor] = link
                self._registered[link] = wanted
        if descriptor < 0 and link not in self._peer_of:
            self._due_of.pop(link, None)
        elif self._due_of.get(link) != link.due:
            self._due_of[link] = link.due
            if link.due < float("inf"):
                heapq.heappush(self._dues, (link.due, next(self._numbers), link))

    # -- what it means

    def _alarm(self, peer: _Peer, now: float) -> None:
        """Note that something is wrong: SGLang may end the wait of those who wait before a loss is certain."""
        if peer.lost_at is None:
            peer.waits.clear()
        self._to_ask.add((peer.role, peer.name))
        if peer.role == "decode":
            for process in peer.processes:
                self._alarmed_until[process.host] = now + _ALARM_SECS
            self._is_stale = True

    def _lose(self, peer: _Peer, sign: Sign, since: str, now: float) -> None:
        """Note that a peer is lost, unless it was told and has not come back since."""
        peer.steady_since = None
        key = (peer.role, peer.name)
        if key in self._losses and sign == "refused":
            self._losses[key].sign = sign
        if peer.lost_at is not None:
            return
        peer.lost_at = now
        self._losses[key] = _Loss(peer, sign, since, now + _GATHER_SECS)
        # Those that came since the first sign.
        self._to_ask.add(key)
        self._is_stale = True

    def _report_due(self) -> float:
        """Return when the losses are told: together, unless more and more come."""
        dues = [loss.due for loss in self._losses.values()]
        return min(max(dues), min(dues) + _GATHER_SECS) if dues else float("inf")

    def _report(self, now: float) -> None:
        if now < self._report_due():
            return
        losses = list(self._losses.values())
        self._losses.clear()
        self._tell([self._describe(loss) for loss in losses])
        for loss in losses:
            loss.peer.waits.clear()

    def _describe(self, loss: _Loss) -> LostPeer:
        peer = loss.peer
        others = [its for its in self._peers.values() if its is not peer and its.role == peer.role and its.is_well]
        lost = LostPeer.of(peer.name, peer.role, loss.sign, loss.since, alone=not others)
        for told in peer.waits.values():
            lost.merge(replace(told, sign=lost.sign, since=lost.since, alone=lost.alone))
        lost.reported_by = sorted({*lost.reported_by, *peer.known_to})
        return lost

    def _check(self, now: float) -> None:
        for rank in list(self._ranks.values()):
            if now >= rank.next_ask:
                self._ask(rank, now)
        failed = {(rank.role, name) for rank in self._ranks.values() for name in rank.known.failed}
        self._check_failed(failed, now)
        for key, peer in list(self._peers.items()):
            if peer.lost_at is not None and key not in self._losses:
                self._check_lost(peer, now, is_failed=key in failed)
            is_over = peer.lost_at is None or peer.is_forgotten
            if not peer.processes and is_over and key not in failed:
                self._close_links(peer, list(peer.links))
                del self._peers[key]
        for host, until in list(self._alarmed_until.items()):
            if now >= until:
                del self._alarmed_until[host]
                self._is_stale = True
        if now >= self._next_turn:
            self._is_stale = True

    def _check_failed(self, failed: set[_Key], now: float) -> None:
        for key in failed:
            self._peers.setdefault(key, _Peer(*key))
        for key, peer in self._peers.items():
            if key not in failed:
                peer.failed_since = None
            elif peer.failed_since is None:
                peer.failed_since = now
                self._to_ask.add(key)
        for key in failed:
            peer = self._peers[key]
            is_due = peer.failed_since is not None and now >= peer.failed_since + _PATIENCE_SECS
            # Another rank of the server that was lost, which says nothing new.
            if is_due and not any(its.lost_at is not None and _are_near(its, peer) for its in self._peers.values()):
                self._lose(peer, "failed_transfer", iso_time(time.time() - _PATIENCE_SECS), now)

    def _check_lost(self, peer: _Peer, now: float, *, is_failed: bool) -> None:
        assert peer.lost_at is not None
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
        if now >= peer.lost_at + _FORGET_SECS and not peer.is_forgotten and peer.steady_since is None:
            peer.is_forgotten = True
            self._is_stale = True


def _one_of_each_host(peer: _Peer) -> Iterator[PeerProcess]:
    """Yield the process of each host that is connected to, else that of the lowest rank."""
    of_host: dict[str, list[PeerProcess]] = defaultdict(list)
    for process in sorted(peer.processes):
        of_host[process.host].append(process)
    for processes in of_host.values():
        yield next((process for process in processes if process in peer.links), processes[0])


def _are_near(some: _Peer, other: _Peer) -> bool:
    """Say whether two peers are ranks of one server, as far as is known."""
    return some.role == other.role and (some is other or (some.role == "decode" and some.host == other.host))


def _both(before: LostPeer | None, told: LostPeer) -> LostPeer:
    """Return what a rank said of a peer at two moments."""
    if before is None:
        return replace(told)
    before.merge(told)
    return before


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
