from __future__ import annotations

import json
import select
import socket
from collections.abc import Iterator

import pytest

from sglang_crashkit.handler.peers.ranks import PeerRanks
from sglang_crashkit.model.peers import KnownPeers, PeerProcess, Role, read_question


class Asked:
    """A rank's end, and what becomes of what it says."""

    def __init__(self) -> None:
        self.changes = 0
        self.epoll = select.epoll()
        self.ranks = PeerRanks(self.epoll, self._change, lambda *_: None)
        self.own = self.connect("prefill")

    def _change(self) -> None:
        self.changes += 1

    def connect(self, role: Role) -> socket.socket:
        own, handlers = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        own.setblocking(False)
        with handlers:
            self.ranks.add(100, handlers.fileno(), role, 0.0, is_lead=True)
        return own

    def questions(self) -> int:
        count = 0
        while True:
            try:
                assert read_question(self.own.recv(100_000)) is None
            except BlockingIOError:
                return count
            count += 1

    def answer(self, *packets: bytes) -> None:
        for packet in packets:
            self.own.send(packet)
        for descriptor, _events in self.epoll.poll(0):
            assert self.ranks.read(descriptor)


@pytest.fixture
def asked() -> Iterator[Asked]:
    made = Asked()
    yield made
    made.ranks.drop_all()
    made.own.close()
    made.epoll.close()


def test_what_a_rank_knows_is_taken_in(asked: Asked) -> None:
    process = PeerProcess(0, "127.0.0.1", 7)
    asked.answer(*KnownPeers({"a:1": frozenset({process})}, frozenset({"b:2"})).to_packets())
    assert asked.ranks.known() == ({("prefill", "a:1"): {process}}, {("prefill", "a:1"): {100}})
    assert (asked.ranks.failed(), asked.changes) == ({("prefill", "b:2")}, 1)
    asked.own.close()
    asked.ranks.read(asked.epoll.poll(1.0)[0][0])
    assert (len(asked.ranks), asked.changes) == (0, 2)


def test_one_that_does_not_answer_is_asked_again_later(asked: Asked) -> None:
    for now in (4.0, 59.0, 64.0):
        asked.ranks.ask_on_time(now)
    assert asked.questions() == 2


@pytest.mark.parametrize(
    "packet", [b"", b"nonsense", b"[]", json.dumps({"answer": "known", "peers": [1]}).encode(), b'{"answer": "x"}']
)
def test_one_that_talks_nonsense_is_asked_no_more(asked: Asked, packet: bytes) -> None:
    asked.answer(packet)
    assert len(asked.ranks) == 0


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_UNIX])
def test_what_is_no_pair_of_packets_is_not_taken(asked: Asked, family: int) -> None:
    with socket.socket(family, socket.SOCK_STREAM) as other:
        asked.ranks.add(1, other.fileno(), "decode", 0.0, is_lead=True)
    assert len(asked.ranks) == 1


def test_one_with_a_new_role_replaces_what_it_was(asked: Asked) -> None:
    before, asked.own = asked.own, asked.connect("decode")
    before.close()
    asked.answer(*KnownPeers({}, frozenset({"b:2"})).to_packets())
    assert asked.ranks.failed() == {("decode", "b:2")}
