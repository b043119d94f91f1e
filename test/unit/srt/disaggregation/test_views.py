"""What a scheduler of a pair knows of its peers, from tables and queues that look as SGLang's do."""

from __future__ import annotations

import gc
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_crashkit.model.peers import PeerProcess, WaitingRequest
from sglang_crashkit.srt.disaggregation import peer_answers
from sglang_crashkit.srt.disaggregation.common.conn import on_node_failure
from sglang_crashkit.srt.disaggregation.decode import PrefillServers, watch_prefill_servers
from sglang_crashkit.srt.disaggregation.peer_answers import MAX_REQUESTS
from sglang_crashkit.srt.disaggregation.prefill import DecodeServers, watch_decode_servers
from sglang_crashkit.srt.hooks import notify
from unit.srt.conftest import Listener

View = type[PrefillServers] | type[DecodeServers]


class Queue(SimpleNamespace):
    """SGLang's queues are classes of their own, which weak references need."""


def request(rid: str, room: int | None, **more: Any) -> Any:
    return SimpleNamespace(rid=rid, bootstrap_room=room, **more)


def sending(rid: str, room: int | None) -> Any:
    return request(rid, room, disagg_kv_sender=SimpleNamespace(bootstrap_server_url="prefill:8998"))


def receiving(rid: str, room: int, address: str) -> Any:
    return SimpleNamespace(req=request(rid, room), kv_receiver=SimpleNamespace(bootstrap_addr=address))


def rank(host: str, port: int) -> Any:
    return SimpleNamespace(endpoint=host, dst_port=port)


def prefill_queue(**tables: Any) -> Queue:
    manager = SimpleNamespace(
        decode_kv_args_table={"s1": rank("10.0.0.2", 41), "s2": rank("fd00::2", 42)},
        transfer_infos={1: {"s1": rank("10.0.0.2", 41)}, 2: {"s1": rank("10.0.0.2", 41), "s2": rank("fd00::2", 42)}},
        **tables,
    )
    scheduler = SimpleNamespace(waiting_queue=[], disagg_prefill_inflight_queue=[])
    return Queue(queue=[], kv_manager=manager, scheduler=scheduler)


def decode_queue() -> Queue:
    manager = SimpleNamespace(
        # 0.5.9 has two numbers behind the address, later releases have three.
        connection_pool={
            "10.0.0.1:8998_0_0": [{"rank_ip": "10.0.0.1", "rank_port": 51, "is_dummy": False}],
            "10.0.0.1:8998_1_0_0": [{"rank_ip": "10.0.0.9", "rank_port": "52", "is_dummy": True}],
            "10.0.0.1:89981_0_0": [{"rank_ip": "10.0.0.7", "rank_port": 53}],
        },
        addr_to_rooms_tracker=defaultdict(set, {"10.0.0.1:8998": {1}, "named only:1": {2}}),
    )
    return Queue(queue=[], kv_manager=manager, transfer_queue=SimpleNamespace(queue=[]), scheduler=None)


# -- a decode server's


def test_decode_knows_the_ranks_of_each_prefill_server() -> None:
    queue = decode_queue()
    assert PrefillServers(queue).known().peers == {
        "10.0.0.1:8998": {PeerProcess(0, "10.0.0.1", 51), PeerProcess(0, "10.0.0.9", 52)}
    }
    assert "other" not in queue.kv_manager.addr_to_rooms_tracker


def test_decode_knows_whom_each_request_waits_for() -> None:
    queue = decode_queue()
    done = SimpleNamespace(req=request("done", 5), kv_receiver=None)
    warm_up = SimpleNamespace(req=request("warm-up", 0), kv_receiver=SimpleNamespace())
    queue.queue = [receiving("a", 1, "10.0.0.1:8998"), warm_up]
    queue.transfer_queue.queue = [done, receiving("b", 2, "10.0.0.1:8998"), receiving("c", 3, "other:1")]
    assert PrefillServers(queue).waiting() == {
        "10.0.0.1:8998": [WaitingRequest("a", 1), WaitingRequest("b", 2)],
        "other:1": [WaitingRequest("c", 3)],
    }


def test_an_ipv6_address_is_taken_from_the_pool_whole() -> None:
    queue = decode_queue()
    queue.kv_manager.connection_pool = {"[fd00::1]:8998_0_0": [{"rank_ip": "fd00::1", "rank_port": 51}]}
    queue.kv_manager.addr_to_rooms_tracker["[fd00::1]:8998"].add(1)
    assert PrefillServers(queue).known().peers == {"[fd00::1]:8998": {PeerProcess(0, "fd00::1", 51)}}


