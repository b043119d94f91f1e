"""One datagram from a process of the server to its crash handler, and the handler's acknowledgement.

A message is a JSON object of at most 60 kB with ``event`` and ``time``. The sender is taken from the kernel's
credentials of the socket (``SO_PASSCRED``), never from the message. The handler's socket lies in a folder with mode
0700; a sender that waits binds to an address that the kernel chooses (abstract, unix(7) "autobind"). A message may
carry a descriptor, for which the handler need not be allowed to look into the sender.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

#: In an answer that is not the last one: for how many seconds at most the sender is asked to wait for that.
WAIT_FIELD = "wait_secs"

_MAX_BYTES = 60_000
#: The kernel queues ten datagrams (net.unix.max_dgram_qlen); a handler at work lets more wait. Seconds.
_QUEUE_FULL_SECS = 0.25
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_DESCRIPTOR = struct.Struct("i")


class HandlerUnreachableError(Exception):
    """There is no crash handler behind the socket, or it took no message."""


@dataclass(frozen=True)
class Message:
    """A message as the handler received it.

    Attributes:
        event: what happened, such as ``watchdog_timeout``.
        fields: the rest of the message.
        pid: the sender, by the kernel's word.
        uid: the sender's user, by the kernel's word.
        address: where an acknowledgement goes, None when the sender does not wait.
        descriptor: what came with it, open until `close`; None where nothing did, or it was not wanted.
    """

    event: str
    fields: dict[str, Any]
    pid: int
    uid: int
    address: bytes | None
    descriptor: int | None = None

    def close(self) -> None:
        """Close the descriptor that came with it; to be called once."""
        if self.descriptor is not None:
            os.close(self.descriptor)


def notify(socket_path: str, event: str, *, descriptor: int | None = None, **fields: Any) -> None:
    """Send a message and return, at once unless the handler is behind (then within a quarter of a second).

    Args:
        socket_path: the handler's socket.
        event: what happened.
        descriptor: passed on with it; the sender's stays open.
        fields: the rest of the message, JSON values.

    Raises:
        HandlerUnreachableError: it could not be handed over.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
        _send(sender, socket_path, event, fields, _QUEUE_FULL_SECS, descriptor)


def request(
    socket_path: str,
    event: str,
    timeout_secs: float,
    *,
    on_wait: Callable[[float], object] | None = None,
    **fields: Any,
) -> dict[str, Any]:
    """Send a message and wait for its acknowledgement.

    Args:
        socket_path: the handler's socket.
        event: what happened.
        timeout_secs: the longest to wait, in seconds, as long as the handler does not ask for more.
        on_wait: told for how many seconds from now the handler asks to wait at most.
        fields: the rest of the message, JSON values.

    Returns:
        The acknowledgement; empty when the handler took the message but did not answer in time.

    Raises:
        HandlerUnreachableError: the message could not be handed over, or the handler died before it answered.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
        sender.bind("")
        deadline = time.monotonic() + timeout_secs
        _send(sender, socket_path, event, fields | {"wait": True}, timeout_secs)
        # Not select(2), which ends at descriptor 1023: a server with many connections is beyond it.
        poller = select.poll()
        poller.register(sender, select.POLLIN)
        reachable = True
        while True:
            remaining = deadline - time.monotonic()
            # Short turns, so that a handler that died while it worked is noticed long before the deadline.
            if poller.poll(max(0.0, min(remaining, 0.25)) * 1000):
                answer: dict[str, Any] = json.loads(sender.recv(_MAX_BYTES))
                if WAIT_FIELD not in answer:
                    return answer
                deadline = time.monotonic() + answer[WAIT_FIELD]
                if on_wait is not None:
                    on_wait(answer[WAIT_FIELD])
            if not reachable:
                raise HandlerUnreachableError(f"the crash handler behind {socket_path} died")
            if remaining <= 0:
                return {}
            # It may have answered before it left, so its mailbox is looked into once more.
            reachable = is_reachable(socket_path)


def is_reachable(socket_path: str) -> bool:
    """Say whether a process holds the socket at `socket_path` open."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as probe:
        try:
            probe.connect(socket_path)
        except OSError:
            return False
    return True


