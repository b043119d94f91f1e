"""The schedulers that say which peers there are, and which requests wait for them, over a pair of sockets each."""

from __future__ import annotations

import logging
import os
import select
import socket
from collections import defaultdict
from collections.abc import Callable, Iterable

from sglang_crashkit.model.peers import (
    MAX_ASKED,
    MAX_BYTES,
    AnswerReader,
    KnownPeers,
    PeerProcess,
    Role,
    Waits,
    known_question,
    waiting_question,
)

logger = logging.getLogger(__name__)

# All times are in seconds.
#: How often a rank is asked for its peers; one that only knows of failed transfers less often.
_ASK_SECS, _ASK_OTHERS_SECS = 5.0, 15.0
#: A rank that has not answered for this long is asked again.
_ANSWER_SECS = 60.0

#: What a peer server does, and its name in SGLang's tables.
Key = tuple[Role, str]


class _Rank:
    """A scheduler that answers; a lead knows its group's peers, another one of failed transfers only."""

    def __init__(self, pid: int, connection: socket.socket, role: Role, *, is_lead: bool) -> None:
        self.pid = pid
        self.connection = connection
        self.role = role
        self.is_lead = is_lead
        self.reader = AnswerReader(pid)
        self.known = KnownPeers()
        self.next_ask = 0.0
        #: Since when it has not answered; None where it has.
        self.asked_at: float | None = None


class PeerRanks:
    """The schedulers of one server that answer: what they know, and what they say of requests that wait for a peer."""

    def __init__(
        self, epoll: select.epoll, on_change: Callable[[], None], on_waits: Callable[[int, Role, Waits], None]
    ) -> None:
        self._epoll = epoll
        self._on_change = on_change
        self._on_waits = on_waits
        self._ranks: dict[int, _Rank] = {}

    def __len__(self) -> int:
        return len(self._ranks)

    def add(self, pid: int, descriptor: int, role: Role, now: float, *, is_lead: bool) -> None:
        """Ask a scheduler from now on, over a copy of `descriptor`."""
        self.drop(pid)
        connection = socket.socket(fileno=os.dup(descriptor))
        connection.setblocking(False)
        if connection.family != socket.AF_UNIX or connection.type != socket.SOCK_SEQPACKET:
            connection.close()
            return
        self._ranks[pid] = rank = _Rank(pid, connection, role, is_lead=is_lead)
        self._epoll.register(connection, select.EPOLLIN)
        self._ask(rank, now)

    def drop(self, pid: int) -> None:
        """Ask a scheduler no more, if it was asked."""
        rank = self._ranks.pop(pid, None)
        if rank is not None:
            rank.connection.close()
            self._on_change()

    def drop_all(self) -> None:
        """Ask nobody any more."""
        for pid in list(self._ranks):
            self.drop(pid)

    def ask_on_time(self, now: float) -> None:
        """Ask those for their peers whose time has come."""
        for rank in list(self._ranks.values()):
            if now >= rank.next_ask:
                self._ask(rank, now)

    def ask_waiting(self, keys: Iterable[Key]) -> None:
        """Ask all which requests wait for some peers."""
        wanted = sorted(keys)
        for rank in list(self._ranks.values()):
            names = [name for role, name in wanted if role == rank.role and rank.is_lead]
            for begin in range(0, len(names), MAX_ASKED):
                self._send(rank, waiting_question(names[begin : begin + MAX_ASKED]))

    def read(self, descriptor: int) -> bool:
        """Take in the answers that have come over a descriptor; say whether it is one of theirs."""
        rank = next((one for one in self._ranks.values() if one.connection.fileno() == descriptor), None)
        if rank is None:
            return False
        while self._ranks.get(rank.pid) is rank:
            try:
                packet = rank.connection.recv(MAX_BYTES)
            except BlockingIOError:
                break
            except OSError:
                packet = b""
            if not packet:
                self.drop(rank.pid)
                break
            try:
                self._take(rank, rank.reader.take(packet))
            except (ValueError, RecursionError) as error:
                logger.warning("rank %d says nothing of its peers: %s", rank.pid, error)
                self.drop(rank.pid)
        return True

    def known(self) -> tuple[dict[Key, set[PeerProcess]], dict[Key, set[int]]]:
        """Return, by peer, its processes and who knows of it, as all ranks together say."""
        processes: dict[Key, set[PeerProcess]] = defaultdict(set)
        known_to: dict[Key, set[int]] = defaultdict(set)
        for rank in self._ranks.values():
            for name, its in rank.known.peers.items():
                processes[rank.role, name] |= its
                known_to[rank.role, name].add(rank.pid)
        return processes, known_to

    def failed(self) -> set[Key]:
        """Return the peers that SGLang has given up."""
        return {(rank.role, name) for rank in self._ranks.values() for name in rank.known.failed}

    def _ask(self, rank: _Rank, now: float) -> None:
        rank.next_ask = now + (_ASK_SECS if rank.is_lead else _ASK_OTHERS_SECS)
        # One that is stuck does not find a heap of questions when it goes on.
        is_waited_for = rank.asked_at is not None and now < rank.asked_at + _ANSWER_SECS
        if not is_waited_for and self._send(rank, known_question()):
            rank.asked_at = now

    def _send(self, rank: _Rank, question: bytes) -> bool:
        try:
            rank.connection.send(question)
        except BlockingIOError:
            return False
        except OSError:
            self.drop(rank.pid)
            return False
        return True

    def _take(self, rank: _Rank, answer: KnownPeers | Waits | bool) -> None:
        if isinstance(answer, Waits):
            self._on_waits(rank.pid, rank.role, answer)
        elif answer is not False:
            rank.asked_at = None
            if isinstance(answer, KnownPeers) and answer != rank.known:
                rank.known = answer
                self._on_change()
