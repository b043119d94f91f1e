"""What a scheduler of a prefill and decode pair knows of its peers at one moment."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from sglang_crashkit.core.peers import Role, WaitingRequest

Endpoint = tuple[str, int]

#: No more requests than this are looked at, so that a look stays short.
MOST_REQUESTS = 2048


@dataclass(frozen=True)
class Look:
    """What SGLang knows of its peers at one moment.

    Attributes:
        peers: the addresses of each peer's processes, by the peer's name.
        waiting: the requests that wait, by the name of the peer; None stands for one that is not known.
        failed: the peers that SGLang has given up after a transfer.
    """

    peers: Mapping[str, frozenset[Endpoint]]
    waiting: Mapping[str | None, Sequence[WaitingRequest]] = field(default_factory=dict)
    failed: frozenset[str] = frozenset()

    def waiting_for(self, address: str | None) -> Sequence[WaitingRequest]:
        """Return the requests that wait for the peer `address`; those for an unknown one where it is None."""
        return self.waiting.get(address, ())


class View(Protocol):
    """SGLang's own tables, as one side of the pair has them."""

    #: What the peers do.
    role: Role

    def look(self) -> Look | None:
        """Return what is there now; None once there is no such table any more."""


class QueueView(ABC):
    """A `View` of one of SGLang's queues.

    Args:
        queue: the queue; it is not kept alive.
    """

    role: Role

    def __init__(self, queue: Any) -> None:
        self._queue = weakref.ref(queue)

    def look(self) -> Look | None:
        """See `View.look`."""
        queue = self._queue()
        return None if queue is None else self.look_at(queue)

    @abstractmethod
    def look_at(self, queue: Any) -> Look:
        """Return what the queue and its ``kv_manager`` know now."""


def name_of(endpoint: Endpoint) -> str:
    """Return host and port in one string, an IPv6 address in brackets."""
    host, port = endpoint
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
