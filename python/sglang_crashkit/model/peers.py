"""The other servers of a prefill and decode pair: which are lost, and what a scheduler tells the handler of them.

The two talk over a pair of connected sockets (``AF_UNIX``, ``SOCK_SEQPACKET``), one end of which the scheduler passes
on to the handler. The handler asks ``known``, and the scheduler answers with its peers, or that they are the same as
before; or it asks ``waiting`` with the names of some peers, and the scheduler answers for each which requests wait for
it. A question is a packet, an answer one or several, each a JSON object.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple, cast, get_args

Role = Literal["prefill", "decode"]
Sign = Literal["refused", "unreachable", "heartbeat", "failed_transfer"]

#: A report names at most this many requests of each kind; the rest is counted.
MAX_NAMED = 64
_MAX_IN_TEXT = 8
#: Of more hosts than this, those with the same sign are spoken of together.
_MAX_SENTENCES = 4
_MAX_LETTERS = 100
#: No packet is longer, in bytes.
MAX_BYTES = 100_000
#: A question names at most this many peers, so that its answers fit the socket's buffer.
MAX_ASKED = 8
#: A scheduler tells of at most this many processes.
MAX_PROCESSES = 4096
_PER_PACKET = 256
_KNOWN, _WAITING = "known", "waiting"

#: By sign: what is said of one, of several, and why.
_SIGNS: dict[Sign, tuple[str, str, str]] = {
    "refused": ("is gone", "are gone", "Its port refuses connections."),
    "unreachable": ("does not answer", "do not answer", "Its host is silent."),
    "heartbeat": ("was given up by SGLang", "were given up by SGLang", "It missed SGLang's heartbeats."),
    "failed_transfer": ("was given up by SGLang", "were given up by SGLang", "A KV transfer to it failed."),
}
#: Why, where the servers of several hosts are spoken of.
_WHY_SEVERAL: dict[Sign, str] = {
    "refused": "Their ports refuse connections.",
    "unreachable": "Their hosts are silent.",
    "heartbeat": "They missed SGLang's heartbeats.",
    "failed_transfer": "KV transfers to them failed.",
}


class PeerProcess(NamedTuple):
    """A process of a peer server, as SGLang's tables name it."""

    rank: int  # its tensor-parallel rank; 0 where the tables do not say
    host: str  # its IP address
    port: int  # where it listens

    @property
    def address(self) -> str:
        """Host and port in one string, an IPv6 address in brackets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class WaitingRequest:
    """A request that waits for the other server of a pair."""

    rid: str  # SGLang's request id
    room: int | None = None  # the bootstrap room, by which both servers know it; None where it has none


@dataclass
class LostPeer:
    """A server that does not answer its partner any more."""

    address: str  # where it was reached: a prefill server's bootstrap address, a decode rank's own
    role: Role  # what it did
    #: How its loss was noticed: its port ``refused`` several connections in a row; its host was ``unreachable``;
    #: SGLang's own ``heartbeat`` gave it up; a ``failed_transfer`` made SGLang give it up.
    sign: Sign
    since: str  # the first sign, UTC in ISO 8601
    requests: list[WaitingRequest] = field(default_factory=list)  # those that wait for it, `MAX_NAMED` at most
    count: int = 0  # how many there are
    #: Those that wait for a decode server without having heard of one, `MAX_NAMED` at most; only the router knows which
    #: one they are meant for.
    unassigned: list[WaitingRequest] = field(default_factory=list)
    unassigned_count: int = 0  # how many there are
    alone: bool = False  # no other server of its role was known to be there
    reported_by: list[int] = field(default_factory=list)  # pids of the ranks that work with it, or that noticed

    @property
    def host(self) -> str:
        """The host of its address."""
        return self.address.rpartition(":")[0]

    @classmethod
    def of(
        cls,
        address: str,
        role: Role,
        sign: Sign,
        since: str,
        requests: Sequence[WaitingRequest] = (),
        unassigned: Sequence[WaitingRequest] = (),
        *,
        alone: bool = False,
    ) -> LostPeer:
        """Return a peer whose requests are counted, and named as far as there is room."""
        named, named_unassigned = (
            [WaitingRequest(_plain(request.rid), request.room) for request in some[:MAX_NAMED]]
            for some in (requests, unassigned)
        )
        return cls(_plain(address), role, sign, since, named, len(requests), named_unassigned, len(unassigned), alone)

    def to_fields(self) -> dict[str, Any]:
        """Return it as JSON values, of less than 40 kB for one made by `of`."""
        return asdict(self)

    @classmethod
    def from_fields(cls, fields: dict[str, Any], pid: int) -> LostPeer | None:
        """Return what rank `pid` reported, None where it is no such report."""
        address, role, sign, since = (fields.get(name) for name in ("address", "role", "sign", "since"))
        if not isinstance(address, str) or role not in get_args(Role) or sign not in get_args(Sign):
            return None
        peer = cls.of(
            address,
            cast("Role", role),
            cast("Sign", sign),
            _plain(str(since)),
            _requests(fields.get("requests")),
            _requests(fields.get("unassigned")),
            alone=fields.get("alone") is True,
        )
        peer.count = _count(fields.get("count"), peer.count)
        peer.unassigned_count = _count(fields.get("unassigned_count"), peer.unassigned_count)
        peer.reported_by = [pid]
        return peer

    def merge(self, other: LostPeer) -> None:
        """Take in what another rank reported of the same peer."""
        self.since = min(self.since, other.since)
        self.requests, self.count = _union(self.requests, other.requests, max(self.count, other.count))
        self.unassigned, self.unassigned_count = _union(
            self.unassigned, other.unassigned, max(self.unassigned_count, other.unassigned_count)
        )
        self.alone = self.alone and other.alone
        self.reported_by += [pid for pid in other.reported_by if pid not in self.reported_by]
        if other.sign == "refused":
            self.sign = "refused"


def describe(peers: Iterable[LostPeer]) -> list[str]:
    """Return in words which peers are lost, which requests wait for them, and how it was noticed.

    The ranks of a decode server are described together; what they have in common is their host. Of many hosts, as in a
    rolling restart, all with the same sign are.
    """
    known = list(peers)
    groups = _grouped(known, lambda peer: (peer.role, peer.host, peer.sign))
    if len(groups) > _MAX_SENTENCES:
        groups = _grouped(known, lambda peer: (peer.role, peer.sign))
    return [_sentence(group) for group in groups]


def _grouped(peers: Iterable[LostPeer], key: Callable[[LostPeer], tuple[str, ...]]) -> list[list[LostPeer]]:
    groups: dict[tuple[str, ...], list[LostPeer]] = {}
    for peer in peers:
        groups.setdefault(key(peer), []).append(peer)
    return list(groups.values())


def _sentence(group: list[LostPeer]) -> str:
    whole, *others = [_merged(of_host) for of_host in _grouped(group, lambda peer: (peer.host,))]
    # Ranks of one server have the same requests, several servers have others.
    count = sum(peer.count for peer in (whole, *others))
    for peer in others:
        whole.merge(peer)
    whole.count = max(whole.count, count)
    one, several, why = _SIGNS[whole.sign]
    parts = [f"{whole.role} server {_names(group)} {one if len(group) == 1 else several}"]
    whom = "them" if others else "it"
    if whole.count or not whole.unassigned_count:
        parts.append(_waiting(whole.requests, whole.count, whom))
    if whole.unassigned_count:
        whom = f"a {whole.role} server{', and no other is known' if whole.alone else ' that has not answered yet'}"
        parts.append(_waiting(whole.unassigned, whole.unassigned_count, whom))
    return f"{'; '.join(parts)}. {_WHY_SEVERAL[whole.sign] if others else why}"


def _merged(peers: list[LostPeer]) -> LostPeer:
    whole = copy.deepcopy(peers[0])
    for peer in peers[1:]:
        whole.merge(peer)
    return whole


def _names(group: list[LostPeer]) -> str:
    names = [peer.address for peer in group]
    if len(names) > _MAX_IN_TEXT:
        return f"{', '.join(names[:_MAX_IN_TEXT])} and {len(names) - _MAX_IN_TEXT} more"
    return " and ".join(names)


def _waiting(requests: Iterable[WaitingRequest], count: int, whom: str) -> str:
    if not count:
        return f"no request waits for {whom}"
    named = [request.rid for request in requests][:_MAX_IN_TEXT]
    more = f" and {count - len(named)} more" if count > len(named) else ""
    return f"{count} request{'s wait' if count > 1 else ' waits'} for {whom}: {', '.join(named)}{more}"


def _union(some: list[WaitingRequest], others: list[WaitingRequest], at_least: int) -> tuple[list[WaitingRequest], int]:
    # Ranks of one tensor-parallel group have the same requests, those of a data-parallel one others.
    both = list(dict.fromkeys([*some, *others]))
    return both[:MAX_NAMED], max(at_least, len(both))


def _requests(value: object) -> list[WaitingRequest]:
    entries = value if isinstance(value, list) else []
    return [
        WaitingRequest(str(entry.get("rid")), entry["room"] if isinstance(entry.get("room"), int) else None)
        for entry in entries
        if isinstance(entry, dict)
    ]


def _count(value: object, at_least: int) -> int:
    return max(value, at_least) if isinstance(value, int) and not isinstance(value, bool) else at_least


def _plain(text: str) -> str:
    # A client may call its request anything; this is printed, and stands in Markdown.
    return "".join(letter if " " <= letter <= "~" else "?" for letter in text[:_MAX_LETTERS])


# -- questions and answers


@dataclass(frozen=True)
class KnownPeers:
    """The peers that one scheduler works with."""

    #: The processes of each peer that it knows, by the peer's name.
    peers: Mapping[str, frozenset[PeerProcess]] = field(default_factory=dict)
    failed: frozenset[str] = frozenset()  # the names of those that SGLang has given up after a transfer

    def to_packets(self) -> list[bytes]:
        """Return the answer to ``known``."""
        flat = [(name, *process) for name, processes in self.peers.items() for process in sorted(processes)]
        flat = flat[:MAX_PROCESSES]
        parts = [flat[begin : begin + _PER_PACKET] for begin in range(0, len(flat), _PER_PACKET)] or [[]]
        failed = sorted(self.failed)[:_PER_PACKET]
        packets: list[dict[str, Any]] = [{"answer": _KNOWN, "peers": part} for part in parts]
        packets[0]["first"] = True
        packets[-1] |= {"failed": failed, "last": True}
        return [json.dumps(packet).encode() for packet in packets]


#: The answer to ``known`` where nothing has changed since the last one.
UNCHANGED = json.dumps({"answer": _KNOWN, "unchanged": True}).encode()


def known_question() -> bytes:
    """Return the question which peers a scheduler works with."""
    return json.dumps({"ask": _KNOWN}).encode()


def waiting_question(names: Sequence[str]) -> bytes:
    """Return the question which requests wait for the peers of these names, `MAX_ASKED` at most."""
    return json.dumps({"ask": _WAITING, "peers": list(names[:MAX_ASKED])}).encode()


def read_question(packet: bytes) -> list[str] | None:
    """Return the names that a question ``waiting`` has, None where it is ``known``.

    Raises:
        ValueError: it is no question.
    """
    document = _parse(packet)
    if document.get("ask") == _KNOWN:
        return None
    names = document.get("peers")
    if document.get("ask") != _WAITING or not isinstance(names, list):
        raise ValueError(f"no question: {packet[:100]!r}")
    return [str(name) for name in names]


def waiting_answers(
    names: Iterable[str], role: Role, waiting: Mapping[str | None, Sequence[WaitingRequest]]
) -> Iterator[bytes]:
    """Yield the answer to ``waiting``, a packet for each name.

    In `waiting`, None stands for a peer that is not known.
    """
    for name in names:
        # By the same rules as a report: named as far as there is room, and counted.
        told = LostPeer.of(name, role, "refused", "", waiting.get(name, ()), waiting.get(None, ()))
        yield json.dumps({"answer": _WAITING, "of": name, "told": told.to_fields()}).encode()


@dataclass(frozen=True)
class Waits:
    """Which requests wait for one peer."""

    name: str  # the peer's name
    told: LostPeer  # the requests; of the rest nothing counts


class AnswerReader:
    """Puts the packets of one scheduler's answers together."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._peers: dict[str, set[PeerProcess]] = {}

    def take(self, packet: bytes) -> KnownPeers | Waits | bool:
        """Take in one packet.

        Returns:
            What it tells; True where it says that nothing has changed, False where more is to come.

        Raises:
            ValueError: it is no answer.
        """
        document = _parse(packet)
        if document.get("answer") == _WAITING:
            told = LostPeer.from_fields(document.get("told") or {}, self._pid)
            if told is None:
                raise ValueError(f"no answer: {packet[:100]!r}")
            return Waits(str(document.get("of")), told)
        if document.get("answer") != _KNOWN:
            raise ValueError(f"no answer: {packet[:100]!r}")
        if document.get("unchanged") is True:
            return True
        if document.get("first") is True:
            self._peers = {}
        try:
            for name, rank, host, port in document["peers"]:
                self._peers.setdefault(str(name), set()).add(PeerProcess(int(rank), str(host), int(port)))
            if document.get("last") is not True:
                return False
            failed = frozenset(str(name) for name in document["failed"])
        except (KeyError, TypeError) as error:
            raise ValueError(f"no answer: {packet[:100]!r}") from error
        peers = {name: frozenset(processes) for name, processes in self._peers.items()}
        self._peers = {}
        return KnownPeers(peers, failed)


def _parse(packet: bytes) -> dict[str, Any]:
    document = json.loads(packet)
    if not isinstance(document, dict):
        raise ValueError(f"no object: {packet[:100]!r}")
    return document
