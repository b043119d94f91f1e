"""Hook of ``sglang/srt/disaggregation/decode.py``: SGLang's heartbeat gives a prefill server up.

All transfer backends share the heartbeat, or have the same one; which of them have one depends on the release.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from itertools import chain
from typing import Any

from sglang_crashkit.srt.disaggregation.lost_peers import MAX_REQUESTS, LostPeers
from sglang_crashkit.srt.hooks import before, never_raises


@never_raises
def watch_prefill_servers(queue: Any) -> None:
    """Report each prefill server that the ``kv_manager`` of a ``DecodePreallocQueue`` gives up.

    ``_handle_node_failure`` ends the wait of its requests, so they are taken before.
    """
    manager, its_queue, lost = queue.kv_manager, weakref.ref(queue), LostPeers("prefill")

    def note(failed_bootstrap_addr: str) -> None:
        if lost.is_news(failed_bootstrap_addr):
            interval, failures = (getattr(manager, name, "?") for name in ("heartbeat_interval", "max_failures"))
            reason = f"{failures} heartbeats in a row failed, one every {interval} s"
            lost.report(failed_bootstrap_addr, "heartbeat", reason, _waiting(its_queue(), failed_bootstrap_addr))

    if hasattr(manager, "_handle_node_failure"):
        manager._handle_node_failure = before(manager._handle_node_failure, note)


def _waiting(queue: Any, address: str) -> Iterator[tuple[Any, Any]]:
    """Yield each request whose KV cache has not come from `address`, with its receiver; a warm-up has no address."""
    if queue is not None:
        for entry in chain(queue.queue[:MAX_REQUESTS], queue.transfer_queue.queue[:MAX_REQUESTS]):
            if getattr(entry.kv_receiver, "bootstrap_addr", None) == address:
                yield entry.req, entry.kv_receiver
