"""What a scheduler of a prefill and decode pair knows of its peers at one moment."""

from __future__ import annotations

import operator
import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence, Set
from typing import Any

from sglang_crashkit.model.peer_report import KnownPeers
from sglang_crashkit.model.peers import Role, WaitingRequest

#: No more requests than this are looked at, so that a look stays short.
MOST_REQUESTS = 2048

#: The requests that wait, by the name of the peer; None stands for one that is not known.
Waiting = Mapping[str | None, Sequence[WaitingRequest]]


class PeerView(ABC):
    """SGLang's own tables, as one of its queues has them.

    Args:
        queue: the queue; it is not kept alive.

    Attributes:
        role: what the peers do.
    """

    role: Role

    def __init__(self, queue: Any) -> None:
        self._queue = weakref.ref(queue)
        self._seen: tuple[list[Any], Set[str]] = [], frozenset()
        self._known = KnownPeers()

    @property
    def is_lead(self) -> bool:
        """Whether this rank tells of the peers for its group, all of whose ranks work with the same servers.

        Each of the others speaks to its counterparts there, and has the same requests. A replica has a lead of its own.
        """
        manager = getattr(self._queue(), "kv_manager", None)
        return not any(getattr(manager, name, 0) for name in ("attn_tp_rank", "attn_cp_rank", "pp_rank"))

    def known(self) -> KnownPeers | None:
        """Return the peers that are known now; None once the queue is gone."""
        queue = self._queue()
        if queue is None:
            return None
        table, names = self._tables_of(queue)
        entries = list(table.values())
        before, names_before = self._seen
        # SGLang replaces an entry and changes none. That most often nothing has changed costs next to nothing to see,
        # as the scheduler cannot go on meanwhile.
        is_same = len(entries) == len(before) and all(map(operator.is_, entries, before)) and names == names_before
        if not is_same:
            self._known = self._known_from(table, names)
            self._seen = entries, names
        return self._known

    def waiting(self) -> Waiting | None:
        """Return the requests that wait now; None once the queue is gone."""
        queue = self._queue()
        return None if queue is None else self._waiting_in(queue)

    @abstractmethod
    def _tables_of(self, queue: Any) -> tuple[Mapping[str, Any], Set[str]]:
        """Return copies of the table of peers that the ``kv_manager`` of `queue` has, and of the names beside it."""

    @abstractmethod
    def _known_from(self, table: Mapping[str, Any], names: Set[str]) -> KnownPeers:
        """Return what the tables say."""

    @abstractmethod
    def _waiting_in(self, queue: Any) -> Waiting:
        """Return the requests that wait in `queue`."""
