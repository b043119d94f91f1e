"""What holds of the tables of both sides of a pair."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_crashkit.srt.disaggregation import peer_answers
from sglang_crashkit.srt.disaggregation.decode import PrefillServers, watch_prefill_servers
from sglang_crashkit.srt.disaggregation.peer_answers import MAX_REQUESTS
from sglang_crashkit.srt.disaggregation.prefill import DecodeServers, watch_decode_servers
from unit.srt.conftest import Listener
from unit.srt.disaggregation.tables import Queue, decode_queue, known_to, prefill_queue, receiving, sending, waiting_in

View = type[PrefillServers] | type[DecodeServers]


@pytest.fixture(params=[PrefillServers, DecodeServers])
def view(request: pytest.FixtureRequest) -> View:
    return request.param


@pytest.fixture
def queue(view: View) -> Queue:
    return decode_queue() if view is PrefillServers else prefill_queue()


@pytest.fixture
def watch(view: View) -> Any:
    return watch_prefill_servers if view is PrefillServers else watch_decode_servers


def test_a_look_stays_short_with_very_many_requests(view: View, queue: Queue) -> None:
    numbers = range(100, 100 + MAX_REQUESTS * 3)
    if view is PrefillServers:
        queue.queue = [receiving(str(number), number, "x:1") for number in numbers]
    else:
        queue.queue = [sending(str(number), number) for number in numbers]
    assert len(waiting_in(view(queue))["x:1" if view is PrefillServers else None]) == MAX_REQUESTS


def test_a_queue_is_not_kept_alive() -> None:
    views = PrefillServers(decode_queue()), DecodeServers(prefill_queue())
    gc.collect()
    assert [(view.known(), view.waiting()) for view in views] == [(None, None)] * 2


def test_a_backend_without_peers_has_none(view: View, queue: Queue) -> None:
    queue.kv_manager = SimpleNamespace()
    assert known_to(view(queue)).peers == {}


def test_a_queue_is_watched_from_its_creation(view: View, queue: Queue, watch: Any, listener: Listener) -> None:
    watch(queue)
    heard = listener.heard()
    assert (heard["event"], heard["role"], heard["lead"], heard["has_descriptor"]) == ("pair", view.role, True, True)
    peer_answers.current().stop()


def test_a_hook_that_cannot_watch_does_not_stop_the_server(
    watch: Any, listener: Listener, caplog: pytest.LogCaptureFixture
) -> None:
    watch(None)
    assert f"{watch.__name__} failed" in caplog.text


@pytest.mark.parametrize("name", ["attn_tp_rank", "attn_cp_rank", "pp_rank"])
def test_the_first_rank_of_a_group_tells_for_all(view: View, queue: Queue, name: str) -> None:
    assert view(queue).is_lead
    setattr(queue.kv_manager, name, 1)
    assert not view(queue).is_lead
