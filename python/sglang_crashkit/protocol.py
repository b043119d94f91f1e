"""Send one datagram from a process of the server to its crash handler, and receive the handler's acknowledgement.

A message is a JSON object of at most 60 kB with ``event`` and ``at``. The sender is identified by the kernel's
credentials of the socket (``SO_PASSCRED``), never by the message. The handler's socket is in a folder with mode 0700.
While a sender waits, it has a socket in the same folder, ``reply-<pid>-<n>.sock``. The sender accepts answers only from
the process that ``handler.pid`` in that folder names. The handler may ask it to wait longer, up to a total that the
sender sets. A message may carry a descriptor, for which the handler needs no permission to inspect the sender.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sglang_crashkit.kernel.stack_hooks import read_handler_pid

#: A field of an answer that is not the last one: how many seconds the sender should wait for the next, at most.
WAIT_FIELD = "wait_secs"

_NUMBER = (int, float)
_TOLD = {"message": (str,), "titles": (dict,), "exit_codes": (dict,)}
#: The fields of each event besides ``at`` (seconds of the monotonic clock), with their types; they hold for
#: `Message.fields`. The last three events go from the handler to the server's main process, the others to the handler.
EVENTS: Mapping[str, Mapping[str, tuple[type, ...]]] = {
    "launch": {"mode": (str,)},
    "member": {"title": (str,)},
    "members": {"started": (list,)},
    "heartbeat": {"modes": (dict,), "gpu": (str,)},
    "journal": {},
    "steps": {"modes": (dict,)},
    "log": {},
    "environment": {"ready": (bool,)},
    "exception": {"message": (str,), "record": (str,), "gpu": (str,), "soft": (bool,), "caught": (bool,)},
    "thread_died": {"message": (str,), "record": (str,), "thread": (str,)},
    "watchdog_timeout": {"name": (str,), "silent_secs": _NUMBER, "soft": (bool,)},
    "launch_failed": _TOLD,
    "startup_timeout": _TOLD,
    "child_failed": _TOLD,
    "peer_lost": {
        **{"address": (str,), "role": (str,), "sign": (str,), "since": (str,), "reason": (str,)},
        **{"requests": (list,), "count": (int,)},
    },
    "crash_dump_begun": {},
    "crash_dump_ended": {
        **{"path": (str,), "error": (str,), "reason": (str,)},
        **{"finished": (int,), "unfinished": (int,), "workers": (int,)},
    },
    "await_incident": {},
    "stacks_wanted": {},
    "draining": {"unhealthy": (bool,)},
    "teardown": {"pid": (int,), "whole": (bool,)},
    "exiting": {},
    "say": {"text": (str,)},
    "fault": {},
    "metrics": {"gauges": (list,)},
}

_MAX_BYTES = 60_000
#: Time limit of `notify`, in seconds. The kernel queues ten datagrams (net.unix.max_dgram_qlen) for a busy handler.
_QUEUE_FULL_SECS = 0.25
#: The longest total wait of a sender that sets no other limit, in seconds.
MAX_SECS = 60.0
#: The maximum number of digits of an integer in a message.
_MAX_DIGITS = 18
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_DESCRIPTOR = struct.Struct("i")
_numbers = itertools.count()


class HandlerUnreachableError(Exception):
    """No crash handler listens at the socket, or it did not take the message."""


@dataclass(frozen=True)
class Message:
    """A message as received: from the process that the kernel names, of a user that is allowed to send it."""

    event: str
    fields: dict[str, Any]  # all but the event; a field that `EVENTS` lists is left out if it has another type
    pid: int
    address: bytes | None  # where to send an acknowledgement; None if the sender does not wait
    descriptor: int | None = None  # passed with the message, open until `close`; None if absent, or not requested

    def close(self) -> None:
        """Close the descriptor that came with the message; call it only once."""
        if self.descriptor is not None:
            os.close(self.descriptor)


def notify(socket_path: str, event: str, *, descriptor: int | None = None, **fields: Any) -> None:
    """Send a message and return at once, or within a quarter of a second if the handler's queue is full.

    A `descriptor` is sent with it, and stays open here. Fields are JSON values. Raises HandlerUnreachableError.
    """
    with _datagrams() as sender:
        _send(sender, socket_path, event, fields, _QUEUE_FULL_SECS, descriptor)


def request(
    socket_path: str,
    event: str,
    timeout_secs: float,
    *,
    on_wait: Callable[[float], object] | None = None,
    max_secs: float = MAX_SECS,
    **fields: Any,
) -> dict[str, Any]:
    """Send a message and wait for its acknowledgement.

    It waits for `timeout_secs`, or as long as the handler asks for, but at most `max_secs` in all. `on_wait` is called
    with the number of seconds from now that the handler asks for, within that limit. All fields are JSON values.

    Returns:
        The acknowledgement; empty if the handler took the message but did not answer in time, or cannot answer because
        there is no room for a socket beside the handler's.

    Raises:
        HandlerUnreachableError: the message could not be delivered, or the handler died before it answered.
    """
    last = time.monotonic() + max_secs
    deadline = min(time.monotonic() + timeout_secs, last)
    with _reply_socket(Path(socket_path).parent) as (sender, is_bound):
        # Read before the request, which may have the handler remove the file.
        handler_pid = read_handler_pid(Path(socket_path).parent)
        _send(sender, socket_path, event, fields | ({"wait": True} if is_bound else {}), min(timeout_secs, max_secs))
        # Not select(2), which accepts no descriptor above 1023: a server with many connections has higher ones.
        poller = select.poll()
        poller.register(sender, select.POLLIN)
        reachable = True
        while is_bound:
            remaining = deadline - time.monotonic()
            # Wait in short turns, to notice the death of the handler long before the deadline.
            if poller.poll(max(0.0, min(remaining, 0.25)) * 1000):
                # An answer of another process does not move the deadline.
                answer = _receive_answer(sender, handler_pid)
                if answer is not None:
                    if WAIT_FIELD not in answer:
                        return answer
                    deadline = min(time.monotonic() + _secs(answer[WAIT_FIELD]), last)
                    if on_wait is not None:
                        on_wait(max(0.0, deadline - time.monotonic()))
                    continue
            elif not reachable:
                raise HandlerUnreachableError(f"the crash handler behind {socket_path} died")
            elif remaining > 0:
                # The handler may have answered before it ended, so poll once more.
                reachable = is_reachable(socket_path)
            if remaining <= 0:
                break
    return {}


def _datagrams() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)


@contextlib.contextmanager
def _reply_socket(folder: Path) -> Iterator[tuple[socket.socket, bool]]:
    """Yield a socket to send from, and whether it can get an answer, at a path in `folder`, which is removed later."""
    path = folder / f"reply-{os.getpid()}-{next(_numbers)}.sock"
    with _datagrams() as sender:
        sender.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        try:
            sender.bind(str(path))
        except OSError:
            # The disk is full, or the folder was removed: the message may still arrive.
            yield sender, False
            return
        try:
            yield sender, True
        finally:
            with contextlib.suppress(OSError):
                path.unlink()


def _receive_answer(sender: socket.socket, handler_pid: int | None) -> dict[str, Any] | None:
    """Return the next answer; None if it is not from the handler."""
    try:
        data, ancillary, _flags, _address = sender.recvmsg(
            _MAX_BYTES, socket.CMSG_SPACE(_CREDENTIALS.size), socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT
        )
        answer = json.loads(data)
    except (OSError, ValueError, RecursionError):
        return None
    pid, _uid, _passed = _beside(ancillary)
    return answer if pid is not None and pid == handler_pid and isinstance(answer, dict) else None


def _secs(value: object) -> float:
    """Return the seconds that the handler asks for; 0 if the value is not a positive finite number."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return max(0.0, float(value)) if is_number else 0.0  # type: ignore[arg-type]


