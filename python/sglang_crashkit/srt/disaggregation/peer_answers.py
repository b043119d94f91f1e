"""Answer the crash handler, which watches the other servers of a prefill and decode pair, what SGLang knows of them.

SGLang itself learns of a lost prefill server by a heartbeat, after 5 to 10 s; of a lost decode server only when it
sends to it: a request that waits to be asked for by a decode server waits for 300 s
(``SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT``) and nothing says why. The crash handler holds a connection to each peer; a
thread of the scheduler, which sleeps until it is asked, says which peers there are and which requests wait for them.
What becomes of the requests is left to SGLang. See `model.peers` for the words.
"""

from __future__ import annotations

import contextlib
import logging
import operator
import os
import socket
import struct
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

from sglang_crashkit.model.incident import iso_time
from sglang_crashkit.model.peers import (
    MAX_BYTES,
    MAX_PROCESSES,
    UNCHANGED,
    KnownPeers,
    LostPeer,
    Role,
    WaitingRequest,
    read_question,
    waiting_answers,
)
from sglang_crashkit.settings import SOCKET_VARIABLE, Settings
from sglang_crashkit.srt.hooks import never_raises, notify

logger = logging.getLogger(__name__)

#: No more requests than this are looked at, so that a look stays short.
MAX_REQUESTS = 2048

#: The requests that wait, by the name of the peer; None stands for one that is not known.
Waiting = Mapping[str | None, Sequence[WaitingRequest]]

#: A handler that takes no answer for this long, in seconds, gets none.
_SEND_SECS = 2
#: The answers end when they fail this often in a row.
_ENOUGH_FAILURES = 3
_current_lock = threading.Lock()


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


class PeerAnswers:
    """Answers for one scheduler until `stop`, until nobody asks any more, or until SGLang's tables are gone."""

    def __init__(self, view: PeerView) -> None:
        self._view = view
        self._is_lead = view.is_lead
        self._told: KnownPeers | None = None
        self._has_said_so = False
        self._own, self._handlers = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)

    def start(self) -> None:
        """Begin, in a thread that ends with the process."""
        self._own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", _SEND_SECS, 0))
        with self._handlers:
            notify("pair", descriptor=self._handlers.fileno(), role=self._view.role, lead=self._is_lead)
        threading.Thread(target=self._run, name="crashkit-peers", daemon=True).start()

    def stop(self) -> None:
        """End the thread."""
        # One that has ended closed it.
        with contextlib.suppress(OSError):
            self._own.shutdown(socket.SHUT_RDWR)

    def note_heartbeat(self, address: str) -> None:
        """Tell that SGLang's heartbeat gave a peer up, before SGLang forgets which requests wait for it.

        May be called from any thread.
        """
        if not self._is_lead:
            return
        waiting = self._view.waiting() or {}
        lost = LostPeer.of(
            address,
            self._view.role,
            "heartbeat",
            iso_time(time.time()),
            waiting.get(address, ()),
            waiting.get(None, ()),
        )
        notify("peer_lost", **lost.to_fields())

    def _run(self) -> None:
        failures = 0
        with self._own:
            while failures < _ENOUGH_FAILURES:
                goes_on = self._answer()
                if goes_on is False:
                    return
                failures = 0 if goes_on else failures + 1
        logger.warning("crash kit: the other servers of the pair are not reported any more")

    @never_raises
    def _answer(self) -> bool:
        """Wait for a question and answer it; say whether there may be another one."""
        try:
            question = self._own.recv(MAX_BYTES)
            if not question:
                return False
            names = read_question(question)
            for packet in self._tell_of_peers() if names is None else self._tell_of_waiting(names):
                self._own.send(packet)
        except BlockingIOError:
            # What was sent of it is not the whole.
            self._told = None
        except (ConnectionError, _GoneError):
            return False
        return True

    def _tell_of_peers(self) -> Iterable[bytes]:
        known = self._view.known()
        if known is None:
            raise _GoneError
        if not self._is_lead:
            # Of a transfer that failed the lead knows nothing, where it was another rank's.
            known = KnownPeers({}, known.failed)
        if known == self._told:
            return [UNCHANGED]
        self._told = known
        if len(known.peers) > MAX_PROCESSES and not self._has_said_so:
            self._has_said_so = True
            logger.warning("crash kit: of %d peers only %d are watched", len(known.peers), MAX_PROCESSES)
        return known.to_packets()

    def _tell_of_waiting(self, names: list[str]) -> Iterable[bytes]:
        waiting = self._view.waiting()
        if waiting is None:
            raise _GoneError
        return waiting_answers(names, self._view.role, waiting)


class _GoneError(Exception):
    """SGLang's tables are gone."""


_current: list[PeerAnswers] = []


def replace(view: PeerView) -> None:
    """Answer from `view` from now on, and from no other: a scheduler that changes its role has new peers.

    Where nobody would ask, nobody answers.
    """
    settings = Settings.from_environ()
    wanted = settings.enabled and settings.peer_watch and SOCKET_VARIABLE in os.environ
    with _current_lock:
        while _current:
            _current.pop().stop()
        if wanted:
            _current.append(PeerAnswers(view))
            _current[0].start()


def current() -> PeerAnswers | None:
    """Return who answers in this process, None where nobody does."""
    with _current_lock:
        return _current[0] if _current else None
