"""A server of one's own: started again where it ends too early, and never left behind."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sglang_crashkit.errors import CrashkitError, UsageError
from sglang_crashkit.replay import server
from sglang_crashkit.replay.server import OwnServer, parse_command
from unit.support.waiting import LONG, wait_until

_TEST = Path(__file__).parents[2]
_SERVE = [sys.executable, "-m", "unit.replay.breakable", "--rule", "False"]


@pytest.fixture
def paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(_TEST), *sys.path]))


def test_one_that_ends_before_it_serves_is_started_again(tmp_path: Path, paths: None) -> None:
    failing_once = f'mkdir {shlex.quote(str(tmp_path / "failed"))} && exit 1; exec {shlex.join(_SERVE)} "$0" "$@"'
    said: list[str] = []
    with OwnServer(["sh", "-c", failing_once], tmp_path / "own") as own:
        own.start(LONG, said.append)
        assert not own.has_ended
        assert own.crash_folder == tmp_path / "own" / "crash-2"
    assert said == [f"own: it ended before it was ready (see {tmp_path}/own/server.log): starting once more"]


def test_one_that_always_ends_is_given_up(tmp_path: Path) -> None:
    with (
        OwnServer([sys.executable, "-c", "raise SystemExit(1)"], tmp_path) as own,
        pytest.raises(CrashkitError, match=r"ended before it was ready, 3 times"),
    ):
        own.start(LONG)
    assert len([*tmp_path.glob("server*.log")]) == 3


def test_its_port_leaves_room_for_those_sglang_derives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ports = {OwnServer(["serve"], tmp_path).address.port for _ in range(50)}
    assert len(ports) > 1
    assert all(1024 < port <= 65_535 - 10_000 for port in ports)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setattr(server, "_PORTS", range(port, port + 1))
        monkeypatch.setattr(server, "_MAX_PORTS_TRIED", 1)
        with pytest.raises(CrashkitError, match="no free port between"):
            OwnServer(["serve"], tmp_path)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--port", "99999"], "'99999' is no port"),
        (["--port", "0"], "'0' is no port"),
        (["--ssl-certfile", "x.pem"], "asked without TLS\n  next: leave --ssl-certfile and --ssl-keyfile out"),
        (["--host", "no such host", "--port", "20001"], "'no such host' is no host"),
    ],
)
def test_an_address_that_is_none_is_an_error_at_once(tmp_path: Path, words: list[str], problem: str) -> None:
    with pytest.raises(UsageError, match=problem), OwnServer([*_SERVE, *words], tmp_path) as own:
        own.start(LONG)


def test_nobody_is_told_of_what_is_provoked(tmp_path: Path, paths: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_CRASHKIT_ON_INCIDENT", "page")
    monkeypatch.setenv("SGLANG_CRASHKIT_HANG_SECS", "7")
    told = f'env > {shlex.quote(str(tmp_path / "told"))}; exec {shlex.join(_SERVE)} "$0" "$@"'
    with OwnServer(["sh", "-c", told], tmp_path / "own") as own:
        own.start(LONG)
    variables = (tmp_path / "told").read_text().splitlines()
    assert "SGLANG_CRASHKIT_HANG_SECS=7" in variables
    assert "SGLANG_CRASHKIT_TERMINATION_LOG=0" in variables
    assert not [one for one in variables if "ON_INCIDENT" in one]


def test_an_interrupt_amid_its_start_leaves_no_server(
    tmp_path: Path, paths: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []
    real = subprocess.Popen

    def interrupted(*args: Any, **kwargs: Any) -> subprocess.Popen[bytes]:
        started.append(real(*args, **kwargs))
        if len(started) == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return started[-1]

    monkeypatch.setattr(server.subprocess, "Popen", interrupted)
    with pytest.raises(KeyboardInterrupt), OwnServer(_SERVE, tmp_path) as own:
        own.start(LONG)
    assert started
    assert not any(one.poll() is None for one in started)


START = """
import sys
from pathlib import Path
from sglang_crashkit.replay.server import OwnServer
OwnServer(sys.argv[2:], Path(sys.argv[1])).start(60.0)
print("serves", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("end", ["exec", ""])
def test_a_server_does_not_outlive_who_started_it(tmp_path: Path, paths: None, end: str) -> None:
    # Where the command is of a shell, the server is not its own process.
    serve = ["sh", "-c", f'{end} {shlex.join(_SERVE)} "$0" "$@"; true']
    words = [sys.executable, "-c", START, str(tmp_path / "own"), *serve]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as popen:
        assert popen.stdout is not None
        assert popen.stdout.readline() == b"serves\n"
        popen.kill()
        popen.wait(LONG)
    wait_until(lambda: str(tmp_path / "own") not in _commands(), "nothing of it is left")


def _commands() -> str:
    listed = subprocess.run(["ps", "-wweo", "args"], capture_output=True, text=True, check=True, timeout=LONG)
    return listed.stdout


def test_variables_before_the_command_are_set(tmp_path: Path, paths: None) -> None:
    command = parse_command(f"OWN=1 {shlex.join([sys.executable, '-c', 'import os; raise SystemExit(os.environ)'])}")
    with OwnServer(command, tmp_path) as own, pytest.raises(CrashkitError, match="ended before it was ready"):
        own.start(LONG)
    assert "'OWN': '1'" in (tmp_path / "server.log").read_text()


def test_one_that_was_ended_does_not_start(tmp_path: Path, paths: None) -> None:
    own = OwnServer(_SERVE, tmp_path)
    own.end()
    with pytest.raises(CrashkitError, match="ended while it started"):
        own.start(LONG)
