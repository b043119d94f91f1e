"""Hook of ``sglang/srt/disaggregation/decode.py``: a decode scheduler tells of the prefill servers it works with.

A prefill server is known by its bootstrap address, which each request names; where its ranks listen is asked for there
once and kept in ``connection_pool``. That is so with every transfer backend.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Set
from typing import Any

from sglang_crashkit.model.peers import KnownPeers, PeerProcess, Role, WaitingRequest
from sglang_crashkit.srt.disaggregation.peer_answers import MAX_REQUESTS, PeerView, Waiting, replace
from sglang_crashkit.srt.hooks import never_raises


@never_raises
def watch_prefill_servers(queue: Any) -> None:
    """Have the prefill servers of a ``DecodePreallocQueue`` watched, once it has its ``kv_manager``."""
    replace(PrefillServers(queue))


class PrefillServers(PeerView):
    """The prefill servers as a decode scheduler knows them: by bootstrap address, with the ranks it speaks to."""

    role: Role = "prefill"

    def _tables_of(self, queue: Any) -> tuple[Mapping[str, Any], Set[str]]:
        manager = queue.kv_manager
        # Copied in one step each: SGLang's own threads change them.
        return dict(getattr(manager, "connection_pool", {})), set(getattr(manager, "addr_to_rooms_tracker", ()))

    def _known_from(self, table: Mapping[str, Any], names: Set[str]) -> KnownPeers:
        found: dict[str, set[PeerProcess]] = defaultdict(set)
        for key, infos in table.items():
            address = _address_of(key)
            # SGLang forgets one of them before the other. An address that only the tracker has was named by a request:
            # nobody has answered there yet.
            if address in names:
                found[address].update(PeerProcess(0, str(info["rank_ip"]), int(info["rank_port"])) for info in infos)
        return KnownPeers({address: frozenset(processes) for address, processes in found.items() if processes})

    def _waiting_in(self, queue: Any) -> Waiting:
        waiting: dict[str | None, list[WaitingRequest]] = defaultdict(list)
        for entry in _entries(queue):
            who = WaitingRequest(str(entry.req.rid), entry.req.bootstrap_room)
            waiting[str(entry.kv_receiver.bootstrap_addr)].append(who)
        return waiting


def _address_of(key: str) -> str:
    """Return the address in a key of the pool: behind the port come the ranks, with an underscore before each."""
    host, _colon, rest = key.rpartition(":")
    return f"{host}:{rest.partition('_')[0]}"


def _entries(queue: Any) -> Iterable[Any]:
    """Yield the ``DecodeRequest`` of each request whose KV cache has not come; not those of a warm-up."""
    entries = itertools.chain(list(queue.queue), list(queue.transfer_queue.queue))
    real = (entry for entry in entries if hasattr(entry.kv_receiver, "bootstrap_addr"))
    return itertools.islice(real, MAX_REQUESTS)
