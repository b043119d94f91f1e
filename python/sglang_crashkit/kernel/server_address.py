"""The HTTP address of a server, and the processes that listen there.

An address does not identify a server: after a server has ended, any other program may listen on its port. So a caller
that means a certain server compares the sockets that listen on the port with those that the server's processes hold.
"""

from __future__ import annotations

import contextlib
import http.client
import queue
import socket
import threading
import urllib.parse
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from sglang_crashkit.errors import UsageError
from sglang_crashkit.kernel import procfs

_SCHEMES = {"http": 80, "https": 443}
_TABLES = ("/proc/self/net/tcp", "/proc/self/net/tcp6")
#: The state of a listening socket in these tables.
_LISTENS = "0A"


@dataclass(frozen=True)
class Address:
    """The address at which a server answers HTTP."""

    scheme: str  # ``http`` or ``https``
    host: str  # name or number, without brackets
    port: int
    prefix: str = ""  # what a proxy in front of the server puts before each path; empty without one

    @classmethod
    def parse(cls, url: str) -> Address:
        """Parse an address from a URL; raises UsageError if it is not the URL of a server."""
        hint = "give it as http://HOST:PORT"
        try:
            parts = urllib.parse.urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise UsageError(f"{url} is not a URL: {error}", next_step=hint) from None
        if parts.username or parts.password or parts.query or parts.fragment:
            raise UsageError("the URL of a server has neither user, query nor fragment", next_step=hint)
        if parts.scheme not in _SCHEMES or not parts.hostname:
            raise UsageError(f"{url} is not the URL of a server", next_step=hint)
        return cls(parts.scheme, parts.hostname, port or _SCHEMES[parts.scheme], parts.path.rstrip("/"))

    @property
    def is_here(self) -> bool:
        """Whether the address is of this host; false if the name cannot be resolved."""
        with contextlib.suppress(OSError):
            for family, kind, protocol, _name, address in socket.getaddrinfo(self.host, 0, type=socket.SOCK_STREAM):
                with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                    probe.bind(address)
                    return True
        return False

    def connect(self, timeout_secs: float) -> http.client.HTTPConnection:
        """Return a connection to the server that connects on its first request."""
        kind = http.client.HTTPSConnection if self.scheme == "https" else http.client.HTTPConnection
        return kind(self.host, self.port, timeout=timeout_secs)

    def ask(self, path: str, timeout_secs: float) -> int:
        """Send a GET request for `path`, and return the status of the response; the body is not read.

        Raises:
            TimeoutError: no response came in time.
            OSError: the connection was refused or broke, or the response is not HTTP.
        """
        connection, came = self.connect(timeout_secs), queue.SimpleQueue[int | Exception]()

        def get() -> None:
            try:
                connection.request("GET", self.prefix + path, headers={"Connection": "close"})
                came.put(connection.getresponse().status)
            except (OSError, http.client.HTTPException) as error:
                came.put(error)
            finally:
                connection.close()

        # The socket's timeout starts again with each byte: a slow server could block the request for ever.
        threading.Thread(target=get, daemon=True).start()
        try:
            answer = came.get(timeout=timeout_secs)
        except queue.Empty:
            raise TimeoutError(f"no answer within {timeout_secs:g} s") from None
        if isinstance(answer, int):
            return answer
        raise answer if isinstance(answer, OSError) else ConnectionError(str(answer) or type(answer).__name__)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}{self.prefix}"


def listening_at(port: int) -> set[str]:
    """Return the inodes of the sockets of this network namespace that listen for TCP connections on `port`."""
    found = set()
    for table in _TABLES:
        # A kernel without IPv6 does not have the second table.
        with contextlib.suppress(OSError), Path(table).open() as lines:
            for fields in map(str.split, lines):
                if fields[3] == _LISTENS and int(fields[1].rpartition(":")[2], 16) == port:
                    found.add(fields[9])
    return found


def holders_of(sockets: Iterable[str], pids: Iterable[int]) -> dict[str, int]:
    """Return, for each of the `sockets` (inodes), the pid of a process of `pids` that has it open."""
    names = {f"socket:[{inode}]": inode for inode in sockets}
    return {names[str(target)]: pid for pid in pids for _link, target in procfs.open_files(pid) if str(target) in names}
