"""Tables and queues that look as SGLang's do."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

from sglang_crashkit.model.peer_report import KnownPeers
from sglang_crashkit.srt.disaggregation.peer_answers import PeerView, Waiting


class Queue(SimpleNamespace):
    """SGLang's queues are classes of their own, which weak references need."""


def request(rid: str, room: int | None, **more: Any) -> Any:
    return SimpleNamespace(rid=rid, bootstrap_room=room, **more)


def sending(rid: str, room: int | None) -> Any:
    return request(rid, room, disagg_kv_sender=SimpleNamespace(bootstrap_server_url="prefill:8998"))


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


def receiving(rid: str, room: int, address: str) -> Any:
    return SimpleNamespace(req=request(rid, room), kv_receiver=SimpleNamespace(bootstrap_addr=address))


def known_to(view: PeerView) -> KnownPeers:
    known = view.known()
    assert known is not None
    return known


def waiting_in(view: PeerView) -> Waiting:
    waiting = view.waiting()
    assert waiting is not None
    return waiting
