from __future__ import annotations

import pytest

from sglang_crashkit.srt.disaggregation import peer_answers
from sglang_crashkit.srt.disaggregation.common.conn import on_node_failure
from sglang_crashkit.srt.disaggregation.decode import watch_prefill_servers
from sglang_crashkit.srt.hooks import notify
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
    answers = peer_answers.current()
    answers.stop()


def test_without_a_watch_the_heartbeat_does_what_it_did() -> None:
    assert Manager(decode_queue())._handle_node_failure("x") == "x failed"
    assert Manager._handle_node_failure.__doc__ == "Forget it."
