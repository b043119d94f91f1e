"""What SGLang's queues of a pair report of the other server: on stand-ins for what upstream's releases have."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_crashkit.srt.disaggregation import lost_peers
from sglang_crashkit.srt.disaggregation.lost_peers import watch_decode_servers, watch_prefill_servers
from unit.srt.conftest import Listener

FAILED, TRANSFERRING = 0, 3
SENT_AT, SENT = 1_790_000_000.5, "2026-09-21T14:13:20.500000Z"
PREFILL, DECODE = "10.0.0.1:8998", "10.0.0.2:41"
SEND = "Failed to send kv chunk of 1 to 10.0.0.2:41"


class Manager(SimpleNamespace):
    """SGLang's ``CommonKVManager``, as far as the hooks see it."""

    def _handle_node_failure(self, failed_bootstrap_addr: str) -> str:
        """Forget it."""
        self.queue.queue.clear()
        return f"{failed_bootstrap_addr} failed"

    def update_status(self, bootstrap_room: int, status: int) -> None:
        self.statuses[bootstrap_room] = status


def request(rid: str, room: int, **more: Any) -> Any:
    return SimpleNamespace(rid=rid, bootstrap_room=room, **more)


def sending(rid: str, room: int) -> Any:
    return request(rid, room, disagg_kv_sender=SimpleNamespace(init_time=SENT_AT))


def receiving(rid: str, room: int, address: str = PREFILL) -> Any:
    receiver = SimpleNamespace(bootstrap_addr=address, init_time=None)
    return SimpleNamespace(req=request(rid, room), kv_receiver=receiver)


def rank(host: str = "10.0.0.2", port: int = 41) -> Any:
    return SimpleNamespace(endpoint=host, dst_port=port)


def decode_queue() -> SimpleNamespace:
    queue = SimpleNamespace(queue=[], transfer_queue=SimpleNamespace(queue=[]))
    queue.kv_manager = Manager(heartbeat_interval=5.0, max_failures=2, queue=queue)
    watch_prefill_servers(queue)
    return queue


def prefill_queue(**tables: Any) -> SimpleNamespace:
    infos = {1: {"s1": rank()}, 2: {"s1": rank(), "s2": rank("fd00::2", 42)}}
    manager = Manager(transfer_infos=infos, failure_records={}, statuses={}, **tables)
    scheduler = SimpleNamespace(waiting_queue=[], disagg_prefill_inflight_queue=[])
    queue = SimpleNamespace(queue=[], kv_manager=manager, scheduler=scheduler)
    watch_decode_servers(queue)
    return queue


def fail(queue: SimpleNamespace, room: int, reason: str) -> None:
    queue.kv_manager.failure_records[room] = reason
    queue.kv_manager.update_status(room, FAILED)


def rids(message: dict[str, Any]) -> list[str]:
    return [each["rid"] for each in message["requests"]]


def test_the_heartbeat_tells_who_waited_before_their_wait_is_ended(listener: Listener) -> None:
    queue = decode_queue()
    done = SimpleNamespace(req=request("done", 5), kv_receiver=None)
    warm_up = SimpleNamespace(req=request("warm-up", 0), kv_receiver=SimpleNamespace())
    queue.queue = [receiving("a", 1), warm_up]
    queue.transfer_queue.queue = [done, receiving("b", 2), receiving("c", 3, "other:1")]
    assert queue.kv_manager._handle_node_failure(PREFILL) == f"{PREFILL} failed"
    assert queue.kv_manager._handle_node_failure.__doc__ == "Forget it."
    assert not queue.queue
    (message,) = listener.heard_so_far()
    assert message["requests"] == [{"rid": "a", "room": 1, "since": ""}, {"rid": "b", "room": 2, "since": ""}]
    assert (message["event"], message["address"], message["role"]) == ("peer_lost", PREFILL, "prefill")
    assert (message["sign"], message["count"]) == ("heartbeat", 2)
    assert message["reason"] == "2 heartbeats in a row failed, one every 5.0 s"


