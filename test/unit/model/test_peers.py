from __future__ import annotations

import json

import pytest

from sglang_crashkit.model.peers import (
    MAX_BYTES,
    MAX_PROCESSES,
    UNCHANGED,
    AnswerReader,
    KnownPeers,
    LostPeer,
    PeerProcess,
    WaitingRequest,
    Waits,
    describe,
    known_question,
    read_question,
    waiting_answers,
    waiting_question,
)

SINCE = "2026-09-01T00:00:00.000000Z"


def requests(*names: str) -> list[WaitingRequest]:
    return [WaitingRequest(name, position) for position, name in enumerate(names)]


def lost(address: str = "10.0.0.1:8998", role: str = "prefill", sign: str = "refused", **more: object) -> LostPeer:
    fields = {"address": address, "role": role, "sign": sign, "since": SINCE} | more
    peer = LostPeer.from_fields(fields, pid=7)
    assert peer is not None
    return peer


def test_what_is_said_names_the_peer_and_those_who_wait() -> None:
    peer = LostPeer.of("127.0.0.1:30000", "prefill", "refused", SINCE, requests("a", "b", "c"))
    assert describe([peer]) == [
        "prefill server 127.0.0.1:30000 is gone; 3 requests wait for it: a, b, c. Its port refuses connections."
    ]


def test_those_that_heard_of_no_decode_server_are_told_apart() -> None:
    peer = LostPeer.of("[::1]:41", "decode", "refused", SINCE, requests("a"), requests("b", "c"))
    assert describe([peer])[0].startswith(
        "decode server [::1]:41 is gone; 1 request waits for it: a; "
        "2 requests wait for a decode server that has not answered yet: b, c. "
    )


def test_the_ranks_of_a_decode_server_are_told_of_together() -> None:
    first = LostPeer.of("10.0.0.2:41", "decode", "refused", SINCE, requests("a", "b"))
    second = LostPeer.of("10.0.0.2:42", "decode", "refused", SINCE, requests("a", "b"))
    other = LostPeer.of("10.0.0.3:43", "decode", "refused", SINCE)
    assert describe([first, other, second]) == [
        "decode server 10.0.0.2:41 and 10.0.0.2:42 are gone; 2 requests wait for it: a, b. "
        "Its port refuses connections.",
        "decode server 10.0.0.3:43 is gone; no request waits for it. Its port refuses connections.",
    ]
    assert first.count == 2, "describing changes nothing"


def test_a_report_fits_a_datagram_whatever_the_requests_are_called() -> None:
    strange = requests(*(chr(0x1F600) * 5000 + str(n) for n in range(1000)), "x\n# y\udcff")
    peer = LostPeer.of("h" * 9000, "decode", "refused", SINCE, strange, strange)
    data = json.dumps(peer.to_fields())
    assert len(data) < 40_000
    received = LostPeer.from_fields(json.loads(data), pid=7)
    assert received is not None
    assert (received.requests, received.count, received.reported_by) == (peer.requests, 1001, [7])
    peer = LostPeer.of("h:1", "decode", "refused", SINCE, requests("x\n# y\udcff"))
    assert peer.requests == [WaitingRequest("x?# y?", 0)]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"address": 1, "role": "prefill", "sign": "refused"},
        {"address": "h:1", "role": "router", "sign": "refused"},
        {"address": "h:1", "role": "prefill", "sign": "rumour"},
        {"address": "h:1", "role": ["prefill"], "sign": "refused"},
    ],
)
def test_what_is_no_report_is_none(fields: dict[str, object]) -> None:
    assert LostPeer.from_fields(fields, pid=7) is None


def test_one_wrong_entry_does_not_lose_the_report() -> None:
    peer = lost(requests=[{"rid": "a", "room": "x"}, 3, {}], count="many", unassigned={}, unassigned_count=True)
    assert peer.requests == [WaitingRequest("a"), WaitingRequest("None")]
    assert (peer.count, peer.unassigned, peer.unassigned_count) == (2, [], 0)


def test_ranks_count_shared_requests_once_and_add_others() -> None:
    peer = lost(sign="heartbeat", requests=[{"rid": "a", "room": 1}], count=1)
    peer.merge(lost(requests=[{"rid": "a", "room": 1}, {"rid": "b", "room": 2}], count=2))
    other = lost(requests=[{"rid": "c", "room": 3}], count=9)
    other.reported_by, other.since = [8], "2026-08-01T00:00:00.000000Z"
    peer.merge(other)
    assert [request.rid for request in peer.requests] == ["a", "b", "c"]
    assert (peer.count, peer.reported_by, peer.sign) == (9, [7, 8], "refused")
    assert peer.since == "2026-08-01T00:00:00.000000Z"


