from __future__ import annotations

import json

import msgspec
import pytest

from sglang_crashkit.model.peers import LostPeer, WaitingRequest, describe

SINCE = "2026-09-01T00:00:00.000000Z"
ASKED = "2026-08-31T23:59:50.000000Z"


def requests(*names: str) -> list[dict[str, object]]:
    return [{"rid": name, "room": position, "since": SINCE} for position, name in enumerate(names)]


def lost(role: str, sign: str, address: str, told: list[dict[str, object]], **more: object) -> LostPeer:
    fields = {"address": address, "role": role, "sign": sign, "since": SINCE, "reason": "x", "requests": told}
    peer = LostPeer.from_fields(fields | more, pid=7)
    assert peer is not None
    return peer


def prefill(*names: str, address: str = "10.0.0.1:8998") -> LostPeer:
    return lost("prefill", "heartbeat", address, requests(*names))


def decode(*names: str, address: str = "10.0.0.2:41") -> LostPeer:
    return lost("decode", "failed_transfer", address, requests(*names))


@pytest.mark.parametrize(
    ("peers", "text"),
    [
        ([prefill()], ["prefill server 10.0.0.1:8998 missed SGLang's heartbeats; no request waits for it."]),
        (
            [prefill("a", "b")],
            [
                "prefill server 10.0.0.1:8998 missed SGLang's heartbeats; 2 requests wait for it, the first since "
                f"{SINCE}: a, b."
            ],
        ),
        (
            [lost("decode", "failed_transfer", "h:1", [{"rid": "a"}])],
            ["KV transfers to decode server h:1 failed; 1 request waits for it: a."],
        ),
        # The ranks of one server have the same requests.
        (
            [decode("a", "b"), prefill(), decode("a", "b", address="10.0.0.2:42")],
            [
                "KV transfers to decode servers 10.0.0.2:41, 10.0.0.2:42 failed; 2 requests wait for them, the first "
                f"since {SINCE}: a, b.",
                "prefill server 10.0.0.1:8998 missed SGLang's heartbeats; no request waits for it.",
            ],
        ),
        (
            [prefill(*(f"r{n}" for n in range(70))), *(prefill(address=f"h{n}:1") for n in range(9))],
            [
                "prefill servers 10.0.0.1:8998, h0:1, h1:1, h2:1, h3:1, h4:1, h5:1, h6:1 and 2 more missed SGLang's "
                f"heartbeats; at least 70 requests wait for them, the first since {SINCE}: r0, r1, r2, r3, r4, r5, r6, "
                "r7 and 62 more."
            ],
        ),
    ],
)
def test_who_is_lost_and_who_waits_is_said_in_words(peers: list[LostPeer], text: list[str]) -> None:
    assert describe(peers) == text


def test_a_report_fits_a_datagram_whatever_the_requests_are_called() -> None:
    strange = requests(*(chr(0x1F600) * 5000 + str(n) for n in range(1000)), "x\n# y\udcff")
    peer = lost("decode", "failed_transfer", "h" * 9000, strange, reason="r" * 9000)
    data = json.dumps(msgspec.to_builtins(peer))
    assert len(data) < 40_000
    assert LostPeer.from_fields(json.loads(data), pid=7) == peer
    assert (len(peer.requests), peer.count) == (64, 1001)
    assert prefill("x\n# y\udcff").requests[0].rid == "x?# y?"


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"address": 1, "role": "prefill", "sign": "heartbeat"},
        {"address": "h:1", "role": "router", "sign": "heartbeat"},
        {"address": "h:1", "role": "prefill", "sign": "rumour"},
        {"address": "h:1", "role": ["prefill"], "sign": "heartbeat"},
    ],
)
def test_what_is_no_report_is_none(fields: dict[str, object]) -> None:
    assert LostPeer.from_fields(fields, pid=7) is None


def test_one_wrong_entry_does_not_lose_the_report() -> None:
    entries = [{"rid": "a", "room": "x", "since": 3}, 3, {}]
    for count, counted in (("many", 2), (True, 2), (-1, 2), (9, 9), (10**30, 1_000_000)):
        peer = lost("prefill", "heartbeat", "h:1", entries, reason=[], count=count)  # type: ignore[arg-type]
        assert (peer.requests, peer.count) == ([WaitingRequest("a"), WaitingRequest("")], counted)


def test_ranks_count_shared_requests_once_and_add_others() -> None:
    peer, same, other = prefill("a"), prefill("a", "b"), prefill("a", "b", "c")
    # A client may give two requests one id.
    other.requests[0] = WaitingRequest("a", 99)
    peer.reported_by, same.reported_by, other.reported_by = [7], [8], [7]
    other.since = ASKED
    peer.merge(same)
    peer.merge(other)
    assert sorted((request.rid, request.room) for request in peer.requests) == [("a", 0), ("a", 99), ("b", 1), ("c", 2)]
    assert (peer.count, peer.reported_by, peer.since) == (4, [7, 8], ASKED)
