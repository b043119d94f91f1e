"""Processes that look like a server of SGLang from outside: a main process that answers HTTP, and titled ranks."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from unit.support.waiting import LONG

RANKS = ("sglang::scheduler_TP0", "sglang::scheduler_TP1")

#: Answers its health check as the file says that is its argument: a status, or nothing at all for ``hang``.
_SERVER = """
import http.server, os, pathlib, subprocess, sys, threading, time
mode = pathlib.Path(os.environ["SERVED_MODE"])
rank = "import setproctitle, sys, time; setproctitle.setproctitle(sys.argv[1]); print(flush=True)\\n"
rank += "def event_loop():\\n    while True: time.sleep(0.02)\\nevent_loop()"
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        while (said := mode.read_text()) == "hang":
            time.sleep(0.02)
        self.send_response(int(said)); self.end_headers()
    def log_message(self, *arguments): pass
if __name__ == "__main__":
    ranks = [subprocess.Popen([sys.executable, "-c", rank, title], stdout=subprocess.PIPE) for title in %r]
    for one in ranks: one.stdout.readline()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    print(server.server_port, *(one.pid for one in ranks), flush=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        sys.stdin.read()
    finally:
        for one in ranks: one.kill()
"""


@dataclass
class Served:
    """Such a server."""

    popen: subprocess.Popen[bytes]  # its main process
    port: int  # where it answers
    ranks: dict[str, int]  # pids by title
    mode: Path  # the file that says what its health check answers

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def end(self) -> None:
        """End it in order."""
        assert self.popen.stdin is not None
        self.popen.stdin.close()
        self.popen.wait(LONG)


@contextlib.contextmanager
def served(folder: Path) -> Iterator[Served]:
    """Run one until the end of the block."""
    package = folder / "modules" / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "launch_server.py").write_text(_SERVER % (RANKS,))
    mode = folder / "mode"
    mode.write_text("200")
    with subprocess.Popen(
        [sys.executable, "-m", "sglang.launch_server", "--tp", "2"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(folder / "modules"), "SERVED_MODE": str(mode)},
    ) as popen:
        try:
            assert popen.stdout is not None
            port, *pids = (int(word) for word in popen.stdout.readline().split())
            yield Served(popen, port, dict(zip(RANKS, pids, strict=True)), mode)
        finally:
            assert popen.stdin is not None
            popen.stdin.close()
            popen.wait(LONG)
