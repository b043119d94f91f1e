from __future__ import annotations

import contextlib
import itertools
import logging
import os
import select
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sglang_crashkit.handler.peers import prober
from sglang_crashkit.handler.peers.prober import PeerLosses, PeerProber
from sglang_crashkit.handler.server import CrashHandler
from sglang_crashkit.incident.store import find_incidents
from sglang_crashkit.model.peers import (
    UNCHANGED,
    KnownPeers,
    LostPeer,
    PeerProcess,
    Role,
    WaitingRequest,
    read_question,
    waiting_answers,
)
from unit.support.launching import handling
from unit.support.waiting import descriptors, wait_until

SINCE = "2026-09-01T00:00:00.000000Z"
ADDRESS = "prefill:8998"
#: Longer than anything takes, in seconds of the fake clock.
ENOUGH_SECS = 2000.0


class Rank:
    """A scheduler as a test writes its tables; `asked` has the names of each question for waiting requests."""

    def __init__(self, prober: PeerProber, pid: int, role: Role, *, is_lead: bool = True) -> None:
        self.role: Role = role
        self.known = KnownPeers()
        self.waiting: dict[str | None, list[WaitingRequest]] = {}
        self.asked: list[list[str]] = []
        self.questions = 0
        self.is_stuck = False
        self._told: KnownPeers | None = None
        self._own, handlers = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._own.setblocking(False)
        with handlers:
            prober.take_rank(pid, handlers.fileno(), {"role": role, "lead": is_lead})

    def knows(self, peers: dict[str, list[PeerProcess]], failed: tuple[str, ...] = ()) -> None:
        self.known = KnownPeers({name: frozenset(its) for name, its in peers.items()}, frozenset(failed))

    def waits(self, *names: str, for_whom: str | None = ADDRESS) -> None:
        self.waiting[for_whom] = [WaitingRequest(name, 1) for name in names]

    def answer(self) -> None:
        while not self.is_stuck:
            try:
                question = self._own.recv(100_000)
            except BlockingIOError:
                return
            if not question:
                return
            names = read_question(question)
            self.questions += 1
            if names is None:
                packets = [UNCHANGED] if self.known == self._told else self.known.to_packets()
                self._told = self.known
            else:
                self.asked.append(names)
                packets = list(waiting_answers(names, self.role, self.waiting))
            for packet in packets:
                with contextlib.suppress(BrokenPipeError):
                    self._own.send(packet)

    def close(self) -> None:
        self._own.close()