class Manager:
    """What the hook sees of SGLang's ``CommonKVManager``."""

    def __init__(self, queue: Queue) -> None:
        self.queue = queue

    @on_node_failure
    def _handle_node_failure(self, failed_bootstrap_addr: str) -> str:
        """Forget it."""
        self.queue.queue.clear()
        return f"{failed_bootstrap_addr} failed"


@pytest.mark.parametrize("is_lead", [True, False])
def test_the_lead_tells_before_waiting_requests_are_gone(listener: Listener, is_lead: bool) -> None:
    queue = decode_queue()
    queue.kv_manager.connection_pool = {}
    queue.queue = [receiving("a", 1, "10.0.0.1:8998")]
    queue.kv_manager.attn_tp_rank = 0 if is_lead else 1
    watch_prefill_servers(queue)
    assert listener.heard()["event"] == "pair"
    assert Manager(queue)._handle_node_failure("10.0.0.1:8998") == "10.0.0.1:8998 failed"
    notify("marker")
    heard = listener.heard()
    if is_lead:
        assert (heard["sign"], heard["address"]) == ("heartbeat", "10.0.0.1:8998")
        assert heard["requests"] == [{"rid": "a", "room": 1}]
    else:
        assert heard["event"] == "marker"
    peer_answers.current().stop()


def test_without_a_watch_the_heartbeat_does_what_it_did() -> None:
    assert Manager(decode_queue())._handle_node_failure("x") == "x failed"
    assert Manager._handle_node_failure.__doc__ == "Forget it."


# -- a prefill server's


def test_prefill_knows_each_decode_rank_that_registered() -> None:
    assert DecodeServers(prefill_queue()).known().peers == {
        "10.0.0.2:41": {PeerProcess(0, "10.0.0.2", 41)},
        "[fd00::2]:42": {PeerProcess(0, "fd00::2", 42)},
    }


@pytest.mark.parametrize("name", ["dst_tp_rank", "decode_tp_rank"])
def test_prefill_knows_ranks_as_its_backend_calls_them(name: str) -> None:
    queue = prefill_queue()
    info = rank("10.0.0.2", 43)
    setattr(info, name, 5)
    queue.kv_manager.decode_kv_args_table = {"s3": info}
    assert DecodeServers(queue).known().peers == {"10.0.0.2:43": {PeerProcess(5, "10.0.0.2", 43)}}


def test_prefill_knows_whom_each_request_waits_for_at_each_stage() -> None:
    queue = prefill_queue()
    warm_up = request("warm-up", 0, disagg_kv_sender=SimpleNamespace())
    queue.queue = [sending("nobody asked", 9), warm_up, sending("just asked", 1)]
    queue.scheduler.waiting_queue = [sending("both", 2)]
    queue.scheduler.disagg_prefill_inflight_queue = [sending("on its way", 1)]
    assert DecodeServers(queue).waiting() == {
        "10.0.0.2:41": [WaitingRequest("just asked", 1), WaitingRequest("both", 2), WaitingRequest("on its way", 1)],
        "[fd00::2]:42": [WaitingRequest("both", 2)],
        None: [WaitingRequest("nobody asked", 9)],
    }
    assert DecodeServers(queue).known().failed == frozenset()


def test_ranks_that_move_or_fail_are_seen() -> None:
    queue = prefill_queue(failed_sessions={"s2", "never registered"})
    view = DecodeServers(queue)
    first = view.known()
    assert first.failed == {"[fd00::2]:42"}
    assert view.known() is first
    queue.kv_manager.decode_kv_args_table["s1"] = rank("10.0.0.2", 49)
    assert view.known().peers.keys() == {"10.0.0.2:49", "[fd00::2]:42"}
    queue.kv_manager.failed_sessions.add("s1")
    assert view.known().failed == {"10.0.0.2:49", "[fd00::2]:42"}
    queue.kv_manager.failed_sessions.clear()
    assert view.known().failed == set()


# -- of both


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
    assert len(view(queue).waiting()["x:1" if view is PrefillServers else None]) == MAX_REQUESTS


def test_a_queue_is_not_kept_alive() -> None:
    views = PrefillServers(decode_queue()), DecodeServers(prefill_queue())
    gc.collect()
    assert [(view.known(), view.waiting()) for view in views] == [(None, None)] * 2


def test_a_backend_without_peers_has_none(view: View, queue: Queue) -> None:
    queue.kv_manager = SimpleNamespace()
    assert view(queue).known().peers == {}


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
