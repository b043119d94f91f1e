"""The other servers of a prefill and decode pair that SGLang gave up, and the requests that wait for them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, cast, get_args

Role = Literal["prefill", "decode"]
Sign = Literal["heartbeat", "failed_transfer"]

#: A report names at most this many requests; the rest is counted.
MAX_NAMED = 64
_MAX_IN_TEXT = 8
_MAX_LETTERS = 200
#: More requests than this no server has.
_MAX_COUNT = 1_000_000


@dataclass(frozen=True)
class WaitingRequest:
    """A request that waits for the other server of a pair."""

    rid: str  # SGLang's request id
    room: int | None = None  # the bootstrap room, by which both servers know it; None where it has none
    since: str | None = None  # since when it waits, UTC in ISO 8601; None where SGLang does not say


@dataclass
class LostPeer:
    """A server that SGLang, on its partner, gave up."""

    address: str  # where it was reached: a prefill server's bootstrap address, a decode rank's own
    role: Role  # what it did
    #: How SGLang noticed: it missed the ``heartbeat`` of its decode server; a prefill server's ``failed_transfer``.
    sign: Sign
    since: str  # when SGLang gave it up, UTC in ISO 8601
    reason: str = ""  # why, in SGLang's words; empty where it gives none
    requests: list[WaitingRequest] = field(default_factory=list)  # those that wait for it, `MAX_NAMED` at most
    count: int = 0  # how many there are
    reported_by: list[int] = field(default_factory=list)  # pids of the ranks that gave it up

    @classmethod
    def of(
        cls, address: str, role: Role, sign: Sign, since: str, reason: str, requests: Sequence[WaitingRequest]
    ) -> LostPeer:
        """Return a peer whose requests are counted, and named as far as there is room."""
        named = [WaitingRequest(_plain(each.rid), each.room, each.since) for each in requests[:MAX_NAMED]]
        return cls(_plain(address), role, sign, since, _plain(reason), named, len(requests))

    def to_fields(self) -> dict[str, Any]:
        """Return it as JSON values, of less than 40 kB for one made by `of`."""
        return asdict(self)

    @classmethod
    def from_fields(cls, fields: dict[str, Any], pid: int) -> LostPeer | None:
        """Return what rank `pid` reported, None where it is no such report."""
        address, role, sign = (fields.get(name) for name in ("address", "role", "sign"))
        if not isinstance(address, str) or role not in get_args(Role) or sign not in get_args(Sign):
            return None
        since, reason, count = (fields.get(name) for name in ("since", "reason", "count"))
        entries = fields.get("requests")
        entries = entries if isinstance(entries, list) else []
        requests = [_request(entry) for entry in entries if isinstance(entry, dict)]
        peer = cls.of(address, cast("Role", role), cast("Sign", sign), _plain(since), _plain(reason), requests)
        if type(count) is int:
            peer.count = max(peer.count, min(count, _MAX_COUNT))
        peer.reported_by = [pid]
        return peer

    def merge(self, other: LostPeer) -> None:
        """Take in what another rank reported of the same peer."""
        # Ranks of one tensor-parallel group have the same requests, those of a data-parallel one others.
        both = list({(each.rid, each.room): each for each in (*other.requests, *self.requests)}.values())
        self.count = max(self.count, other.count, len(both))
        self.requests = both[:MAX_NAMED]
        self.since = min(self.since, other.since)
        self.reported_by += [pid for pid in other.reported_by if pid not in self.reported_by]


def describe(peers: Iterable[LostPeer]) -> list[str]:
    """Return in words which servers SGLang gave up, which requests wait for them, and since when."""
    groups: dict[tuple[Role, Sign], list[LostPeer]] = {}
    for peer in peers:
        groups.setdefault((peer.role, peer.sign), []).append(peer)
    return [_sentence(role, sign, group) for (role, sign), group in groups.items()]


def _sentence(role: Role, sign: Sign, group: Sequence[LostPeer]) -> str:
    several = len(group) > 1
    names = ", ".join(peer.address for peer in group[:_MAX_IN_TEXT])
    if len(group) > _MAX_IN_TEXT:
        names += f" and {len(group) - _MAX_IN_TEXT} more"
    servers = f"{role} server{'s' if several else ''} {names}"
    if sign == "heartbeat":
        what = f"{servers} missed SGLang's heartbeats"
    else:
        what = f"{'KV transfers' if several else 'a KV transfer'} to {servers} failed"
    waiting = {(request.rid, request.room): request for peer in group for request in peer.requests}
    count = max(len(waiting), *(peer.count for peer in group))
    whom = "them" if several else "it"
    if not count:
        return f"{what}; no request waits for {whom}."
    # What several servers have beyond the named ones may be the same requests or others.
    at_least = "at least " if several and any(peer.count > len(peer.requests) for peer in group) else ""
    rids = ", ".join(rid for rid, _room in list(waiting)[:_MAX_IN_TEXT])
    more = f" and {count - _MAX_IN_TEXT} more" if count > _MAX_IN_TEXT else ""
    since = min((request.since for request in waiting.values() if request.since), default="")
    how_long = f", the first since {since}" if since else ""
    return f"{what}; {at_least}{count} request{'s wait' if count > 1 else ' waits'} for {whom}{how_long}: {rids}{more}."


def _request(entry: dict[str, Any]) -> WaitingRequest:
    room, since = entry.get("room"), entry.get("since")
    return WaitingRequest(
        _plain(entry.get("rid")),
        room if type(room) is int else None,
        _plain(since) if isinstance(since, str) else None,
    )


def _plain(value: object) -> str:
    # A client may call its request anything; this is printed, and stands in Markdown.
    text = value[:_MAX_LETTERS] if isinstance(value, str) else ""
    return "".join(letter if " " <= letter <= "~" else "?" for letter in text)
