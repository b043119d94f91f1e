from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import pytest

from sglang_crashkit.replay import sender
from sglang_crashkit.replay.requests import StoredRequest
from sglang_crashkit.replay.sender import MAX_AT_ONCE, Answer, send_all
from sglang_crashkit.watch.health import Address
from unit.support.waiting import LONG

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
