"""One TCP connection to a process of a peer, held open: the kernel tells at once when the process is gone.

Nothing is sent over it, and what comes is not read as anything. The listener may close it for being silent, as ZeroMQ's
does after 30 s (ZMQ_HANDSHAKE_IVL); then it is made anew. A peer that is slow, busy or stopped keeps it, because it is
the peer's kernel that holds the other end.
"""

from __future__ import annotations

import contextlib
import errno
import select
import socket
import time

from sglang_crashkit.core.peers import Sign

#: This many failures in a row are no accident.
_ENOUGH = 3
_RETRY_SECS = 0.25
_LOST_RETRY_SECS = 5.0
_RETRY_LATER_SECS = 1.0
#: The kernel gives up the search for a host of the same network after 3 s, and says so.
_CONNECT_SECS = 4.0
#: A connection that was closed sooner than this after it was made, in seconds, was turned away.
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
_HANG_UP = select.POLLHUP | select.POLLERR | select.POLLRDHUP


class Link:
    """A connection to one address.

    Times are by the monotonic clock unless it says otherwise.

    Attributes:
        since: the first sign that something is wrong, in seconds since the epoch; None while nothing is.
    """

    def __init__(self, host: str, port: int) -> None:
        self._address = (host, port)
        self._untried: list[tuple[int, tuple[object, ...]]] = []
        self._socket: socket.socket | None = None
        self._connecting = False
        self._changed = 0.0
        self._due = 0.0
        self._was_silent = False
        self._refusals = 0
        self._silences = 0
        self.since: float | None = None

    @property
    def lost(self) -> Sign | None:
        """The sign by which the peer is gone; None while it may be there."""
        if self._refusals >= _ENOUGH:
            return "refused"
        return "unreachable" if self._silences >= _ENOUGH else None

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
        """When `step` has something to do although nothing happens on the connection."""
        if self._socket is None:
            return self._due
        if self._connecting:
            return self._changed + _CONNECT_SECS
        return self._changed + _TURNED_AWAY_SECS if self.since is not None else float("inf")

    def fileno(self) -> int:
        """Return the descriptor to poll, -1 where there is none now."""
        return -1 if self._socket is None else self._socket.fileno()

    @property
    def events(self) -> int:
        """What to poll it for."""
        return select.POLLOUT if self._connecting else select.POLLIN | select.POLLRDHUP

    def step(self, now: float, happened: int) -> None:
        """Go on.

        Args:
            now: the time.
            happened: what poll(2) said of the descriptor, 0 for nothing.
        """
        if self._socket is None:
            if now >= self._due:
                self._connect(now)
        elif self._connecting:
            if happened:
                self._take_outcome(self._socket, now)
            elif now >= self._changed + _CONNECT_SECS:
                self._fail(errno.ETIMEDOUT, now)
        elif happened:
            self._read(self._socket, now, hung_up=bool(happened & _HANG_UP))
        elif now >= self._changed + _TURNED_AWAY_SECS:
            self._recover()

    def close(self) -> None:
        """Close the connection."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.close()
        self._socket = None

    def _connect(self, now: float) -> None:
        if not self._untried:
            try:
                found = socket.getaddrinfo(*self._address, type=socket.SOCK_STREAM)
            except OSError:
                # A name that cannot be looked up says nothing of the peer.
                self._due = now + _LOST_RETRY_SECS
                return
            self._untried = [(family, address) for family, _type, _protocol, _name, address in found]
        family, address = self._untried.pop(0)
        self._changed, self._connecting = now, True
        try:
            self._socket = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
            for option in _KEEPALIVE:
                self._socket.setsockopt(*option)
            outcome = self._socket.connect_ex(address)
        except OSError as error:
            outcome = error.errno or errno.EIO
        if outcome not in (0, errno.EINPROGRESS):
            self._fail(outcome, now)

    def _take_outcome(self, connection: socket.socket, now: float) -> None:
        outcome = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if outcome:
            self._fail(outcome, now)
        else:
            self._changed, self._connecting, self._untried = now, False, []

    def _read(self, connection: socket.socket, now: float, *, hung_up: bool) -> None:
        try:
            data = connection.recv(65536)
        except BlockingIOError:
            return
        except OSError as error:
            # Of a connection that stood this is no refusal yet, unless it stood for a moment only.
            self._end(now, error.errno or errno.EIO)
            return
        if not data or (hung_up and len(data) < 65536):
            self._end(now, errno.ECONNRESET)

    def _end(self, now: float, error: int) -> None:
        """Note that a connection that stood is closed."""
        if now - self._changed < _TURNED_AWAY_SECS:
            self._fail(error, now)
            return
        self.close()
        self._was_silent = error in _SILENT
        self.since = self.since or time.time()
        self._due = now

    def _fail(self, error: int, now: float) -> None:
        self.close()
        if self._untried:
            self._due = now
            return
        self.since = self.since or time.time()
        if error in _REFUSED:
            self._refusals += 1
        elif error in _SILENT and (error != errno.ETIMEDOUT or self._was_silent):
            # Without more a connection that is not taken in time may be a full backlog.
            self._silences += 1
        quickly = _RETRY_SECS if error in _REFUSED else _RETRY_LATER_SECS
        self._due = now + (_LOST_RETRY_SECS if self.lost else quickly)

    def _recover(self) -> None:
        self._was_silent = False
        self._refusals = self._silences = 0
        self.since = None