def _send(
    sender: socket.socket,
    socket_path: str,
    event: str,
    fields: dict[str, Any],
    patience_secs: float,
    descriptor: int | None = None,
) -> None:
    data = json.dumps({"event": event, "time": time.time(), **fields}, default=str).encode()
    if len(data) > _MAX_BYTES:
        raise HandlerUnreachableError(f"message of {len(data)} bytes is over {_MAX_BYTES}")
    seconds, fraction = divmod(max(patience_secs, 0.001), 1.0)
    try:
        # The kernel wakes the sender when there is room again or when the handler dies.
        sender.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", int(seconds), int(fraction * 1e6)))
        rights = [] if descriptor is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, _DESCRIPTOR.pack(descriptor))]
        sender.sendmsg([data], rights, 0, socket_path)
    except OSError as error:
        raise HandlerUnreachableError(f"{socket_path}: {error.strerror}") from error


class Mailbox:
    """The handler's end: receives messages and acknowledges them."""

    def __init__(self, receiver: socket.socket) -> None:
        receiver.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        receiver.setblocking(False)
        self._receiver = receiver

    @staticmethod
    def bind(path: Path) -> socket.socket:
        """Return a socket bound at `path`; the caller keeps or passes it on.

        Raises:
            OSError: the path is over 107 bytes, taken, or its folder is missing.
        """
        receiver = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        try:
            receiver.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            receiver.bind(str(path))
        except OSError:
            receiver.close()
            raise
        return receiver

    def fileno(self) -> int:
        """Return the socket's descriptor."""
        return self._receiver.fileno()

    def receive(self, limit: int = 64, *, descriptors: bool = False) -> list[Message]:
        """Return the messages that are there now; rubbish is passed over.

        Args:
            limit: so many at most.
            descriptors: keep the descriptor that came with a message, one at most; the caller closes each message.
        """
        messages = []
        room = socket.CMSG_SPACE(_CREDENTIALS.size) + descriptors * socket.CMSG_SPACE(_DESCRIPTOR.size)
        for _ in range(limit):
            try:
                data, ancillary, _flags, address = self._receiver.recvmsg(_MAX_BYTES, room, socket.MSG_CMSG_CLOEXEC)
            except OSError:
                break
            message, passed = _decode(data, ancillary, address), _passed(ancillary)
            if message is not None:
                messages.append(replace(message, descriptor=passed.pop(0)) if passed else message)
            for descriptor in passed:
                os.close(descriptor)
        return messages

    def acknowledge(self, message: Message, **fields: Any) -> None:
        """Answer a sender that waits; one that is gone is no error."""
        if message.address is not None:
            with contextlib.suppress(OSError):
                self._receiver.sendto(json.dumps(fields).encode(), socket.MSG_DONTWAIT, message.address)


def _passed(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    return [
        descriptor
        for level, kind, value in ancillary
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS
        for (descriptor,) in _DESCRIPTOR.iter_unpack(value[: len(value) // _DESCRIPTOR.size * _DESCRIPTOR.size])
    ]


def _decode(data: bytes, ancillary: list[tuple[int, int, bytes]], address: bytes | str | None) -> Message | None:
    credentials = [
        _CREDENTIALS.unpack(value[: _CREDENTIALS.size])
        for level, kind, value in ancillary
        if level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS
    ]
    if not credentials:
        return None
    pid, uid, _gid = credentials[0]
    if uid not in (os.geteuid(), 0):
        return None
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, dict) or not isinstance(fields.get("event"), str):
        return None
    waits = fields.pop("wait", False) is True
    reply_to = address.encode() if isinstance(address, str) else address
    return Message(
        event=fields.pop("event"),
        fields=fields,
        pid=pid,
        uid=uid,
        address=(reply_to or None) if waits else None,
    )
