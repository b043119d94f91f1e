"""Hooks of ``decode.py`` and ``prefill.py`` in ``sglang/srt/disaggregation``: SGLang gives up a peer server.

A decode server checks prefill servers by a heartbeat. A prefill server learns at the next KV transfer that a decode
server is gone. The kit wraps the methods of SGLang's ``kv_manager`` that are called then, and sends the peers nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

import msgspec

from sglang_crashkit.model.incident import iso_time
from sglang_crashkit.model.peers import MAX_NAMED, LostPeer, Role, Sign
from sglang_crashkit.srt.hooks import Lately, before, never_raises, notify

#: The maximum number of requests that are read in one of SGLang's queues, to limit the time.
_MAX_REQUESTS = 1024
#: A peer is reported once in this time, in seconds: the hook is called for each request that fails with the peer.
AGAIN_SECS = 60.0
#: The maximum number of peers that are reported in that time.
MAX_PEERS = 256
#: ``KVPoll.Failed``.
_FAILED = 0
#: How SGLang's reason begins if a request fails although no transfer failed.
_NO_TRANSFER = ("Aborted", "Duplicate", "Request ", "follow_bootstrap_room")


@never_raises
def watch_prefill_servers(queue: Any) -> None:
    """Report each prefill server that the heartbeat of a ``DecodePreallocQueue`` gives up, before its requests fail."""
    manager, lately = queue.kv_manager, Lately(AGAIN_SECS, MAX_PEERS)

    def note(failed_bootstrap_addr: str) -> None:
        if lately.is_news(failed_bootstrap_addr):
            interval, failures = (getattr(manager, name, "?") for name in ("heartbeat_interval", "max_failures"))
            reason = f"{failures} heartbeats in a row failed, one every {interval} s"
            # The requests whose KV cache has not arrived from it; a warm-up request has no address.
            entries = chain(queue.queue[:_MAX_REQUESTS], queue.transfer_queue.queue[:_MAX_REQUESTS])
            pairs = ((entry.req, entry.kv_receiver) for entry in entries)
            waiting = (pair for pair in pairs if getattr(pair[1], "bootstrap_addr", None) == failed_bootstrap_addr)
            _report("prefill", "heartbeat", failed_bootstrap_addr, reason, waiting)

    if hasattr(manager, "_handle_node_failure"):
        manager._handle_node_failure = before(manager._handle_node_failure, note)


@never_raises
def watch_decode_servers(queue: Any) -> None:
    """Report each decode server to which a ``PrefillBootstrapQueue`` cannot send, according to ``update_status``."""
    manager, lately = queue.kv_manager, Lately(AGAIN_SECS, MAX_PEERS)

    def note(bootstrap_room: int, status: int) -> None:
        if status != _FAILED:
            return
        reason = str(getattr(manager, "failure_records", {}).get(bootstrap_room, ""))
        asked = dict(getattr(manager, "transfer_infos", {}).get(bootstrap_room, ()))
        given_up = getattr(manager, "failed_sessions", None)
        if given_up is None:
            # Only Mooncake records which decode rank it could not send to. For others, take all ranks of the request.
            given_up = () if reason.startswith(_NO_TRANSFER) else asked
        for host, port in {(info.endpoint, info.dst_port) for session, info in asked.items() if session in given_up}:
            address = f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"
            if lately.is_news(address):
                _report("decode", "failed_transfer", address, reason, _waiting_for_decode(queue, (host, port)))

    if hasattr(manager, "update_status"):
        manager.update_status = before(manager.update_status, note)


def _report(role: Role, sign: Sign, address: str, reason: str, waiting: Iterator[tuple[Any, Any]]) -> None:
    """Report a peer with the requests that wait for it; `waiting` pairs each with SGLang's sender or receiver."""
    requests = []
    for request, connection in islice(waiting, MAX_NAMED):
        began = getattr(connection, "init_time", None)
        since = iso_time(began) if isinstance(began, float) else ""
        requests.append({"rid": request.rid, "room": request.bootstrap_room, "since": since})
    count = len(requests) + sum(1 for _each in waiting)
    told = {"role": role, "sign": sign, "address": address, "since": iso_time(time.time()), "reason": reason}
    lost = LostPeer.from_fields(told | {"requests": requests, "count": count}, os.getpid())
    if lost is not None:
        notify("peer_lost", **msgspec.to_builtins(lost))


def _waiting_for_decode(queue: Any, rank: tuple[str, int]) -> Iterator[tuple[Any, Any]]:
    """Yield each request that a decode rank asked for and whose KV cache is not sent yet, with its sender."""
    stages = (getattr(queue.scheduler, name, []) for name in ("waiting_queue", "disagg_prefill_inflight_queue"))
    for request in chain(queue.queue[:_MAX_REQUESTS], *(stage[:_MAX_REQUESTS] for stage in stages)):
        asked = queue.kv_manager.transfer_infos.get(request.bootstrap_room)
        if asked and rank in [(info.endpoint, info.dst_port) for info in list(asked.values())]:
            yield request, request.disagg_kv_sender
