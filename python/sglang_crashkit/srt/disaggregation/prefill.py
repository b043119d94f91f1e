"""Hook of ``sglang/srt/disaggregation/prefill.py``: a KV transfer to a decode server fails.

A prefill server has no heartbeat: of a decode server that is gone it learns at the next transfer to it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from itertools import chain
from typing import Any

from sglang_crashkit.srt.disaggregation.lost_peers import MAX_REQUESTS, LostPeers
from sglang_crashkit.srt.hooks import before, never_raises

#: ``KVPoll.Failed``.
_FAILED = 0
#: How SGLang's reasons begin for a request that fails without a transfer that failed.
_NO_TRANSFER = ("Aborted", "Duplicate", "Request ", "follow_bootstrap_room")


@never_raises
def watch_decode_servers(queue: Any) -> None:
    """Report each decode server to which the ``kv_manager`` of a ``PrefillBootstrapQueue`` cannot send.

    Whatever fails a request goes through ``update_status``, with the reason already in ``failure_records``.
    """
    manager, its_queue, lost = queue.kv_manager, weakref.ref(queue), LostPeers("decode")

    def note(bootstrap_room: int, status: int) -> None:
        if status == _FAILED:
            reason = str(getattr(manager, "failure_records", {}).get(bootstrap_room, ""))
            for host, port in _unreachable(manager, bootstrap_room, reason):
                address = f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"
                if lost.is_news(address):
                    lost.report(address, "failed_transfer", reason, _waiting(its_queue(), manager, (host, port)))

    if hasattr(manager, "update_status"):
        manager.update_status = before(manager.update_status, note)


def _unreachable(manager: Any, room: int, reason: str) -> set[tuple[str, int]]:
    """Return host and port of the decode ranks that a request's KV cache could not be sent to."""
    asked = dict(getattr(manager, "transfer_infos", {}).get(room, ()))
    given_up = getattr(manager, "failed_sessions", None)
    if given_up is None:
        # Only Mooncake notes which one it was; the others have the request's.
        given_up = () if reason.startswith(_NO_TRANSFER) else asked
    return {(info.endpoint, info.dst_port) for session, info in asked.items() if session in given_up}


def _waiting(queue: Any, manager: Any, rank: tuple[str, int]) -> Iterator[tuple[Any, Any]]:
    """Yield each request that a decode rank asked for, from then until its KV cache is sent, with its sender."""
    if queue is not None:
        scheduler = queue.scheduler
        stages = (getattr(scheduler, name, []) for name in ("waiting_queue", "disagg_prefill_inflight_queue"))
        for request in chain(queue.queue[:MAX_REQUESTS], *(stage[:MAX_REQUESTS] for stage in stages)):
            asked = manager.transfer_infos.get(request.bootstrap_room)
            if asked and rank in [(info.endpoint, info.dst_port) for info in list(asked.values())]:
                yield request, request.disagg_kv_sender
