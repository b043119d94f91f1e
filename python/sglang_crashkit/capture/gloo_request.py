"""Ask a process for what PyTorch's flight recorder keeps of its gloo collectives.

PyTorch writes no dump of that recorder by itself. A function of it (``_dump_fr_trace`` of
``torch._C._distributed_c10d``, in PyTorch 2.9 to 2.14) gives one to the thread of the process that answers for it; see
`capture.responder`. The thread needs the GIL, so a process that holds it for ever gives none.

The answer is one line with the process's rank and the time since the epoch, and the dump, to which the names are added
that SGLang has for its process groups; or one line that says why there is none.
"""

from __future__ import annotations

import re
from pathlib import Path

from sglang_crashkit.capture.flight_request import Received
from sglang_crashkit.capture.responder import COLLECTIVES, Conversation
from sglang_crashkit.model.flight_dump import FlightDumpError, parse_dump

_HEAD = re.compile(rb"(\d{1,9}) (\d{1,12}\.\d{1,9})")
_MAX_REASON = 200


class NoRecorderError(FlightDumpError):
    """The process keeps nothing of what it does over gloo; the message says why."""


class GlooRequest:
    """One dump of process `pid`, from the question at the socket `path` to the whole answer."""

    is_unasked = False

    def __init__(self, pid: int, path: Path) -> None:
        self._pid = pid
        self._path = path
        self._conversation: Conversation | None = None

    def send(self) -> None:
        """Ask for the dump; return at once.

        Raises:
            FlightDumpError: nobody answers there.
        """
        try:
            self._conversation = Conversation.begin(self._path, self._pid, COLLECTIVES)
        except OSError as error:
            raise FlightDumpError(f"no thread of it answers: {error.strerror or error}") from error

    def look(self) -> Received | None:
        """Return the dump when it is whole, None while it is not.

        Raises:
            FlightDumpError: the answer is none.
        """
        while self._conversation is not None:
            size = len(self._conversation.answer)
            reason = self._conversation.read()
            if reason:
                raise FlightDumpError(reason)
            if reason is not None:
                return parse_answer(bytes(self._conversation.answer))
            if len(self._conversation.answer) == size:
                break
        return None

    def leftover(self) -> str:
        """Say what there is of a dump that did not become whole."""
        size = len(self._conversation.answer) if self._conversation is not None else 0
        return f"{size} bytes came" if size else "no answer, the GIL is not to be had"

    def close(self) -> None:
        """Wait for the answer no longer."""
        if self._conversation is not None:
            self._conversation.connection.close()


def parse_answer(answer: bytes) -> Received:
    """Return the dump in an answer.

    Raises:
        NoRecorderError: the answer says that there is none.
        FlightDumpError: it is no answer.
    """
    line, _, data = answer.partition(b"\n")
    head = _HEAD.fullmatch(line)
    if head is None:
        kind = FlightDumpError if data else NoRecorderError
        raise kind(line[:_MAX_REASON].decode(errors="backslashreplace"))
    return Received(int(head[1]), data, parse_dump(data), float(head[2]))
