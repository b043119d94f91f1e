"""The other servers of a prefill and decode pair that SGLang gave up on, and the requests that wait for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, cast, get_args

import msgspec

from sglang_crashkit.model.lenient import mappings_of

Role = Literal["prefill", "decode"]
Sign = Literal["heartbeat", "failed_transfer"]

#: A report names at most this many requests, and counts the others.
MAX_NAMED = 64
_MAX_IN_TEXT = 8
_MAX_LETTERS = 200
#: No server has more requests than this.
_MAX_COUNT = 1_000_000


class WaitingRequest(msgspec.Struct, frozen=True):
    """A request that waits for the other server of a pair."""

    rid: str  # SGLang's request id
    room: int | None = None  # the bootstrap room, which identifies it on both servers; None without one
    since: str = ""  # since when it waits, UTC in ISO 8601; empty if SGLang gives no time


class LostPeer(msgspec.Struct):
    """A server that SGLang on the other server of the pair gave up on."""

    address: str  # a prefill server's bootstrap address, or a decode rank's own address
    role: Role  # the role of the lost server
    sign: Sign  # how SGLang noticed: by the decode server's heartbeat check, or a prefill server's failed transfer
    since: str  # when SGLang gave up on it, UTC in ISO 8601
    reason: str = ""  # why, in SGLang's words; empty if SGLang gives no reason
    requests: list[WaitingRequest] = []  # requests that wait for it, at most `MAX_NAMED`
    count: int = 0  # how many requests wait for it
    reported_by: list[int] = []  # pids of the ranks that gave up on it

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any], pid: int) -> LostPeer | None:
        """Return the report of rank `pid`, in printable ASCII and below 40 kB; None if `fields` are not a report."""
        role, sign, count = (fields.get(name) for name in ("role", "sign", "count"))
        address, since, reason = (_plain(fields.get(name)) for name in ("address", "since", "reason"))
        if not address or role not in get_args(Role) or sign not in get_args(Sign):
            return None
        told = mappings_of(fields.get("requests"))
        named = [
            WaitingRequest(_plain(one.get("rid")), room if type(room) is int else None, _plain(one.get("since")))
            for one in told[:MAX_NAMED]
            for room in [one.get("room")]
        ]
        counted = max(len(told), min(count, _MAX_COUNT) if type(count) is int else 0)
        return cls(address, cast("Role", role), cast("Sign", sign), since, reason, named, counted, [pid])

    def merge(self, other: LostPeer) -> None:
        """Add another rank's report of the same peer."""
        # Ranks of one tensor-parallel group have the same requests; data-parallel replicas have different ones.
        both = list({(each.rid, each.room): each for each in (*other.requests, *self.requests)}.values())
        self.count = max(self.count, other.count, len(both))
        self.requests = both[:MAX_NAMED]
        self.since = min(self.since, other.since)
        self.reported_by += [pid for pid in other.reported_by if pid not in self.reported_by]


def describe(peers: Iterable[LostPeer]) -> list[str]:
    """Return in words which servers SGLang gave up on, which requests wait for them, and since when."""
    groups: dict[tuple[Role, Sign], list[LostPeer]] = {}
    for peer in peers:
        groups.setdefault((peer.role, peer.sign), []).append(peer)
    return [_sentence(role, sign, group) for (role, sign), group in groups.items()]


def _sentence(role: Role, sign: Sign, group: Sequence[LostPeer]) -> str:
    plural, whom = ("s", "them") if len(group) > 1 else ("", "it")
    servers = f"{role} server{plural} {_in_short([peer.address for peer in group], len(group))}"
    what = f"{servers} missed SGLang's heartbeats" if sign == "heartbeat" else f"KV transfers to {servers} failed"
    waiting = {(request.rid, request.room): request for peer in group for request in peer.requests}
    count = max(len(waiting), *(peer.count for peer in group))
    if not count:
        return f"{what}; no request waits for {whom}."
    # The requests that several servers have beyond the named ones may be the same or different.
    at_least = "at least " if plural and any(peer.count > len(peer.requests) for peer in group) else ""
    since = min((request.since for request in waiting.values() if request.since), default="")
    how_long = f", the first since {since}" if since else ""
    rids = _in_short([rid for rid, _room in waiting], count)
    return f"{what}; {at_least}{count} request{'s wait' if count > 1 else ' waits'} for {whom}{how_long}: {rids}."


def _in_short(names: Sequence[str], count: int) -> str:
    more = f" and {count - _MAX_IN_TEXT} more" if count > _MAX_IN_TEXT else ""
    return ", ".join(names[:_MAX_IN_TEXT]) + more


def _plain(value: object) -> str:
    # A client chooses its request's id freely, and the text is printed and put into Markdown.
    text = value[:_MAX_LETTERS] if isinstance(value, str) else ""
    return "".join(letter if " " <= letter <= "~" else "?" for letter in text)
