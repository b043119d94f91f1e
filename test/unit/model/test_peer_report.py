from __future__ import annotations

import json

import pytest

from sglang_crashkit.model.peer_report import (
    MAX_BYTES,
    MAX_PROCESSES,
    UNCHANGED,
    AnswerReader,
    KnownPeers,
    Waits,
    known_question,
    read_question,
    waiting_answers,
    waiting_question,
)
from sglang_crashkit.model.peers import PeerProcess, WaitingRequest


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


def test_no_packet_is_too_long_and_there_are_not_too_many() -> None:
    packets = peers(3 * MAX_PROCESSES).to_packets()
    assert max(map(len, packets)) < MAX_BYTES
    known = read(packets)
    assert isinstance(known, KnownPeers)
    assert len(known.peers) == MAX_PROCESSES


def test_an_answer_that_was_broken_off_is_not_mixed_with_the_next_one() -> None:
    reader = AnswerReader(7)
    assert reader.take(peers(800).to_packets()[0]) is False
    assert read(peers(3).to_packets(), reader) == peers(3)


def test_it_is_told_that_nothing_has_changed() -> None:
    assert AnswerReader(7).take(UNCHANGED) is True


def test_questions_arrive_as_they_were_asked() -> None:
    assert read_question(known_question()) is None
    assert read_question(waiting_question(["a:1", "b:2"])) == ["a:1", "b:2"]
    assert len(read_question(waiting_question(["x"] * 99)) or []) == 8


def test_who_waits_is_told_peer_by_peer_named_as_far_as_there_is_room() -> None:
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
