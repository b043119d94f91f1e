from __future__ import annotations

import pytest

from sglang_crashkit.srt.disaggregation import peer_watch
from sglang_crashkit.srt.disaggregation.common.conn import on_node_failure
from sglang_crashkit.srt.disaggregation.decode import watch_prefill_servers
from sglang_crashkit.srt.disaggregation.peer_watch import current_watch
from unit.srt.conftest import Listener
from unit.srt.disaggregation.tables import Queue, decode_queue, receiving


class Manager:
    """What the hook sees of SGLang's ``CommonKVManager``."""

    def __init__(self, queue: Queue) -> None:
        self.queue = queue

    @on_node_failure
    def _handle_node_failure(self, failed_bootstrap_addr: str) -> str:
        """Forget it."""
        self.queue.queue.clear()
        return f"{failed_bootstrap_addr} failed"


def test_the_heartbeat_tells_before_the_waiting_requests_are_gone(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_watch, "_LOOK_SECS", 0.05)
    queue = decode_queue()
    queue.kv_manager.connection_pool = {}
    queue.queue = [receiving("a", 1, "10.0.0.1:8998")]
    watch_prefill_servers(queue)
    assert Manager(queue)._handle_node_failure("10.0.0.1:8998") == "10.0.0.1:8998 failed"
    heard = listener.heard()
    assert (heard["sign"], heard["address"]) == ("heartbeat", "10.0.0.1:8998")
    assert heard["requests"] == [{"rid": "a", "room": 1}]
    watch = current_watch()
    assert watch is not None
    watch.stop()


def test_without_a_watch_the_heartbeat_does_what_it_did() -> None:
    assert Manager(decode_queue())._handle_node_failure("x") == "x failed"
    assert Manager._handle_node_failure.__doc__ == "Forget it."
