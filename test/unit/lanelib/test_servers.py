from __future__ import annotations

import os
import signal
import sys
import textwrap

import pytest

from lanelib import procs
from lanelib.servers import ManagedProcess, free_port
from unit.support.waiting import LONG

#: Answers everything; has a child that ignores SIGTERM and an orphan in its session.
SERVER = textwrap.dedent(
    """
    import http.server, subprocess, sys, time
    sleep = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(120)"
    subprocess.Popen([sys.executable, "-c", sleep, "stubborn"])
    fork = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', sys.argv[1], 'orphan'])"
    subprocess.run([sys.executable, "-c", fork, sleep], check=True)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()

        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"echo": ' + body + b"}")

    http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
    """
)


@pytest.fixture
def start(tmp_path):
    started = []

    def start_(source):
        port = free_port()
        argv = [sys.executable, "-c", source, str(port)]
        server = ManagedProcess(
            "fake", argv, env=os.environ, host="127.0.0.1", port=port, log_path=tmp_path / "log" / "fake.log"
        )
        started.append(server)
        return server

    yield start_
    for server in started:
        server.stop(grace_s=1)


def test_a_signal_never_hits_a_pid_used_again():
    own = procs.read_process(os.getpid())
    earlier = procs.Process(own.pid, own.started - 1, own.parent, own.session, own.state)

    procs.send(earlier, signal.SIGKILL)

    assert procs.alive([earlier]) == []


@pytest.mark.parametrize("is_killed", [False, True], ids=["running", "its main process is killed"])
def test_stop_ends_all_of_a_server_and_nothing_else(start, is_killed):
    server, other = start(SERVER), start(SERVER)
    for one in (server, other):
        one.wait_ready(LONG)
    members, before = procs.tree_of(server.pid), other.processes()
    assert {title.split()[-1] for _pid, title in server.processes()} >= {"stubborn", "orphan"}
    assert "text" in server.generate("Hi", max_new_tokens=3)["echo"]
    if is_killed:
        os.kill(server.pid, signal.SIGKILL)
        server.popen.wait(LONG)
    server.stop(grace_s=0.5)
    assert procs.alive(members) == []
    assert other.processes() == before
