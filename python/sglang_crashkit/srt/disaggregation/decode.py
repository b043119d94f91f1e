"""Hook of ``sglang/srt/disaggregation/decode.py``: a decode scheduler watches the prefill servers it works with.

A prefill server is known by its bootstrap address, which each request names; where its ranks listen is asked for there
once and kept in ``connection_pool``. That is so with every transfer backend.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from sglang_crashkit.core.peers import Role, WaitingRequest
from sglang_crashkit.srt.disaggregation.peer_watch import replace_watch
from sglang_crashkit.srt.disaggregation.view import MOST_REQUESTS, Endpoint, Look, QueueView
from sglang_crashkit.srt.hooks import never_raises


@never_raises
def watch_prefill_servers(queue: Any) -> None:
    """Watch the prefill servers from now on.

    Args:
        queue: SGLang's ``DecodePreallocQueue``, once it has its ``kv_manager``.
    """
    replace_watch(PrefillServers(queue))


class PrefillServers(QueueView):
    """The prefill servers as a decode scheduler knows them: by bootstrap address, with the ranks it speaks to.

    Args:
        queue: SGLang's ``DecodePreallocQueue``; it is not kept alive.
    """

    role: Role = "prefill"

    def look_at(self, queue: Any) -> Look:
        """See `QueueView.look_at`."""
        manager = queue.kv_manager
        waiting: dict[str | None, list[WaitingRequest]] = defaultdict(list)
        for entry in _entries(queue):
            who = WaitingRequest(str(entry.req.rid), entry.req.bootstrap_room)
            waiting[str(entry.kv_receiver.bootstrap_addr)].append(who)
        # Copied in one step each: SGLang's own threads change them.
        pool = dict(getattr(manager, "connection_pool", {}))
        peers: dict[str, frozenset[Endpoint]] = {}
        for address in dict(getattr(manager, "addr_to_rooms_tracker", {})):
            # A key is the address and the ranks, joined by underscores. An address that is in none was named by a
            # request only: nobody has answered there yet.
            ranks = [info for key, infos in pool.items() if key.startswith(f"{address}_") for info in infos]
            if ranks:
                peers[address] = frozenset((str(info["rank_ip"]), int(info["rank_port"])) for info in ranks)
        return Look(peers, waiting)


def _entries(queue: Any) -> Iterable[Any]:
    """Yield the ``DecodeRequest`` of each request whose KV cache has not come; not those of a warm-up."""
    entries = itertools.chain(list(queue.queue), list(queue.transfer_queue.queue))
    real = (entry for entry in entries if hasattr(entry.kv_receiver, "bootstrap_addr"))
    return itertools.islice(real, MOST_REQUESTS)
