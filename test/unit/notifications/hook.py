"""A web hook that takes what it is sent, and answers as a test wants it to."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from unit.support.waiting import LONG


class Hook(ThreadingHTTPServer):
    """What it answers: one status after the other, the last one for ever; 0 for none at all.

    Attributes:
        bodies: what it was sent.
        headers: what came with each.
    """

    daemon_threads = True

    def __init__(self, *statuses: int, location: str = "") -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.statuses, self.location = list(statuses), location
        self.bodies: list[bytes] = []
        self.headers: list[dict[str, str]] = []
        self.end = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/hook"


class _Handler(BaseHTTPRequestHandler):
    server: Hook

    def do_POST(self) -> None:
        server = self.server
        server.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
        server.headers.append(dict(self.headers))
        status = server.statuses.pop(0) if len(server.statuses) > 1 else server.statuses[0]
        if status == 0:
            server.end.wait(LONG)
            return
        with contextlib.suppress(OSError):
            self.send_response(status)
            if server.location:
                self.send_header("Location", server.location)
            self.end_headers()

    def do_GET(self) -> None:
        self.server.bodies.append(b"GET")
        self.send_response(200)
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        """Print nothing."""


@contextlib.contextmanager
def hook(*statuses: int, location: str = "") -> Iterator[Hook]:
    """Run a web hook in a thread until the end of the block."""
    with Hook(*statuses, location=location) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield server
        finally:
            server.end.set()
            server.shutdown()
            thread.join(LONG)
