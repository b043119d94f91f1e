from __future__ import annotations

import socket
import threading
from collections.abc import Mapping
from typing import Any

import pytest

from sglang_crashkit.replay import sender
from sglang_crashkit.replay.requests import StoredRequest
from sglang_crashkit.replay.sender import MAX_AT_ONCE, Answer, send, send_all
from sglang_crashkit.watch.health import Address
from unit.waiting import LONG

ADDRESS = Address("http", "127.0.0.1", 1)
REQUESTS = [StoredRequest(str(number), float(number), False, {"rid": str(number)}) for number in range(4)]


def test_requests_in_order_wait_for_the_answer_before(monkeypatch: pytest.MonkeyPatch) -> None:
    under_way, most = list[str](), list[int]()

    def send(_address: Address, body: Mapping[str, Any], *_more: object) -> Answer:
        under_way.append(body["rid"])
        most.append(len(under_way))
        under_way.remove(body["rid"])
        return Answer(body["rid"], 200)

    monkeypatch.setattr(sender, "send", send)
    answers = send_all(ADDRESS, REQUESTS, LONG, at_once=1)
    assert ([answer.rid for answer in answers], max(most)) == (["0", "1", "2", "3"], 1)


def test_requests_at_once_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    together = threading.Barrier(len(REQUESTS))

    def send(_address: Address, body: Mapping[str, Any], *_more: object) -> Answer:
        together.wait(LONG)
        return Answer(body["rid"], 200)

    monkeypatch.setattr(sender, "send", send)
    assert len(send_all(ADDRESS, REQUESTS, LONG, at_once=MAX_AT_ONCE)) == len(REQUESTS)


def test_one_that_is_to_hang_up_does_and_is_not_lost() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        got = list[bytes]()

        def serve() -> None:
            connection, _peer = server.accept()
            with connection:
                got.extend(iter(lambda: connection.recv(65536), b""))

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        answer = send(Address("http", "127.0.0.1", server.getsockname()[1]), {"rid": "a"}, LONG, hang_up_secs=0.05)
        thread.join(LONG)
    assert not thread.is_alive()
    assert b'"rid": "a"' in b"".join(got)
    assert (answer.status, answer.is_lost, answer.problem) == (None, False, "hung up after 0.05 s, as its client did")


@pytest.mark.parametrize(("hang_up", "expected"), [(True, [None, 2.5]), (False, [None, None])])
def test_clients_hang_up_only_where_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, hang_up: bool, expected: list[float | None]
) -> None:
    told = list[object]()

    def send(_address: Address, body: Mapping[str, Any], *more: object) -> Answer:
        told.append(more[-1])
        return Answer(body["rid"], 200)

    monkeypatch.setattr(sender, "send", send)
    gone = StoredRequest("gone", 1.0, False, {"rid": "gone"}, gone_after=2.5)
    send_all(ADDRESS, [REQUESTS[0], gone], LONG, at_once=1, hang_up=hang_up)
    assert told == expected
