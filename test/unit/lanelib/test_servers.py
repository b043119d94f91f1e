from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from lanelib import procs
from lanelib.commands import LaneError
from lanelib.lanes import Lane
from lanelib.servers import ManagedProcess, free_port, greedy, parallel_env
from unit.support.waiting import LONG, descriptors


@pytest.mark.parametrize(
    ("tp", "dp", "alike", "bound"),
    [
        (1, 1, False, None),
        (3, 1, False, "2|5|2"),
        (1, 2, False, "2|5"),
        (1, 2, True, None),
        (2, 2, True, "2|5"),
        (2, 2, False, "2|5|2|5"),
    ],
)
def test_parallel_env_binds_each_rank_to_a_core(monkeypatch, tp, dp, alike, bound):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {2, 5})
    monkeypatch.setattr(Lane, "binds_replicas_alike", lambda lane: alike)
    lane = Lane("0.5.23", False, Path("root"), None)

    assert parallel_env(lane, tp, dp).get("SGLANG_CPU_OMP_THREADS_BIND") == bound


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


def test_wait_ready_fails_with_the_log_when_the_process_dies(start):
    server = start("import sys; print('line one'); sys.exit('out of luck')")
    began = time.monotonic()

    with pytest.raises(LaneError, match="ended with status 1 before it was ready") as caught:
        server.wait_ready(3 * LONG)

    assert "out of luck" in caught.value.message
    assert str(server.log_path) in str(caught.value.next_step)
    assert time.monotonic() - began < LONG


def test_a_port_that_was_taken_costs_no_descriptor(monkeypatch):
    mine, spare = free_port(), random.SystemRandom().randrange(40_000, 50_000)
    monkeypatch.setattr("random.SystemRandom.sample", lambda *_: [mine] * 20 + list(range(spare, spare + 50)))
    before = descriptors()
    assert free_port() >= spare
    assert len(descriptors()) == len(before) + 1


def test_a_port_is_given_to_one_process_only():
    mine = free_port()
    script = "import random, sys; from lanelib.servers import free_port; "
    script += "random.SystemRandom.sample = lambda *_: [int(sys.argv[1])]; free_port()"
    # Where this process finds `lanelib` another one does not look.
    env = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", script, str(mine)]
    other = subprocess.run(command, env=env, stderr=subprocess.PIPE, text=True, timeout=60)
    assert "no free TCP port" in other.stderr


def test_a_signal_never_hits_a_pid_used_again():
    own = procs.read_process(os.getpid())
    earlier = procs.Process(own.pid, own.started - 1, own.parent, own.session, own.state)

    procs.send(earlier, signal.SIGKILL)

    assert procs.alive([earlier]) == []


def test_watchers_of_finds_who_holds_a_pidfd(start):
    watched = start("import time; time.sleep(60)")
    watcher = start(f"import os, time; fd = os.pidfd_open({watched.pid}); print('held', flush=True); time.sleep(60)")
    deadline = time.monotonic() + LONG
    while "held" not in watcher.log_path.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)

    assert [process.pid for process in procs.watchers_of([watched.pid])] == [watcher.pid]


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


def test_an_answer_that_never_comes_raises_nothing(start):
    server = start("import time; time.sleep(60)")
    asking = server.ask_later("generate", greedy("Hello", 4), LONG)
    asking.join(LONG)
    assert not asking.is_alive()


def test_what_a_server_lacks_is_named(start):
    server = start("import time; print('thinking', flush=True); time.sleep(60)")
    with pytest.raises(LaneError, match="does not answer at http://127"):
        server.wait_ready(1)
    with pytest.raises(LaneError, match=r"0 processes titled sglang::scheduler_TP1 in fake: \d+ "):
        server.pid_of("sglang::scheduler_TP1")
