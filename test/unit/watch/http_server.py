"""A small HTTP server that behaves as a server of SGLang may: well, unhealthy, silent, or refusing connections."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from unit.support.waiting import LONG


class Answering(ThreadingHTTPServer):
    """What it answers is set by a test.

    Attributes:
        statuses: the answer to each path; 0 for none until `release`.
        delay_secs: how long each answer takes.
        asked: the paths that were asked for, in order.
        open: how many questions wait for an answer.
        max_open: how many did at once, at most.
        key: what is asked for without this API key is answered with 401; empty where there is none. Health checks
            need none, as with SGLang.
        keys: what came with each question as ``Authorization``, None where nothing did.
    """

    daemon_threads = True

    def __init__(self, host: str) -> None:
        super().__init__((host, 0), _Handler)
        self.statuses = {"/health_generate": 200, "/server_info": 200}
        self.delay_secs = 0.0
        self.asked: list[str] = []
        self.key = ""
        self.keys: list[str | None] = []
        self.open = self.max_open = 0
        self.lock = threading.Lock()
        self.end = threading.Event()

    @property
    def url(self) -> str:
        return f"http://{self.server_address[0]}:{self.server_port}"

    def release(self) -> None:
        """Answer what waits."""
        self.end.set()


class _Handler(BaseHTTPRequestHandler):
    server: Answering

    def do_GET(self) -> None:
        server = self.server
        with server.lock:
            server.asked.append(self.path)
            server.keys.append(self.headers["Authorization"])
            server.open += 1
            server.max_open = max(server.max_open, server.open)
        try:
            status = server.statuses.get(self.path, 404)
            if server.key and "health" not in self.path and self.headers["Authorization"] != f"Bearer {server.key}":
                status = 401
            if status == 0:
                server.end.wait(LONG)
                status = 200
            elif server.delay_secs:
                server.end.wait(server.delay_secs)
            with contextlib.suppress(OSError):
                self.send_response(status)
                self.end_headers()
        finally:
            with server.lock:
                server.open -= 1

    def log_message(self, *arguments: object) -> None:
        """Print nothing."""


@contextlib.contextmanager
def answering(host: str = "127.0.0.1") -> Iterator[Answering]:
    """Run such a server in a thread until the end of the block."""
    with Answering(host) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server
        finally:
            server.release()
            server.shutdown()
            thread.join(LONG)