def test_servers_of_many_hosts_are_told_in_one_sentence() -> None:
    few = [LostPeer.of(f"10.0.0.{n}:1", "prefill", "refused", SINCE, requests(f"of {n}")) for n in range(4)]
    assert len(describe(few)) == 4
    many = [LostPeer.of(f"10.0.0.{n}:1", "prefill", "refused", SINCE, requests(f"of {n}")) for n in range(5)]
    assert describe([*many, LostPeer.of("10.0.0.9:1", "prefill", "unreachable", SINCE)]) == [
        "prefill server 10.0.0.0:1 and 10.0.0.1:1 and 10.0.0.2:1 and 10.0.0.3:1 and 10.0.0.4:1 are gone; "
        "5 requests wait for them: of 0, of 1, of 2, of 3, of 4. Their ports refuse connections.",
        "prefill server 10.0.0.9:1 does not answer; no request waits for it. Its host is silent.",
    ]


def test_requests_are_added_up_over_servers_but_not_ranks() -> None:
    ranks = [
        LostPeer.of(f"10.0.0.1:{n}", "decode", "refused", SINCE, requests(*map(str, range(100)))) for n in range(8)
    ]
    assert "100 requests wait for it" in describe(ranks)[0]
    servers = [
        LostPeer.of(f"10.0.0.{n}:1", "decode", "refused", SINCE, requests(*map(str, range(99)))) for n in range(9)
    ]
    (text,) = describe(servers)
    assert "decode server 10.0.0.0:1, 10.0.0.1:1, " in text
    assert "10.0.0.7:1 and 1 more are gone; 891 requests wait for them" in text


def peers(count: int) -> KnownPeers:
    return KnownPeers(
        {f"10.0.0.1:{port}": frozenset({PeerProcess(port % 8, "10.0.0.1", port)}) for port in range(count)}
    )


def read(packets: list[bytes], reader: AnswerReader | None = None) -> KnownPeers | Waits | bool:
    reader = reader or AnswerReader(7)
    *parts, last = [reader.take(packet) for packet in packets]
    assert parts == [False] * len(parts)
    return last


@pytest.mark.parametrize("count", [0, 1, 800])
def test_peers_arrive_as_they_were_told(count: int) -> None:
    known = KnownPeers(peers(count).peers, frozenset({"10.0.0.1:1"}))
    assert read(known.to_packets()) == known


def test_packets_are_limited_in_length_and_number() -> None:
    packets = peers(3 * MAX_PROCESSES).to_packets()
    assert max(map(len, packets)) < MAX_BYTES
    known = read(packets)
    assert isinstance(known, KnownPeers)
    assert len(known.peers) == MAX_PROCESSES


def test_a_broken_off_answer_is_not_mixed_with_the_next() -> None:
    reader = AnswerReader(7)
    assert reader.take(peers(800).to_packets()[0]) is False
    assert read(peers(3).to_packets(), reader) == peers(3)


def test_it_is_told_that_nothing_has_changed() -> None:
    assert AnswerReader(7).take(UNCHANGED) is True


def test_questions_arrive_as_they_were_asked() -> None:
    assert read_question(known_question()) is None
    assert read_question(waiting_question(["a:1", "b:2"])) == ["a:1", "b:2"]
    assert len(read_question(waiting_question(["x"] * 99)) or []) == 8


def test_who_waits_is_told_by_peer_within_the_room() -> None:
    many = [WaitingRequest("r" * 900 + str(number), number) for number in range(2000)]
    answers = list(waiting_answers(["a:1", "b:2"], "decode", {"a:1": many, None: many[:1]}))
    assert max(map(len, answers)) < MAX_BYTES
    first, second = (AnswerReader(7).take(answer) for answer in answers)
    assert isinstance(first, Waits)
    assert isinstance(second, Waits)
    assert (first.name, first.told.count, len(first.told.requests), first.told.reported_by) == ("a:1", 2000, 64, [7])
    assert (second.name, second.told.count, second.told.unassigned_count) == ("b:2", 0, 1)


@pytest.mark.parametrize("question", [b"", b"[]", b"{}", b'{"ask": "stacks"}', b'{"ask": "waiting", "peers": 3}'])
def test_what_is_no_question_is_refused(question: bytes) -> None:
    with pytest.raises(ValueError, match=r"no |Expecting"):
        read_question(question)


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"[]",
        b"{}",
        json.dumps({"answer": "known"}).encode(),
        json.dumps({"answer": "known", "peers": [["a", 1]]}).encode(),
        json.dumps({"answer": "known", "peers": [["a", "x", "h", 1]]}).encode(),
        json.dumps({"answer": "known", "peers": [], "last": True, "failed": 3}).encode(),
        json.dumps({"answer": "waiting", "of": "a", "told": {}}).encode(),
    ],
)
def test_what_is_no_answer_is_refused(answer: bytes) -> None:
    with pytest.raises(ValueError, match=r"no |Expecting|invalid|unpack"):
        AnswerReader(7).take(answer)
