from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest

from sglang_crashkit.core.peers import WaitingRequest
from sglang_crashkit.srt.disaggregation.decode import PrefillServers, watch_prefill_servers
from sglang_crashkit.srt.disaggregation.peer_watch import current_watch
from sglang_crashkit.srt.disaggregation.view import MOST_REQUESTS
from unit.srt.conftest import Listener
from unit.srt.disaggregation.tables import decode_queue, look_at, receiving, request


def test_decode_knows_the_ranks_of_each_prefill_server_that_it_has_spoken_to() -> None:
    queue = decode_queue()
    assert look_at(PrefillServers(queue)).peers == {"10.0.0.1:8998": {("10.0.0.1", 51), ("10.0.0.9", 52)}}
    assert "other" not in queue.kv_manager.addr_to_rooms_tracker


def test_decode_knows_whom_each_request_waits_for() -> None:
    queue = decode_queue()
    done = SimpleNamespace(req=request("done", 5), kv_receiver=None)
    warm_up = SimpleNamespace(req=request("warm-up", 0), kv_receiver=SimpleNamespace())
    queue.queue = [receiving("a", 1, "10.0.0.1:8998"), warm_up]
    queue.transfer_queue.queue = [done, receiving("b", 2, "10.0.0.1:8998"), receiving("c", 3, "other:1")]
    look = look_at(PrefillServers(queue))
    assert look.waiting_for("10.0.0.1:8998") == [WaitingRequest("a", 1), WaitingRequest("b", 2)]
    assert look.waiting_for("other:1") == [WaitingRequest("c", 3)]


def test_a_look_stays_short_with_very_many_requests() -> None:
    queue = decode_queue()
    queue.queue = [receiving(str(number), number, "x:1") for number in range(MOST_REQUESTS * 3)]
    assert len(look_at(PrefillServers(queue)).waiting_for("x:1")) == MOST_REQUESTS


def test_a_queue_is_not_kept_alive() -> None:
    queue = decode_queue()
    view = PrefillServers(queue)
    del queue
    gc.collect()
    assert view.look() is None


def test_a_backend_without_peers_has_none() -> None:
    queue = decode_queue()
    queue.kv_manager = SimpleNamespace()
    assert look_at(PrefillServers(queue)).peers == {}


def test_a_queue_is_watched_from_its_creation(listener: Listener) -> None:
    queue = decode_queue()
    watch_prefill_servers(queue)
    watch = current_watch()
    assert watch is not None
    watch.stop()


def test_a_hook_that_cannot_watch_does_not_stop_the_server(
    listener: Listener, caplog: pytest.LogCaptureFixture
) -> None:
    watch_prefill_servers(None)
    assert "watch_prefill_servers failed" in caplog.text
