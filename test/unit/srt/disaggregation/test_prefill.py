from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest

from sglang_crashkit.core.peers import WaitingRequest
from sglang_crashkit.srt.disaggregation.peer_watch import current_watch
from sglang_crashkit.srt.disaggregation.prefill import DecodeServers, watch_decode_servers
from sglang_crashkit.srt.disaggregation.view import MOST_REQUESTS
from unit.srt.conftest import Listener
from unit.srt.disaggregation.tables import look_at, prefill_queue, request, sending


def test_prefill_knows_each_decode_rank_that_registered() -> None:
    queue = prefill_queue()
    assert look_at(DecodeServers(queue)).peers == {
        "10.0.0.2:41": {("10.0.0.2", 41)},
        "[fd00::2]:42": {("fd00::2", 42)},
    }


def test_prefill_knows_whom_each_request_waits_for_at_each_stage() -> None:
    queue = prefill_queue()
    warm_up = request("warm-up", 0, disagg_kv_sender=SimpleNamespace())
    queue.queue = [sending("nobody asked", 9), warm_up, sending("just asked", 1)]
    queue.scheduler.waiting_queue = [sending("both", 2)]
    queue.scheduler.disagg_prefill_inflight_queue = [sending("on its way", 1)]
    look = look_at(DecodeServers(queue))
    assert look.waiting_for("10.0.0.2:41") == [
        WaitingRequest("just asked", 1),
        WaitingRequest("both", 2),
        WaitingRequest("on its way", 1),
    ]
    assert look.waiting_for("[fd00::2]:42") == [WaitingRequest("both", 2)]
    assert look.waiting_for(None) == [WaitingRequest("nobody asked", 9)]
    assert look.failed == frozenset()


def test_prefill_knows_whom_sglang_gave_up() -> None:
    queue = prefill_queue(failed_sessions={"s2", "never registered"})
    assert look_at(DecodeServers(queue)).failed == {"[fd00::2]:42"}


def test_a_look_stays_short_with_very_many_requests() -> None:
    queue = prefill_queue()
    queue.queue = [sending(str(number), number + 100) for number in range(MOST_REQUESTS * 3)]
    assert len(look_at(DecodeServers(queue)).waiting_for(None)) == MOST_REQUESTS


def test_a_queue_is_not_kept_alive() -> None:
    queue = prefill_queue()
    view = DecodeServers(queue)
    del queue
    gc.collect()
    assert view.look() is None


def test_a_backend_without_peers_has_none() -> None:
    queue = prefill_queue()
    queue.kv_manager = SimpleNamespace()
    assert look_at(DecodeServers(queue)).peers == {}


def test_a_queue_is_watched_from_its_creation(listener: Listener) -> None:
    queue = prefill_queue()
    watch_decode_servers(queue)
    watch = current_watch()
    assert watch is not None
    watch.stop()


def test_a_hook_that_cannot_watch_does_not_stop_the_server(
    listener: Listener, caplog: pytest.LogCaptureFixture
) -> None:
    watch_decode_servers(None)
    assert "watch_decode_servers failed" in caplog.text