def is_reachable(socket_path: str) -> bool:
    """Return whether a process holds the socket at `socket_path` open."""
    with _datagrams() as probe:
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
    data = json.dumps({"event": event, "at": time.monotonic(), **fields}, default=str).encode()
    if len(data) > _MAX_BYTES:
        raise HandlerUnreachableError(f"message of {len(data)} bytes is over {_MAX_BYTES}")
    seconds, fraction = divmod(max(patience_secs, 0.001), 1.0)
    try:
        # The kernel wakes the sender when the queue has room, or when the handler dies.
        sender.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", int(seconds), int(fraction * 1e6)))
        rights = [] if descriptor is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, _DESCRIPTOR.pack(descriptor))]
        sender.sendmsg([data], rights, 0, socket_path)
    except OSError as error:
        raise HandlerUnreachableError(f"{socket_path}: {error.strerror}") from error


class Mailbox:
    """The handler's end: receives messages and acknowledges them."""

    def __init__(self, receiver: socket.socket) -> None:
        receiver.setblocking(False)
        self._receiver = receiver
        self._folder = _folder_of(receiver.getsockname())

    @staticmethod
    def bind(path: Path) -> socket.socket:
        """Return a socket bound at `path`; the caller keeps or passes it on.

        Raises OSError if the path is over 107 bytes or taken, or its folder is missing.
        """
        receiver = _datagrams()
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
        """Return the messages that have arrived, at most `limit`; skip invalid ones.

        With `descriptors`, keep the descriptor that came with a message; the caller must then close each message.
        """
        messages = []
        room = socket.CMSG_SPACE(_CREDENTIALS.size) + descriptors * socket.CMSG_SPACE(_DESCRIPTOR.size)
        for _ in range(limit):
            try:
                data, ancillary, _flags, address = self._receiver.recvmsg(_MAX_BYTES, room, socket.MSG_CMSG_CLOEXEC)
            except OSError:
                break
            pid, uid, passed = _beside(ancillary)
            message = _decode(data, pid, uid, address)
            if message is not None:
                messages.append(replace(message, descriptor=passed.pop(0)) if passed else message)
            for descriptor in passed:
                os.close(descriptor)
        return messages

    def acknowledge(self, message: Message, **fields: Any) -> None:
        """Answer a sender that waits at a socket in the folder of this one; do nothing if it is gone."""
        with self.line_to(message) as line:
            line(**fields)

    @contextlib.contextmanager
    def line_to(self, message: Message) -> Iterator[Callable[..., None]]:
        """Yield a function that answers a waiting sender, even after the folder of its socket has been removed."""
        with _datagrams() as line:
            reached = False
            if message.address is not None and _folder_of(message.address) == self._folder:
                with contextlib.suppress(OSError):
                    line.connect(message.address)
                    reached = True

            def answer(**fields: Any) -> None:
                if reached:
                    with contextlib.suppress(OSError):
                        line.send(json.dumps(fields).encode(), socket.MSG_DONTWAIT)

            yield answer


