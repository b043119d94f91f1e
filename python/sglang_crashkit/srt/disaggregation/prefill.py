"""Hook of ``sglang/srt/disaggregation/prefill.py``: a prefill scheduler tells of the decode servers it has heard of.

A decode rank registers with a prefill rank by a message, and asks for each request by another; both say where it
listens. That is so with every transfer backend.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Set
from typing import Any

from sglang_crashkit.model.peers import KnownPeers, PeerProcess, Role, WaitingRequest
from sglang_crashkit.srt.disaggregation.peer_answers import MAX_REQUESTS, PeerView, Waiting, replace
from sglang_crashkit.srt.hooks import never_raises

#: What the backends call the tensor-parallel rank of a decode rank.
_RANKS = ("dst_tp_rank", "decode_tp_rank")


@never_raises
def watch_decode_servers(queue: Any) -> None:
    """Have the decode servers of a ``PrefillBootstrapQueue`` watched, once it has its ``kv_manager``."""
    replace(DecodeServers(queue))


class DecodeServers(PeerView):
    """The decode servers as a prefill scheduler knows them: each rank that registered, by its address."""

    role: Role = "decode"

    def _tables_of(self, queue: Any) -> tuple[Mapping[str, Any], Set[str]]:
        manager = queue.kv_manager
        # Copied in one step each: SGLang's own threads add to them. Only the backends that send into memory of the
        # other side keep the second one.
        return dict(getattr(manager, "decode_kv_args_table", {})), set(getattr(manager, "failed_sessions", ()))

    def _known_from(self, table: Mapping[str, Any], names: Set[str]) -> KnownPeers:
        processes = {session: _process_of(info) for session, info in table.items()}
        return KnownPeers(
            {process.address: frozenset({process}) for process in processes.values()},
            frozenset(process.address for session, process in processes.items() if session in names),
        )

    def _waiting_in(self, queue: Any) -> Waiting:
        asked = dict(getattr(queue.kv_manager, "transfer_infos", {}))
        waiting: dict[str | None, list[WaitingRequest]] = defaultdict(list)
        for request in _requests(queue):
            # Copied in one step, too.
            infos = list(asked.get(request.bootstrap_room, {}).values())
            who = WaitingRequest(str(request.rid), request.bootstrap_room)
            for address in {_process_of(info).address for info in infos}:
                waiting[address].append(who)
            if not infos:
                waiting[None].append(who)
        return waiting


def _requests(queue: Any) -> Iterable[Any]:
    """Yield the requests from their arrival until their KV cache is sent; a warm-up has no peer and is left out."""
    scheduler = queue.scheduler
    stages = (
        queue.queue,
        getattr(scheduler, "waiting_queue", ()),
        getattr(scheduler, "disagg_prefill_inflight_queue", ()),
    )
    requests = itertools.chain.from_iterable(list(stage) for stage in stages)
    real = (request for request in requests if hasattr(request.disagg_kv_sender, "bootstrap_server_url"))
    return itertools.islice(real, MAX_REQUESTS)


def _process_of(info: Any) -> PeerProcess:
    """Return where a decode rank listens, from its ``KVArgsRegisterInfo`` or ``TransferInfo``."""
    rank = next((getattr(info, name) for name in _RANKS if hasattr(info, name)), 0)
    return PeerProcess(int(rank), str(info.endpoint), int(info.dst_port))
