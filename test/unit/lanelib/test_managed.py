"""The servers' machinery, on a small HTTP server in the place of SGLang."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
import time

import pytest

from lanelib import procs
from lanelib.errors import LaneError
from lanelib.managed import ManagedProcess, free_port

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


def _titles(server, word):
    return [pid for pid, title in server.processes() if title.endswith(word)]


def test_wait_ready_returns_when_it_answers(start):
    server = start(SERVER)

    server.wait_ready(30)

    assert 0 < server.ready_s < 30
    assert server.pid in [pid for pid, _ in server.processes()]


def test_wait_ready_fails_at_once_with_the_log_when_the_process_dies(start):
    server = start("import sys; print('line one'); sys.exit('out of luck')")
    began = time.monotonic()

    with pytest.raises(LaneError, match="ended with status 1 before it was ready") as caught:
        server.wait_ready(60)

    assert "out of luck" in caught.value.message
    assert str(server.log_path) in str(caught.value.next_step)
    assert time.monotonic() - began < 30


def test_wait_ready_gives_up_at_its_deadline(start):
    server = start("import time; print('thinking', flush=True); time.sleep(60)")

    with pytest.raises(LaneError, match="does not answer at http://127"):
        server.wait_ready(1)


def test_generate_asks_for_a_fixed_number_of_tokens(start):
    server = start(SERVER)
    server.wait_ready(30)

    assert server.generate("Hi", max_new_tokens=3)["echo"] == {
        "text": "Hi",
        "sampling_params": {"max_new_tokens": 3, "temperature": 0.0, "ignore_eos": True},
    }


def test_stop_ends_stubborn_children_and_orphans(start):
    server = start(SERVER)
    server.wait_ready(30)
    members = procs.tree_of(server.pid)
    assert _titles(server, "stubborn")
    assert _titles(server, "orphan")

    server.stop(grace_s=0.5)

    assert procs.alive(members) == []
    assert server.processes() == []


def test_stop_ends_what_a_killed_main_process_left(start):
    server = start(SERVER)
    server.wait_ready(30)
    members = procs.tree_of(server.pid)
    os.kill(server.pid, signal.SIGKILL)
    server.popen.wait(timeout=10)

    server.stop(grace_s=0.5)

    assert procs.alive(members) == []


@pytest.mark.wide
def test_stop_leaves_a_process_outside_the_tree_alone(start):
    server, other = start(SERVER), start(SERVER)
    server.wait_ready(30)
    other.wait_ready(30)
    before = other.processes()

    server.stop(grace_s=0.5)

    assert other.processes() == before


def test_pid_of_names_what_there_is_instead(start):
    server = start(SERVER)
    server.wait_ready(30)

    with pytest.raises(LaneError, match=r"0 processes titled sglang::scheduler_TP1 in fake: \d+ "):
        server.pid_of("sglang::scheduler_TP1")


def test_a_signal_never_hits_a_pid_used_again():
    own = procs.read_process(os.getpid())
    earlier = procs.Process(own.pid, own.started - 1, own.parent, own.session, own.state)

    procs.send(earlier, signal.SIGKILL)

    assert procs.alive([earlier]) == []


def test_watchers_of_finds_who_holds_a_pidfd(start):
    watched = start("import time; time.sleep(60)")
    watcher = start(f"import os, time; fd = os.pidfd_open({watched.pid}); print('held', flush=True); time.sleep(60)")
    deadline = time.monotonic() + 20
    while "held" not in watcher.log_path.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)

    assert [process.pid for process in procs.watchers_of([watched.pid])] == [watcher.pid]
