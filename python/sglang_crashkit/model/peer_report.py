"""What the crash handler asks a scheduler of a prefill and decode pair, and the scheduler's answers.

They talk over a pair of connected sockets (``AF_UNIX``, ``SOCK_SEQPACKET``), one end of which the scheduler passes on
to the handler. The handler asks ``known``, and the scheduler answers with its peers, or that they are the same as
before; or it asks ``waiting`` with the names of some peers, and the scheduler answers for each which requests wait for
it. A question is a packet, an answer one or several, each a JSON object.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sglang_crashkit.model.peers import LostPeer, PeerProcess, Role, WaitingRequest

#: No packet is longer, in bytes.
MAX_BYTES = 100_000
#: A question names at most this many peers, so that its answers fit the socket's buffer.
MAX_ASKED = 8
#: A scheduler tells of at most this many processes.
MAX_PROCESSES = 4096
_PER_PACKET = 256
_KNOWN, _WAITING = "known", "waiting"


@dataclass(frozen=True)
class KnownPeers:
    """The peers that one scheduler works with."""

    #: The processes of each peer that it knows, by the peer's name.
    peers: Mapping[str, frozenset[PeerProcess]] = field(default_factory=dict)
    failed: frozenset[str] = frozenset()  # the names of those that SGLang has given up after a transfer

    def to_packets(self) -> list[bytes]:
        """Return the answer to ``known``."""
        flat = [(name, *process) for name, processes in self.peers.items() for process in sorted(processes)]
        flat = flat[:MAX_PROCESSES]
        parts = [flat[begin : begin + _PER_PACKET] for begin in range(0, len(flat), _PER_PACKET)] or [[]]
        failed = sorted(self.failed)[:_PER_PACKET]
        packets: list[dict[str, Any]] = [{"answer": _KNOWN, "peers": part} for part in parts]
        packets[0]["first"] = True
        packets[-1] |= {"failed": failed, "last": True}
        return [json.dumps(packet).encode() for packet in packets]


#: The answer to ``known`` where nothing has changed since the last one.
UNCHANGED = json.dumps({"answer": _KNOWN, "unchanged": True}).encode()


def known_question() -> bytes:
    """Return the question which peers a scheduler works with."""
    return json.dumps({"ask": _KNOWN}).encode()


def waiting_question(names: Sequence[str]) -> bytes:
    """Return the question which requests wait for the peers of these names, `MAX_ASKED` at most."""
    return json.dumps({"ask": _WAITING, "peers": list(names[:MAX_ASKED])}).encode()


def read_question(packet: bytes) -> list[str] | None:
    """Return the names that a question ``waiting`` has, None where it is ``known``.

    Raises:
        ValueError: it is no question.
    """
    document = _parse(packet)
    if document.get("ask") == _KNOWN:
        return None
    names = document.get("peers")
    if document.get("ask") != _WAITING or not isinstance(names, list):
        raise ValueError(f"no question: {packet[:100]!r}")
    return [str(name) for name in names]


def waiting_answers(
    names: Iterable[str], role: Role, waiting: Mapping[str | None, Sequence[WaitingRequest]]
) -> Iterator[bytes]:
    """Yield the answer to ``waiting``, a packet for each name.

    In `waiting`, None stands for a peer that is not known.
    """
    for name in names:
        # By the same rules as a report: named as far as there is room, and counted.
        told = LostPeer.of(name, role, "refused", "", waiting.get(name, ()), waiting.get(None, ()))
        yield json.dumps({"answer": _WAITING, "of": name, "told": told.to_fields()}).encode()


@dataclass(frozen=True)
class Waits:
    """Which requests wait for one peer."""

    name: str  # the peer's name
    told: LostPeer  # the requests; of the rest nothing counts


class AnswerReader:
    """Puts the packets of one scheduler's answers together."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._peers: dict[str, set[PeerProcess]] = {}

    def take(self, packet: bytes) -> KnownPeers | Waits | bool:
        """Take in one packet.

        Returns:
            What it tells; True where it says that nothing has changed, False where more is to come.

        Raises:
            ValueError: it is no answer.
        """
        document = _parse(packet)
        if document.get("answer") == _WAITING:
            told = LostPeer.from_fields(document.get("told") or {}, self._pid)
            if told is None:
                raise ValueError(f"no answer: {packet[:100]!r}")
            return Waits(str(document.get("of")), told)
        if document.get("answer") != _KNOWN:
            raise ValueError(f"no answer: {packet[:100]!r}")
        if document.get("unchanged") is True:
            return True
        if document.get("first") is True:
            self._peers = {}
        try:
            for name, rank, host, port in document["peers"]:
                self._peers.setdefault(str(name), set()).add(PeerProcess(int(rank), str(host), int(port)))
            if document.get("last") is not True:
                return False
            failed = frozenset(str(name) for name in document["failed"])
        except (KeyError, TypeError) as error:
            raise ValueError(f"no answer: {packet[:100]!r}") from error
        peers = {name: frozenset(processes) for name, processes in self._peers.items()}
        self._peers = {}
        return KnownPeers(peers, failed)


def _parse(packet: bytes) -> dict[str, Any]:
    document = json.loads(packet)
    if not isinstance(document, dict):
        raise ValueError(f"no object: {packet[:100]!r}")
    return document