def test_a_failed_transfer_tells_who_waits_at_each_stage(listener: Listener) -> None:
    queue = prefill_queue(failed_sessions={"s1"})
    queue.queue = [sending("no one asked", 9), sending("just asked", 1)]
    queue.scheduler.waiting_queue = [sending("both", 2)]
    queue.scheduler.disagg_prefill_inflight_queue = [sending("on its way", 1)]
    queue.kv_manager.update_status(1, TRANSFERRING)
    fail(queue, 1, SEND)
    assert queue.kv_manager.statuses == {1: FAILED}
    (message,) = listener.heard_so_far()
    assert message["requests"][0] == {"rid": "just asked", "room": 1, "since": SENT}
    assert rids(message) == ["just asked", "both", "on its way"]
    assert (message["role"], message["sign"]) == ("decode", "failed_transfer")
    assert (message["address"], message["reason"]) == (DECODE, SEND)


@pytest.mark.parametrize(
    ("tables", "room", "reason", "addresses"),
    [
        # Mooncake notes the sessions that it gave up; an address of IPv6 is put in brackets.
        ({"failed_sessions": {"s2"}}, 2, SEND, {"[fd00::2]:42"}),
        ({"failed_sessions": set()}, 2, SEND, set()),
        # NIXL and Mori do not.
        ({}, 2, "NIXL transfer encountered ERR room=2", {DECODE, "[fd00::2]:42"}),
        ({}, 3, "no one asked for it", set()),
        *[
            ({}, 1, reason, set())
            for reason in (
                "Aborted by AbortReq.",
                "Aborted by decode-side abort notification.",
                "Duplicate or cancelled bootstrap room",
                "Request 1 timed out after 300.0s in KVPoll.Bootstrapping",
                "follow_bootstrap_room conflict: dispatched to dp_rank 1",
            )
        ],
    ],
)
def test_only_a_failed_transfer_is_a_loss(
    listener: Listener, tables: dict[str, Any], room: int, reason: str, addresses: set[str]
) -> None:
    fail(prefill_queue(**tables), room, reason)
    assert {message["address"] for message in listener.heard_so_far()} == addresses


@pytest.mark.parametrize("again_secs", [60.0, 0.0])
def test_all_requests_that_fail_with_a_peer_are_one_report(
    listener: Listener, monkeypatch: pytest.MonkeyPatch, again_secs: float
) -> None:
    monkeypatch.setattr(lost_peers, "AGAIN_SECS", again_secs)
    queue = prefill_queue(failed_sessions={"s1"})
    threads = [threading.Thread(target=fail, args=(queue, 1, SEND)) for _each in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(listener.heard_so_far()) == (1 if again_secs else 8)


def test_more_and_more_peers_are_reported_no_more(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lost_peers, "MAX_PEERS", 3)
    queue = decode_queue()
    for number in range(9):
        queue.kv_manager._handle_node_failure(f"h{number}:1")
    assert [message["address"] for message in listener.heard_so_far()] == ["h0:1", "h1:1", "h2:1"]


@pytest.mark.wide
@pytest.mark.usefixtures("listener")
def test_a_look_stays_short_with_very_many_requests() -> None:
    many = range(100_000)
    decode, prefill = decode_queue(), prefill_queue(failed_sessions={"s1"})
    waiting = [receiving(f"r{number}", number) for number in many]
    decode.queue, decode.transfer_queue.queue = list(waiting), waiting
    prefill.queue = prefill.scheduler.waiting_queue = [sending(f"r{number}", 1) for number in many]
    for act in (lambda: decode.kv_manager._handle_node_failure(PREFILL), lambda: fail(prefill, 1, SEND)):
        began = time.thread_time()
        act()
        assert time.thread_time() - began < 0.05


@pytest.mark.parametrize("watch", [watch_prefill_servers, watch_decode_servers])
def test_a_backend_without_peers_is_left_alone(watch: Any, caplog: pytest.LogCaptureFixture) -> None:
    manager = SimpleNamespace()
    watch(SimpleNamespace(kv_manager=manager))
    assert (vars(manager), caplog.text) == ({}, "")
    # And what cannot be watched does not stop the server.
    watch(None)
    assert f"{watch.__name__} failed" in caplog.text
