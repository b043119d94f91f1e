"""The other servers of a prefill and decode pair that a server lost, and what is said of them."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, cast, get_args

Role = Literal["prefill", "decode"]
Sign = Literal["refused", "unreachable", "heartbeat", "failed_transfer"]

#: A report names at most this many requests of each kind; the rest is counted.
MOST_NAMED = 64
_MOST_IN_TEXT = 8
_MOST_LETTERS = 100

#: By sign: what is said of one, of several, and why.
_SIGNS: dict[Sign, tuple[str, str, str]] = {
    "refused": ("is gone", "are gone", "Its port refuses connections."),
    "unreachable": ("does not answer", "do not answer", "Its host is silent."),
    "heartbeat": ("was given up by SGLang", "were given up by SGLang", "It missed SGLang's heartbeats."),
    "failed_transfer": ("was given up by SGLang", "were given up by SGLang", "A KV transfer to it failed."),
}


@dataclass(frozen=True)
class WaitingRequest:
    """A request that waits for the other server of a pair.

    Attributes:
        rid: SGLang's request id.
        room: the bootstrap room, by which both servers know it; None where it has none.
    """

    rid: str
    room: int | None = None


@dataclass
class LostPeer:
    """A server that does not answer its partner any more.

    Attributes:
        address: where it was reached: a prefill server's bootstrap address, a decode rank's own.
        role: what it did.
        sign: how its loss was noticed: its port ``refused`` several connections in a row; its host was ``unreachable``;
            SGLang's own ``heartbeat`` gave it up; a ``failed_transfer`` made SGLang give it up.
        since: the first sign, UTC in ISO 8601.
        requests: those that wait for it, `MOST_NAMED` at most.
        count: how many there are.
        unassigned: those that wait for a decode server without having heard of one, `MOST_NAMED` at most; only the
            router knows which one they are meant for.
        unassigned_count: how many there are.
        alone: no other server of its role was known to be there.
        reported_by: pids of the ranks that noticed.
    """

    address: str
    role: Role
    sign: Sign
    since: str
    requests: list[WaitingRequest] = field(default_factory=list)
    count: int = 0
    unassigned: list[WaitingRequest] = field(default_factory=list)
    unassigned_count: int = 0
    alone: bool = False
    reported_by: list[int] = field(default_factory=list)

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
            [WaitingRequest(_plain(request.rid), request.room) for request in some[:MOST_NAMED]]
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

    The ranks of a decode server are told of together; what they have in common is their host.
    """
    groups: dict[tuple[str, ...], list[LostPeer]] = {}
    for peer in peers:
        groups.setdefault((peer.role, peer.host, peer.sign), []).append(peer)
    return [_sentence(group) for group in groups.values()]


def _sentence(group: list[LostPeer]) -> str:
    whole = copy.deepcopy(group[0])
    for peer in group[1:]:
        whole.merge(peer)
    one, several, why = _SIGNS[whole.sign]
    names = " and ".join(peer.address for peer in group)
    parts = [f"{whole.role} server {names} {one if len(group) == 1 else several}"]
    if whole.count or not whole.unassigned_count:
        parts.append(_waiting(whole.requests, whole.count, "it"))
    if whole.unassigned_count:
        whom = f"a {whole.role} server{', and no other is known' if whole.alone else ' that has not answered yet'}"
        parts.append(_waiting(whole.unassigned, whole.unassigned_count, whom))
    return f"{'; '.join(parts)}. {why}"


def _waiting(requests: Iterable[WaitingRequest], count: int, whom: str) -> str:
    if not count:
        return f"no request waits for {whom}"
    named = [request.rid for request in requests][:_MOST_IN_TEXT]
    more = f" and {count - len(named)} more" if count > len(named) else ""
    return f"{count} request{'s wait' if count > 1 else ' waits'} for {whom}: {', '.join(named)}{more}"


def _union(some: list[WaitingRequest], others: list[WaitingRequest], at_least: int) -> tuple[list[WaitingRequest], int]:
    # Ranks of one tensor-parallel group have the same requests, those of a data-parallel one others.
    both = list(dict.fromkeys([*some, *others]))
    return both[:MOST_NAMED], max(at_least, len(both))


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
    return "".join(letter if " " <= letter <= "~" else "?" for letter in text[:_MOST_LETTERS])
