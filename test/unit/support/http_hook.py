"""A web hook that takes what it is sent, and answers as a test wants it to."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from unit.support.waiting import LONG


class Hook(ThreadingHTTPServer):
    """What it answers: one status after the other, the last one for ever; `bodies` is what it was sent."""

    daemon_threads = True

    def __init__(self, *statuses: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.statuses = list(statuses)
        self.bodies: list[bytes] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/hook"


class _Handler(BaseHTTPRequestHandler):
    server: Hook

    def do_POST(self) -> None:
        server = self.server
        server.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
        status = server.statuses.pop(0) if len(server.statuses) > 1 else server.statuses[0]
        self.send_response(status)
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        """Print nothing."""


@contextlib.contextmanager
def hook(*statuses: int) -> Iterator[Hook]:
    """Run a web hook in a thread until the end of the block."""
    with Hook(*statuses) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join(LONG)