def _beside(ancillary: list[tuple[int, int, bytes]]) -> tuple[int | None, int, list[int]]:
    """Return a sender's pid (None if the kernel did not report it) and uid, and the descriptors that it passed."""
    pid, uid, passed = None, 0, list[int]()
    for level, kind, value in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
            pid, uid, _gid = _CREDENTIALS.unpack(value[: _CREDENTIALS.size])
        elif level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            whole = value[: len(value) // _DESCRIPTOR.size * _DESCRIPTOR.size]
            passed += [descriptor for (descriptor,) in _DESCRIPTOR.iter_unpack(whole)]
    return pid, uid, passed


def _folder_of(address: bytes | str) -> bytes:
    # Abstract names are bytes, paths are strings.
    return os.path.dirname(os.fsencode(address))  # noqa: PTH120


def _bounded(digits: str) -> int:
    """Return an integer; 10**18 for one with more digits, because Python refuses to write very long ones as text."""
    return int(digits) if len(digits) <= _MAX_DIGITS else 10**_MAX_DIGITS


def _decode(data: bytes, pid: int | None, uid: int, address: bytes | str | None) -> Message | None:
    if pid is None or uid not in (os.geteuid(), 0):
        return None
    try:
        fields = json.loads(data, parse_int=_bounded)
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, dict) or not isinstance(fields.get("event"), str):
        return None
    event, waits = fields.pop("event"), fields.pop("wait", False) is True
    types = {"at": _NUMBER, **EVENTS.get(event, {})}
    # Keep the event even if another version sends a field of it with another type.
    known = {name: value for name, value in fields.items() if type(value) in types.get(name, (type(value),))}
    return Message(event, known, pid, os.fsencode(address) if waits and address else None)