class Network:
    """Peers that listen, and the time; a connection is made or refused at once."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.alive: set[tuple[str, int]] = set()
        self.links: list[FakeLink] = []
        self.ports = itertools.count(1)


NETWORK = Network()


class FakeLink:
    """What the prober uses of a connection."""

    def __init__(self, _epoll: select.epoll, host: str, port: int) -> None:
        if not host[0].isdigit():
            raise ValueError(f"{host} is no IP address")
        self.address = (host, port)
        self.is_up = False
        self.failures = 0
        self.since: float | None = None
        self.lost: str | None = None
        self._due = 0.0
        NETWORK.links.append(self)

    @property
    def due(self) -> float:
        if self.is_up:
            return float("inf") if self.address in NETWORK.alive else 0.0
        return self._due

    def fileno(self) -> int:
        return -1

    def step(self, now: float, _happened: int) -> None:
        if self.address in NETWORK.alive:
            self.is_up, self.failures, self.since, self.lost = True, 0, None, None
        elif self.is_up or now >= self._due:
            self.is_up, self.since = False, self.since or now
            self.failures += 1
            self.lost = "refused" if self.failures >= 3 else None
            self._due = now + (5.0 if self.lost else 0.25)

    def close(self) -> None:
        self.is_up = False
        NETWORK.links.remove(self)


class Peer:
    """A server that listens."""

    def __init__(self, *ports: int, host: str = "127.0.0.1") -> None:
        self.addresses = [(host, port or next(NETWORK.ports)) for port in ports or (0,)]
        NETWORK.alive |= set(self.addresses)

    def kill(self) -> None:
        NETWORK.alive -= set(self.addresses)

    def again(self) -> Peer:
        return Peer(*(port for _host, port in self.addresses))


class Watch:
    """A prober with its ranks, and what it told."""

    def __init__(self) -> None:
        self.told: list[list[LostPeer]] = []
        self.prober = PeerProber(self.told.append, lambda: NETWORK.now)
        self.ranks: list[Rank] = []

    def rank(self, role: Role = "prefill", **more: Any) -> Rank:
        self.ranks.append(Rank(self.prober, 100 + len(self.ranks), role, **more))
        return self.ranks[-1]

    def pair(self, *waiting: str) -> tuple[Rank, Peer]:
        """Return a rank with requests that wait, and its peer, to which a connection is held."""
        peer, rank = Peer(), self.rank()
        rank.knows({ADDRESS: processes(peer)})
        rank.waits(*waiting)
        self.connected(peer)
        return rank, peer

    def decode(self, *ports: int) -> tuple[Rank, Peer]:
        """Return a rank and its peer, whose processes are a decode server each, and to which a connection is held."""
        peer, rank = Peer(*ports), self.rank("decode")
        rank.knows(decode_peers(*processes(peer)))
        self.connected(peer)
        return rank, peer

    def lose(self, peer: Peer, losses: int = 1) -> list[str]:
        """End a peer, and return the addresses of the losses once there are so many altogether."""
        peer.kill()
        self.run(until=lambda: len(self.lost) >= losses)
        return [lost.address for lost in self.lost]

    @property
    def lost(self) -> list[LostPeer]:
        return [peer for batch in self.told for peer in batch]

    def run(self, seconds: float = ENOUGH_SECS, until: Callable[[], object] = lambda: False) -> None:
        """Go round as the crash handler does."""
        end = NETWORK.now + seconds
        while not until():
            assert NETWORK.now < end or seconds != ENOUGH_SECS, "it never came"
            if NETWORK.now >= end:
                return
            self.prober.act_on_time()
            for rank in self.ranks:
                rank.answer()
            self.prober.act_on_time()
            NETWORK.now = min(end, max(NETWORK.now + 0.05, min(self.prober.next_due(), NETWORK.now + 1.0)))

    def connected(self, *peers: Peer, to: int = 1) -> None:
        """Go on until so many connections are held altogether."""
        self.run(until=lambda: sum(map(connections, peers)) == to)

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()
        self.prober.close()


def names(lost: LostPeer) -> list[str]:
    return sorted(request.rid for request in lost.requests)


def connections(peer: Peer) -> int:
    """Return how many connections a peer holds."""
    return sum(link.is_up and link.address in peer.addresses for link in NETWORK.links)


def processes(peer: Peer, *, ranks: bool = False) -> list[PeerProcess]:
    return [PeerProcess(number if ranks else 0, *address) for number, address in enumerate(peer.addresses)]


def decode_peers(*found: PeerProcess) -> dict[str, list[PeerProcess]]:
    return {process.address: [process] for process in found}


@pytest.fixture(autouse=True)
def network(monkeypatch: pytest.MonkeyPatch) -> None:
    NETWORK.__init__()  # type: ignore[misc]
    monkeypatch.setattr(prober, "Link", FakeLink)


@pytest.fixture
def watch() -> Iterator[Watch]:
    before = descriptors()
    made = Watch()
    yield made
    made.close()
    assert descriptors().keys() <= before.keys()


def test_a_killed_peer_is_reported_once(watch: Watch) -> None:
    rank, peer = watch.pair("a", "b")
    rank.waits("c", for_whom=None)
    watch.lose(peer)
    ((lost,),) = watch.told
    assert (lost.address, lost.role, lost.sign, lost.alone) == (ADDRESS, "prefill", "refused", True)
    assert lost.requests == [WaitingRequest("a", 1), WaitingRequest("b", 1)]
    assert (lost.count, lost.unassigned_count, lost.reported_by) == (2, 1, [100])
    watch.run(20.0)
    assert len(watch.told) == 1


def test_those_whose_wait_ended_meanwhile_are_named_too(watch: Watch) -> None:
    rank, peer = watch.pair("early")
    peer.kill()
    watch.run(until=lambda: rank.asked)
    # SGLang fails the one, and another one comes.
    rank.waits("late")
    watch.run(until=lambda: watch.told)
    assert names(watch.lost[0]) == ["early", "late"]


def test_all_replicas_that_wait_are_heard(watch: Watch) -> None:
    _first, peer = watch.pair("a")
    second = watch.rank()
    second.knows({ADDRESS: processes(peer)})
    second.waits("b")
    watch.run(5.0)
    watch.lose(peer)
    assert (names(watch.lost[0]), watch.lost[0].reported_by) == (["a", "b"], [100, 101])


def test_one_connection_is_held_however_many_ranks_there_are(watch: Watch) -> None:
    prefill, decode = Peer(0, 0, 0, 0), Peer(0, 0, 0, 0)
    its = processes(prefill)
    for number in range(4):
        watch.rank().knows({ADDRESS: [its[number], its[0]]})
        watch.rank("decode").knows(decode_peers(*processes(decode, ranks=True)))
    watch.run(20.0)
    assert (connections(prefill), connections(decode)) == (1, 1)


def test_ranks_of_a_server_on_several_hosts_are_watched(watch: Watch) -> None:
    first, second = Peer(), Peer(host="127.0.0.2")
    watch.rank().knows({ADDRESS: [*processes(first), *processes(second)]})
    watch.connected(first, second, to=2)
    assert watch.lose(second) == [ADDRESS]


def test_a_lost_decode_server_is_reported_once(watch: Watch) -> None:
    peer = Peer(0, 0, 0)
    ranks = processes(peer, ranks=True)
    watch.rank("decode").knows(decode_peers(*ranks))
    watch.connected(peer)
    watch.lose(peer)
    watch.run(20.0)
    assert [lost.address for lost in watch.lost] == [ranks[0].address]


def test_decode_servers_of_one_host_are_watched_in_turn(watch: Watch) -> None:
    first, second = Peer(), Peer()
    watch.rank("decode").knows(decode_peers(*processes(first), *processes(second)))
    seen: set[Any] = set()
    watch.run(until=lambda: seen.update(filter(connections, (first, second))) or len(seen) == 2)
    assert watch.told == []
    # At a sign of one all are looked at.
    watch.lose(second)
    watch.run(20.0)
    assert ([lost.address for lost in watch.lost], watch.lost[0].alone) == ([processes(second)[0].address], False)
    assert watch.lose(first, 2)[1:] == [processes(first)[0].address]


def test_replicas_that_end_together_are_reported_together(watch: Watch) -> None:
    rank, peer = watch.decode(0, 0, 0, 0)
    for number, process in enumerate(processes(peer)):
        rank.waits(f"of {number}", for_whom=process.address)
    assert set(watch.lose(peer, 4)) == {process.address for process in processes(peer)}
    assert sorted(name for lost in watch.lost for name in names(lost)) == [f"of {number}" for number in range(4)]


def test_a_peer_that_came_back_may_be_lost_again(watch: Watch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    _rank, peer = watch.pair()
    watch.lose(peer)
    again = peer.again()
    watch.run(until=lambda: "is back" in caplog.text)
    assert len(watch.told) == 1
    watch.lose(again, 2)


def test_a_decode_server_that_came_back_elsewhere_is_watched(watch: Watch) -> None:
    rank, peer = watch.decode()
    watch.lose(peer)
    again = Peer()
    # SGLang lists the old one, too.
    rank.knows(decode_peers(*processes(peer), *processes(again)))
    watch.connected(again)
    assert watch.lose(again, 2)[1] == processes(again)[0].address


def heartbeat(*names: str, role: Role = "prefill") -> LostPeer:
    told = LostPeer.of(ADDRESS, role, "heartbeat", SINCE, [WaitingRequest(name, 1) for name in names])
    told.reported_by = [100]
    return told


def test_a_peer_that_flaps_is_reported_once(watch: Watch) -> None:
    watch.pair()
    for _ in range(3):
        watch.prober.note_report(heartbeat())
        watch.run(20.0)
    assert [lost.sign for lost in watch.lost] == ["heartbeat"]


def test_the_heartbeat_names_those_whose_wait_it_ends(watch: Watch) -> None:
    rank = watch.rank()
    watch.prober.note_report(heartbeat("a"))
    rank.waits("b")
    watch.run(until=lambda: watch.told)
    (lost,) = watch.lost
    assert (lost.sign, names(lost), lost.reported_by) == ("heartbeat", ["a", "b"], [100])


def test_a_port_that_refuses_says_more_than_a_heartbeat(watch: Watch) -> None:
    _rank, peer = watch.pair()
    peer.kill()
    watch.prober.note_report(heartbeat())
    watch.run(until=lambda: watch.told)
    assert [lost.sign for lost in watch.lost] == ["refused"]


def test_a_failed_transfer_counts_where_the_connection_says_nothing(watch: Watch) -> None:
    peer = Peer(0, 0)
    ranks = processes(peer, ranks=True)
    watch.rank("decode").knows(decode_peers(ranks[0]))
    other = watch.rank("decode", is_lead=False)
    watch.connected(peer)
    other.knows({}, failed=(ranks[1].address,))
    watch.run(until=lambda: watch.told)
    watch.run(20.0)
    assert [(lost.address, lost.sign) for lost in watch.lost] == [(ranks[1].address, "failed_transfer")]


def test_a_peer_that_sglang_forgets_is_let_go_of(watch: Watch) -> None:
    rank, peer = watch.pair()
    rank.knows({})
    watch.run(until=lambda: not NETWORK.links)
    peer.kill()
    watch.run(20.0)
    assert (watch.told, watch.prober._peers) == ([], {})


def test_a_rank_that_ends_takes_its_peers_with_it(watch: Watch) -> None:
    rank, _peer = watch.pair()
    watch.ranks.remove(rank)
    rank.close()
    watch.run(until=lambda: not watch.prober._peers)
    assert watch.prober.next_due() == float("inf")


def test_a_stuck_rank_is_not_asked_again_nor_waited_for(watch: Watch) -> None:
    rank, peer = watch.pair()
    rank.is_stuck = True
    watch.run(20.0)
    watch.lose(peer)
    assert (watch.lost[0].count, watch.lost[0].reported_by) == (0, [100])
    rank.is_stuck, before = False, rank.questions
    rank.answer()
    # One for its peers, one at the first sign, one when it was certain.
    assert rank.questions - before <= 3


def test_a_lost_peer_is_looked_for_no_longer_than_so(watch: Watch) -> None:
    _rank, peer = watch.pair()
    watch.lose(peer)
    watch.run(700.0)
    stranger = peer.again()
    watch.run(20.0)
    assert (connections(stranger), len(watch.told)) == (0, 1)


def test_no_more_connections_are_made_than_there_may_be(
    watch: Watch, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(prober, "_MAX_LINKS", 1)
    first, second, rank = Peer(), Peer(), watch.rank()
    known = {ADDRESS: processes(first), "other:1": processes(second)}
    for more in ({}, {"third:1": processes(second)}):
        rank.knows(known | more)
        watch.run(20.0)
        assert connections(first) + connections(second) == 1
    assert caplog.text.count("connections to other servers would be needed; 1 are held") == 1


def test_a_peer_known_by_name_is_not_looked_up(watch: Watch, caplog: pytest.LogCaptureFixture) -> None:
    watch.rank().knows({ADDRESS: [PeerProcess(0, "nowhere.invalid", 1)]})
    watch.run(20.0)
    assert caplog.text.count("prefill:8998 is not watched: nowhere.invalid is no IP address") == 1
    assert watch.told == []


def test_a_prober_that_fails_ends_with_a_word(
    watch: Watch, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    watch.pair()
    monkeypatch.setattr(watch.prober, "_check", lambda _now: 1 / 0)
    watch.run(until=lambda: watch.prober.next_due() == float("inf"))
    assert "could not be looked at" in caplog.text
    watch.prober.note_report(heartbeat())
    watch.prober.act_on_time()
    assert watch.told == []


def test_a_hundred_peers_cost_one_connection_each(watch: Watch) -> None:
    hosts = [Peer(*range(1, 9), host=f"127.0.3.{number}") for number in range(1, 101)]
    rank = watch.rank("decode")
    rank.knows(decode_peers(*(process for peer in hosts for process in processes(peer, ranks=True))))
    watch.connected(*hosts, to=100)
    for peer in hosts[:30]:
        peer.kill()
        watch.run(0.05)
    watch.run(until=lambda: len(watch.lost) == 30)
    assert {lost.host for lost in watch.lost} == {peer.addresses[0][0] for peer in hosts[:30]}
    assert len(NETWORK.links) <= 100


SERVER = """
rank = os.fork()
if not rank:
    import ctypes, setproctitle; setproctitle.setproctitle("sglang::scheduler_TP0")
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    ready(os.getpid())
pause()
"""


class Case:
    """A handler in this process, with a clock that stands still."""

    def __init__(self, handler: CrashHandler, folder: Path) -> None:
        self.handler = handler
        self.folder = folder
        self.now = 1000.0
        self.said: list[str] = []
        current = handler.session
        self.losses = PeerLosses(handler.tree, current, self.said.append, lambda: self.now)

    def lose(self, *numbers: int, waiting: tuple[str, ...] = ()) -> None:
        requests = [WaitingRequest(rid) for rid in waiting]
        self.losses.report([LostPeer.of(f"10.0.0.{n}:8998", "prefill", "refused", SINCE, requests) for n in numbers])

    def finish(self) -> None:
        self.handler.session.finish_observed()

    def documents(self) -> list[dict[str, Any]]:
        """Return the incidents, oldest first."""
        return [found.document for found in reversed(find_incidents(self.folder)) if found.document]

    def addresses(self) -> list[list[str]]:
        return [[peer["address"] for peer in document["peers"]] for document in self.documents()]


@pytest.fixture
def case(tmp_path: Path, short_folder: Path) -> Iterator[Case]:
    with handling(SERVER, tmp_path, short_folder) as (handler, _server):
        handler.look()
        yield Case(handler, tmp_path)


@pytest.mark.parametrize(("count", "apart", "incidents"), [(2, 599.0, [2]), (2, 601.0, [1, 1]), (10, 500.0, [8, 2])])
def test_losses_soon_after_each_other_are_one_incident(
    case: Case, count: int, apart: float, incidents: list[int]
) -> None:
    for number in range(1, count + 1):
        case.lose(number)
        case.finish()
        case.now += apart
    assert [len(found) for found in case.addresses()] == incidents


def test_a_rolling_restart_is_one_incident_without_stacks(case: Case) -> None:
    for number in range(1, 51):
        case.lose(number, waiting=("a", "b"))
        case.finish()
        case.now += 60.0
    (document,) = case.documents()
    assert (document["kind"], document["complete"], len(document["peers"])) == ("peer_lost", True, 50)
    assert document["verdict"]["text"].startswith(
        "prefill server 10.0.0.1:8998, 10.0.0.2:8998, 10.0.0.3:8998, 10.0.0.4:8998, 10.0.0.5:8998, 10.0.0.6:8998, "
        "10.0.0.7:8998, 10.0.0.8:8998 and 42 more are gone; 100 requests wait for them: a, b and 98 more."
    )
    pieces = {piece["kind"]: piece["status"] for process in document["processes"] for piece in process["evidence"]}
    assert (pieces["proc_state"], pieces["stack"]) == ("captured", "skipped")
    assert not list(case.folder.rglob("stacks"))
    assert len(case.said) == 50


def test_peers_lost_at_once_are_told_in_one_line(case: Case) -> None:
    case.lose(1, 2)
    assert case.said == [
        "prefill server 10.0.0.1:8998 is gone; no request waits for it. Its port refuses connections. "
        "prefill server 10.0.0.2:8998 is gone; no request waits for it. Its port refuses connections."
    ]
    case.finish()
    assert case.addresses() == [["10.0.0.1:8998", "10.0.0.2:8998"]]


def test_an_incident_that_was_removed_gives_way_to_another(case: Case) -> None:
    case.lose(1)
    case.finish()
    for found in find_incidents(case.folder):
        shutil.rmtree(found.path)
    case.lose(2)
    case.finish()
    assert case.addresses() == [["10.0.0.2:8998"]]


def test_so_much_is_named_that_the_incident_stays_readable(case: Case) -> None:
    case.lose(*range(1, 101), waiting=tuple(f"request-{number}" for number in range(64)))
    case.finish()
    (document,) = case.documents()
    assert sum(len(peer["requests"]) for peer in document["peers"]) == 1024
    assert [peer["count"] for peer in document["peers"]] == [64] * 64


def test_a_death_found_as_the_incident_opens_is_it(case: Case) -> None:
    (rank,) = (one for one in case.handler.tree if one.title == "sglang::scheduler_TP0")
    os.kill(rank.pid, signal.SIGKILL)
    wait_until(rank.handle.has_exited, "the rank is dead")
    case.lose(1)
    run = case.handler.session.run
    assert (run.incident.kind, [peer.address for peer in run.incident.peers]) == ("killed", ["10.0.0.1:8998"])


@pytest.mark.parametrize("waiting", [(), ("a",)])
def test_losses_count_in_a_drain_where_requests_wait(case: Case, waiting: tuple[str, ...]) -> None:
    case.handler.session.triage.shutdown.draining = True
    case.lose(1, waiting=waiting)
    assert bool(case.documents()) == bool(waiting)
    case.handler.session.triage.shutdown.expected.add(case.handler.tree.root.pid)
    case.lose(2, waiting=waiting)
    assert len(case.said) == bool(waiting)
