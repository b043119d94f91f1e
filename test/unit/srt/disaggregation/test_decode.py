from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest

from sglang_crashkit.model.peers import PeerProcess, WaitingRequest
from sglang_crashkit.srt.disaggregation import peer_answers
from sglang_crashkit.srt.disaggregation.decode import PrefillServers, watch_prefill_servers
from sglang_crashkit.srt.disaggregation.peer_answers import MAX_REQUESTS
from unit.srt.conftest import Listener
from unit.srt.disaggregation.tables import decode_queue, known_to, receiving, request, waiting_in


def test_decode_knows_the_ranks_of_each_prefill_server() -> None:
    queue = decode_queue()
    assert known_to(PrefillServers(queue)).peers == {
        "10.0.0.1:8998": {PeerProcess(0, "10.0.0.1", 51), PeerProcess(0, "10.0.0.9", 52)}
    }
    assert "other" not in queue.kv_manager.addr_to_rooms_tracker


def test_decode_knows_whom_each_request_waits_for() -> None:
    queue = decode_queue()
    done = SimpleNamespace(req=request("done", 5), kv_receiver=None)
    warm_up = SimpleNamespace(req=request("warm-up", 0), kv_receiver=SimpleNamespace())
    queue.queue = [receiving("a", 1, "10.0.0.1:8998"), warm_up]
    queue.transfer_queue.queue = [done, receiving("b", 2, "10.0.0.1:8998"), receiving("c", 3, "other:1")]
    assert waiting_in(PrefillServers(queue)) == {
        "10.0.0.1:8998": [WaitingRequest("a", 1), WaitingRequest("b", 2)],
        "other:1": [WaitingRequest("c", 3)],
    }


def test_a_look_stays_short_with_very_many_requests() -> None:
    queue = decode_queue()
    queue.queue = [receiving(str(number), number, "x:1") for number in range(MAX_REQUESTS * 3)]
    assert len(waiting_in(PrefillServers(queue))["x:1"]) == MAX_REQUESTS


def test_a_queue_is_not_kept_alive() -> None:
    queue = decode_queue()
    view = PrefillServers(queue)
    del queue
    gc.collect()
    assert (view.known(), view.waiting()) == (None, None)


def test_a_backend_without_peers_has_none() -> None:
    queue = decode_queue()
    queue.kv_manager = SimpleNamespace()
    assert known_to(PrefillServers(queue)).peers == {}


def test_a_queue_is_watched_from_its_creation(listener: Listener) -> None:
    queue = decode_queue()
    watch_prefill_servers(queue)
    heard = listener.heard()
    assert (heard["event"], heard["role"], heard["lead"], heard["has_descriptor"]) == ("pair", "prefill", True, True)
    answers = peer_answers.current()
    answers.stop()


def test_a_hook_that_cannot_watch_does_not_stop_the_server(
    listener: Listener, caplog: pytest.LogCaptureFixture
) -> None:
    watch_prefill_servers(None)
    assert "watch_prefill_servers failed" in caplog.text


@pytest.mark.parametrize("name", ["attn_tp_rank", "attn_cp_rank", "pp_rank"])
def test_the_first_rank_of_a_group_tells_for_all(name: str) -> None:
    queue = decode_queue()
    assert PrefillServers(queue).is_lead
    setattr(queue.kv_manager, name, 1)
    assert not PrefillServers(queue).is_lead


def test_an_ipv6_address_is_taken_from_the_pool_whole() -> None:
    queue = decode_queue()
    queue.kv_manager.connection_pool = {"[fd00::1]:8998_0_0": [{"rank_ip": "fd00::1", "rank_port": 51}]}
    queue.kv_manager.addr_to_rooms_tracker["[fd00::1]:8998"].add(1)
    assert known_to(PrefillServers(queue)).peers == {"[fd00::1]:8998": {PeerProcess(0, "fd00::1", 51)}}
