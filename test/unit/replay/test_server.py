"""A server of one's own: nothing is sent to another one in its place, and it is never left behind."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sglang_crashkit.errors import CrashkitError
from sglang_crashkit.incident.requests import StoredRequest
from sglang_crashkit.replay import server
from sglang_crashkit.replay.server import OwnServer
from unit.replay.breakable import incident
from unit.replay.conftest import commands
from unit.support.command import Cli
from unit.support.waiting import LONG, wait_until

_SERVE = [sys.executable, "-m", "unit.replay.breakable", "--rule", "False"]
#: Writes its port, as one does that loads its model for a while before it listens; started again it ends.
_LOADING = """
import pathlib, sys, time
path = pathlib.Path(sys.argv[1])
if path.exists():
    sys.exit(1)
path.with_suffix(".new").write_text(sys.argv[sys.argv.index("--port") + 1])
path.with_suffix(".new").rename(path)
time.sleep(600)
"""


@pytest.fixture
def production(tmp_path: Path, paths: None) -> Iterator[Callable[[int], Path]]:
    """Starts a server in production at a port, and returns the file in which it keeps what it is asked."""
    started: list[subprocess.Popen[bytes]] = []

    def start(port: int) -> Path:
        asked = tmp_path / "asked"
        started.append(subprocess.Popen([*_SERVE, "--port", str(port), "--keep", str(asked)]))
        return asked

    yield start
    for popen in started:
        popen.kill()
        popen.wait(LONG)


def test_a_server_in_production_at_the_port_is_sent_nothing(
    tmp_path: Path, production: Callable[[int], Path], cli: Cli
) -> None:
    # GIVEN a command whose server loads, and a server in production that gets the port meanwhile
    path, port = incident(tmp_path / "crash", {"text": "a killing request"}), tmp_path / "port"

    def restart() -> None:
        wait_until(port.exists, "the port is known")
        production(int(port.read_text()))

    restarting = threading.Thread(target=restart)
    restarting.start()
    serve = shlex.join([sys.executable, "-c", _LOADING, str(port)])
    # WHEN the request is to be sent to the command's server
    words = ["replay", path, "--only", "0", "--serve", serve, "--ready-secs", LONG, "-o", tmp_path / "own"]
    said = cli(*words, status=1)
    restarting.join(LONG)
    # THEN it is sent to none
    assert not (tmp_path / "asked").exists()
    assert "another program listens at http://127.0.0.1:" in said.err


def test_a_server_in_production_that_takes_the_port_later_is_sent_nothing(
    tmp_path: Path, paths: None, production: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "INCIDENT_SECS", 1.0)
    # GIVEN a server that serves in a child, which ends, so that the port is another server's
    serves = f'{shlex.join(_SERVE)} "$0" "$@" & echo $! > {shlex.quote(str(tmp_path / "pid"))}; sleep 600'
    with OwnServer(["sh", "-c", serves], tmp_path / "own") as own:
        own.start(LONG)
        request = StoredRequest("0", 0.0, False, {"rid": "0", "text": "a"})
        assert own.try_requests([request], {}, LONG).serves_on
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
        wait_until(lambda: own.is_listening() is None, "its port is free")
        asked = production(own.address.port)
        wait_until(lambda: own.is_listening() is False, "the other one listens")
        # WHEN the next group is to be sent THEN it is not, although the command is at work
        tried = own.try_requests([request], {}, LONG)
        assert not own.has_ended
    assert not asked.exists()
    assert (tried.serves_on, tried.is_same) == (False, False)
    assert "is not the server that was started: nothing was sent" in tried.answers[0].problem


def test_one_that_ends_before_it_serves_is_started_again(tmp_path: Path, paths: None) -> None:
    failing_once = f'mkdir {shlex.quote(str(tmp_path / "failed"))} && exit 1; exec {shlex.join(_SERVE)} "$0" "$@"'
    said: list[str] = []
    with OwnServer(["sh", "-c", failing_once], tmp_path / "own") as own:
        own.start(LONG, said.append)
        assert not own.has_ended
    assert said == [f"own: it ended before it was ready (see {tmp_path}/own/server-1.log), start 1 of 3"]


def test_what_an_earlier_run_left_is_no_failure_of_this_server(tmp_path: Path, paths: None) -> None:
    for number in (1, 2):
        incident(tmp_path / f"crash-{number}", {"text": "of the run before"})
    said: list[str] = []
    with OwnServer(_SERVE, tmp_path) as own:
        own.start(LONG, said.append)
        request = StoredRequest("0", 0.0, False, {"rid": "0", "text": "a"})
        assert own.try_requests([request], {}, LONG).serves_on
    assert said == []


#: Answers a request byte by byte, without an end.
_ENDLESS = """
import http.server, sys, time
class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        self.send_response(200)
        self.end_headers()
        while True:
            self.wfile.write(b"x")
            self.wfile.flush()
            time.sleep(0.05)
server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()
"""


def test_an_answer_without_an_end_ends_at_its_time(tmp_path: Path, cli: Cli) -> None:
    path = incident(tmp_path, {"text": "a"})
    with subprocess.Popen([sys.executable, "-c", _ENDLESS], stdout=subprocess.PIPE, text=True) as endless:
        url = f"http://127.0.0.1:{endless.stdout.readline().strip()}"
        said = cli("replay", path, "--url", url, "--only", "0", "--request-secs", 1, status=5)
        endless.kill()
    assert "no answer within 1 s" in said.out


def test_one_that_always_ends_is_given_up(tmp_path: Path) -> None:
    with (
        OwnServer([sys.executable, "-c", "raise SystemExit(1)"], tmp_path) as own,
        pytest.raises(CrashkitError, match=r"was not ready in 3 starts"),
    ):
        own.start(LONG)
    assert len([*tmp_path.glob("server*.log")]) == 3


def test_no_one_is_told_of_what_is_provoked(tmp_path: Path, paths: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_CRASHKIT_ON_INCIDENT", "page-somebody")
    monkeypatch.setenv("SGLANG_CRASHKIT_HANG_SECS", "7")
    told = f'env > {shlex.quote(str(tmp_path / "told"))}; exec {shlex.join(_SERVE)} "$0" "$@"'
    with OwnServer(["sh", "-c", told], tmp_path / "own") as own:
        own.start(LONG)
    variables = (tmp_path / "told").read_text().splitlines()
    assert "SGLANG_CRASHKIT_HANG_SECS=7" in variables
    assert "SGLANG_CRASHKIT_TERMINATION_LOG=0" in variables
    assert not [one for one in variables if "ON_INCIDENT" in one]


START = """
import sys
from pathlib import Path
from sglang_crashkit.replay.server import OwnServer
OwnServer(sys.argv[2:], Path(sys.argv[1])).start(60.0)
print("serves", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("end", ["exec", ""])
def test_a_server_does_not_outlive_the_process_that_started_it(tmp_path: Path, paths: None, end: str) -> None:
    # Where the command is of a shell, the server is not its own process.
    serve = ["sh", "-c", f'{end} {shlex.join(_SERVE)} "$0" "$@"; true']
    words = [sys.executable, "-c", START, str(tmp_path / "own"), *serve]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as popen:
        assert popen.stdout.readline() == b"serves\n"
        popen.kill()
        popen.wait(LONG)
    wait_until(lambda: str(tmp_path / "own") not in commands(), "nothing of it is left")
