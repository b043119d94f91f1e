"""One TCP connection to a peer server, held open: the kernel tells at once when the process behind it is gone."""

from __future__ import annotations

import contextlib
import errno
import random
import select
import socket
import time

from sglang_crashkit.model.peers import Sign

# All times are in seconds.
#: This many failures in a row are no accident.
ENOUGH = 3
_RETRY_SECS, _RETRY_LATER_SECS = 0.25, 1.0
#: A peer that stays away is tried again after this time, then after twice, four times as long, and so on.
_LOST_RETRY_SECS, _LONGEST_RETRY_SECS = 5.0, 120.0
#: Each pause is longer or shorter by up to this part of it, so that the servers that lost a peer come one by one.
_JITTER = 0.2
#: The kernel gives up the search for a host of the same network after 3 s, and says so.
_CONNECT_SECS = 4.0
#: A connection that was closed sooner than this after it was made was turned away.
_TURNED_AWAY_SECS = 1.0
#: A host that is silent is noticed after 5 + 3 * 2 s (tcp(7)).
_KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)
_REFUSED = frozenset({errno.ECONNREFUSED, errno.ECONNRESET, errno.EPIPE, errno.ECONNABORTED})
_SILENT = frozenset({errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN})
_HANG_UP = select.EPOLLHUP | select.EPOLLERR | select.EPOLLRDHUP


class Link:
    """A connection to one address.

    Nothing is sent over it, and what comes is not read as anything. The listener may close it for being silent, as
    ZeroMQ's does after 30 s (ZMQ_HANDSHAKE_IVL); then it is made anew. A peer that is slow, busy or stopped keeps it,
    because it is the peer's kernel that holds the other end.

    The host is an IP address; a name is not looked up, which might take any time.

    Attributes:
        since: the first sign that something is wrong, in seconds since the epoch; None while nothing is.

    Raises:
        ValueError: `host` is no IP address.
    """

    def __init__(self, epoll: select.epoll, host: str, port: int) -> None:
        flags = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
        except OSError as error:
            raise ValueError(f"{host} is no IP address") from error
        self._family, self._address = found[0][0], found[0][4]
        self._epoll = epoll
        self._socket: socket.socket | None = None
        self._connecting = self._was_silent = False
        self._changed = self._due = 0.0
        self._refusals = self._silences = self._tries = 0
        self.since: float | None = None

    @property
    def lost(self) -> Sign | None:
        """The sign by which the peer is gone; None while it may be there."""
        if self._refusals >= ENOUGH:
            return "refused"
        return "unreachable" if self._silences >= ENOUGH else None

    @property
    def failures(self) -> int:
        """How often in a row the peer could not be reached."""
        return self._refusals + self._silences

    @property
    def is_up(self) -> bool:
        """Whether the peer took the connection and kept it."""
        return self._socket is not None and not self._connecting and self.since is None

    @property
    def due(self) -> float:
        """When `step` has something to do although nothing happens on the connection, by the monotonic clock."""
        if self._socket is None:
            return self._due
        if self._connecting:
            return self._changed + _CONNECT_SECS
        return self._changed + _TURNED_AWAY_SECS if self.since is not None else float("inf")

    def fileno(self) -> int:
        """Return the descriptor of the connection, -1 where there is none now."""
        return -1 if self._socket is None else self._socket.fileno()

    def step(self, now: float, happened: int) -> None:
        """Go on, by the monotonic clock; epoll(7) said of the descriptor what happened, 0 for nothing."""
        if self._socket is None:
            if now >= self._due:
                self._connect(now)
        elif self._connecting:
            if happened:
                outcome = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if outcome:
                    self._fail(outcome, now)
                else:
                    self._changed, self._connecting = now, False
                    self._epoll.modify(self._socket, select.EPOLLIN | select.EPOLLRDHUP)
            elif now >= self._changed + _CONNECT_SECS:
                self._fail(errno.ETIMEDOUT, now)
        elif happened:
            self._read(self._socket, now, hung_up=bool(happened & _HANG_UP))
        elif now >= self._changed + _TURNED_AWAY_SECS:
            self._was_silent, self.since = False, None
            self._refusals = self._silences = self._tries = 0

    def close(self) -> None:
        """Close the connection."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.close()
        self._socket = None

    def _connect(self, now: float) -> None:
        self._changed, self._connecting = now, True
        try:
            self._socket = socket.socket(self._family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
            for option in _KEEPALIVE:
                self._socket.setsockopt(*option)
            outcome = self._socket.connect_ex(self._address)
            self._epoll.register(self._socket, select.EPOLLOUT)
        except OSError as error:
            outcome = error.errno or errno.EIO
        if outcome not in (0, errno.EINPROGRESS):
            self._fail(outcome, now)

    def _read(self, connection: socket.socket, now: float, *, hung_up: bool) -> None:
        try:
            data = connection.recv(65536)
        except BlockingIOError:
            return
        except OSError as error:
            outcome = error.errno or errno.EIO
        else:
            if data and not (hung_up and len(data) < 65536):
                return
            outcome = errno.ECONNRESET
        if now - self._changed < _TURNED_AWAY_SECS:
            self._fail(outcome, now)
            return
        # Of a connection that stood this is no refusal yet.
        self.close()
        self._was_silent = outcome in _SILENT
        self.since, self._due = self.since or time.time(), now

    def _fail(self, error: int, now: float) -> None:
        self.close()
        self.since = self.since or time.time()
        if error in _REFUSED:
            self._refusals += 1
        elif error in _SILENT and (error != errno.ETIMEDOUT or self._was_silent):
            # Without more a connection that is not taken in time may be a full backlog.
            self._silences += 1
        self._tries += 1
        pause = _RETRY_SECS if error in _REFUSED else _RETRY_LATER_SECS
        if self._tries >= ENOUGH:
            pause = min(_LONGEST_RETRY_SECS, _LOST_RETRY_SECS * 2.0 ** min(self._tries - ENOUGH, 16))
        self._due = now + pause * random.uniform(1 - _JITTER, 1 + _JITTER)  # noqa: S311 - it guards no secret
