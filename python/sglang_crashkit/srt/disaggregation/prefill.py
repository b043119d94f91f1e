"""Hook of ``sglang/srt/disaggregation/prefill.py``: a prefill scheduler watches the decode servers it has heard of.

A decode rank registers with a prefill rank by a message, and asks for each request by another; both say where it
listens. That is so with every transfer backend.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from sglang_crashkit.core.peers import Role, WaitingRequest
from sglang_crashkit.srt.disaggregation.peer_watch import replace_watch
from sglang_crashkit.srt.disaggregation.view import MOST_REQUESTS, Endpoint, Look, QueueView, name_of
from sglang_crashkit.srt.hooks import never_raises


@never_raises
def watch_decode_servers(queue: Any) -> None:
    """Watch the decode servers from now on.

    Args:
        queue: SGLang's ``PrefillBootstrapQueue``, once it has its ``kv_manager``.
    """
    replace_watch(DecodeServers(queue))


class DecodeServers(QueueView):
    """The decode servers as a prefill scheduler knows them: each rank that registered, by its address.

    Args:
        queue: SGLang's ``PrefillBootstrapQueue``; it is not kept alive.
    """

    role: Role = "decode"

    def look_at(self, queue: Any) -> Look:
        """See `QueueView.look_at`."""
        manager = queue.kv_manager
        # Copied in one step each: SGLang's own threads add to them.
        registered = dict(getattr(manager, "decode_kv_args_table", {}))
        asked = dict(getattr(manager, "transfer_infos", {}))
        # Only the backends that send into memory of the other side keep such a table.
        failed = set(getattr(manager, "failed_sessions", ()))
        peers: dict[str, frozenset[Endpoint]] = {}
        waiting: dict[str | None, list[WaitingRequest]] = defaultdict(list)
        for info in registered.values():
            endpoint = _endpoint_of(info)
            peers[name_of(endpoint)] = frozenset({endpoint})
        for request in _requests(queue):
            infos = list(asked.get(request.bootstrap_room, {}).values())
            who = WaitingRequest(str(request.rid), request.bootstrap_room)
            for endpoint in map(_endpoint_of, infos):
                peers[name_of(endpoint)] = frozenset({endpoint})
                waiting[name_of(endpoint)].append(who)
            if not infos:
                waiting[None].append(who)
        gone = [_endpoint_of(info) for session, info in registered.items() if session in failed]
        return Look(peers, waiting, frozenset(map(name_of, gone)))


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
    return itertools.islice(real, MOST_REQUESTS)


def _endpoint_of(info: Any) -> Endpoint:
    """Return where a decode rank listens, from its ``KVArgsRegisterInfo`` or ``TransferInfo``."""
    return str(info.endpoint), int(info.dst_port)
