from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang_crashkit.model.peers import PeerProcess, WaitingRequest
from sglang_crashkit.srt.disaggregation.prefill import DecodeServers
from unit.srt.disaggregation.tables import known_to, prefill_queue, rank, request, sending, waiting_in


def test_prefill_knows_each_decode_rank_that_registered() -> None:
    queue = prefill_queue()
    assert known_to(DecodeServers(queue)).peers == {
        "10.0.0.2:41": {PeerProcess(0, "10.0.0.2", 41)},
        "[fd00::2]:42": {PeerProcess(0, "fd00::2", 42)},
    }


@pytest.mark.parametrize("name", ["dst_tp_rank", "decode_tp_rank"])
def test_prefill_knows_ranks_as_its_backend_calls_them(name: str) -> None:
    queue = prefill_queue()
    info = rank("10.0.0.2", 43)
    setattr(info, name, 5)
    queue.kv_manager.decode_kv_args_table = {"s3": info}
    assert known_to(DecodeServers(queue)).peers == {"10.0.0.2:43": {PeerProcess(5, "10.0.0.2", 43)}}


def test_prefill_knows_whom_each_request_waits_for_at_each_stage() -> None:
    queue = prefill_queue()
    warm_up = request("warm-up", 0, disagg_kv_sender=SimpleNamespace())
    queue.queue = [sending("nobody asked", 9), warm_up, sending("just asked", 1)]
    queue.scheduler.waiting_queue = [sending("both", 2)]
    queue.scheduler.disagg_prefill_inflight_queue = [sending("on its way", 1)]
    assert waiting_in(DecodeServers(queue)) == {
        "10.0.0.2:41": [WaitingRequest("just asked", 1), WaitingRequest("both", 2), WaitingRequest("on its way", 1)],
        "[fd00::2]:42": [WaitingRequest("both", 2)],
        None: [WaitingRequest("nobody asked", 9)],
    }
    assert known_to(DecodeServers(queue)).failed == frozenset()


def test_prefill_knows_whom_sglang_gave_up() -> None:
    queue = prefill_queue(failed_sessions={"s2", "never registered"})
    assert known_to(DecodeServers(queue)).failed == {"[fd00::2]:42"}


def test_ranks_that_move_or_fail_are_seen() -> None:
    queue = prefill_queue(failed_sessions=set())
    view = DecodeServers(queue)
    first = known_to(view)
    assert known_to(view) is first
    queue.kv_manager.decode_kv_args_table["s1"] = rank("10.0.0.2", 49)
    assert known_to(view).peers.keys() == {"10.0.0.2:49", "[fd00::2]:42"}
    queue.kv_manager.failed_sessions.add("s1")
    assert known_to(view).failed == {"10.0.0.2:49"}
    queue.kv_manager.failed_sessions.clear()
    assert known_to(view).failed == set()
