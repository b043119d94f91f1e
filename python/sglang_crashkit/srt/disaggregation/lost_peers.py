"""Tell the crash handler that SGLang gave up the other server of a prefill and decode pair, and who waits for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from itertools import islice
from typing import Any

from sglang_crashkit.model.incident import iso_time
from sglang_crashkit.model.peers import MAX_NAMED, LostPeer, Role, Sign, WaitingRequest
from sglang_crashkit.srt.hooks import notify

#: No more requests than this are looked at in one of SGLang's queues, so that a look stays short.
MAX_REQUESTS = 1024
#: A peer is reported once in this time, in seconds: each request that fails with it comes here.
_AGAIN_SECS = 60.0
#: Of more peers than this within that time, no more are reported.
_MAX_PEERS = 256


class LostPeers:
    """What one queue of SGLang's has reported; may be used from any thread."""

    def __init__(self, role: Role) -> None:
        self._role = role
        self._reported: dict[str, float] = {}
        self._lock = threading.Lock()

    def is_news(self, address: str) -> bool:
        """Say whether a peer is to be reported now; it is not again for a minute."""
        now = time.monotonic()
        with self._lock:
            if address not in self._reported and len(self._reported) >= _MAX_PEERS:
                self._reported = {each: at for each, at in self._reported.items() if now < at + _AGAIN_SECS}
                if len(self._reported) >= _MAX_PEERS:
                    return False
            if now < self._reported.get(address, float("-inf")) + _AGAIN_SECS:
                return False
            self._reported[address] = now
            return True

    def report(self, address: str, sign: Sign, reason: str, waiting: Iterator[tuple[Any, Any]]) -> None:
        """Report a peer, with the requests that wait, each with SGLang's own sender or receiver of its KV cache."""
        named = [
            WaitingRequest(str(request.rid), request.bootstrap_room, _since(connection))
            for request, connection in islice(waiting, MAX_NAMED)
        ]
        lost = LostPeer.of(address, self._role, sign, iso_time(time.time()), reason, named)
        lost.count += sum(1 for _each in waiting)
        notify("peer_lost", **lost.to_fields())


def _since(connection: Any) -> str | None:
    began = getattr(connection, "init_time", None)
    return iso_time(began) if isinstance(began, float) else None
