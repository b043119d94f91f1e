from __future__ import annotations

from types import SimpleNamespace

from sglang_crashkit.model.peers import PeerProcess, WaitingRequest
from sglang_crashkit.srt.disaggregation.decode import PrefillServers
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


def test_an_ipv6_address_is_taken_from_the_pool_whole() -> None:
    queue = decode_queue()
    queue.kv_manager.connection_pool = {"[fd00::1]:8998_0_0": [{"rank_ip": "fd00::1", "rank_port": 51}]}
    queue.kv_manager.addr_to_rooms_tracker["[fd00::1]:8998"].add(1)
    assert known_to(PrefillServers(queue)).peers == {"[fd00::1]:8998": {PeerProcess(0, "fd00::1", 51)}}
