"""A gRPC server, whose ranks no ``Engine`` launches: its crashes and hangs are told as those of an HTTP server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from integration.crashes.whole import assert_whole
from integration.faults import CRASH, SIGKILLED, TP1, wait
from integration.scenario import (
    EXIT_TIMEOUT_S,
    PATIENCE,
    Sent,
    ask,
    handler_pid,
    journaled_rids,
    rank_that_starts,
    stopped,
    wreck,
)
from lanelib.lanes import Lane, ensure_lane
from lanelib.servers import Server
from sglang_crashkit.cli.commands.status import find_running_servers
from sglang_crashkit.incident.exit_status import ServerExit
from sglang_crashkit.incident.store import find_incidents
from sglang_crashkit.kernel import procfs
from unit.support.waiting import wait_until

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]

#: Each release has it in its own way: SGLang's own launcher, and that of smg-grpc-servicer.
LAUNCHES = {"0.5.9": "--grpc-mode", "0.5.23": "--smg-grpc-mode"}
RELEASES = (pytest.param("0.5.9", marks=pytest.mark.matrix), "0.5.23")
HANG_SECS = 5.0
NOTICED_S = 60.0
ASK = """
import grpc, json, sys
from smg_grpc_proto import sglang_scheduler_pb2 as messages, sglang_scheduler_pb2_grpc as services
target, body = sys.argv[1], json.loads(sys.argv[2])
sampling = messages.SamplingParams(
    top_p=1.0, top_k=1, repetition_penalty=1.0, n=1, ignore_eos=True,
    max_new_tokens=body["sampling_params"]["max_new_tokens"],
)
text = body["text"]
tokenized = messages.TokenizedInput(original_text=text, input_ids=list(text.encode()))
request = messages.GenerateRequest(
    request_id=body["rid"], tokenized=tokenized, sampling_params=sampling, stream=True
)
for _ in services.SglangSchedulerStub(grpc.insecure_channel(target)).Generate(request):
    pass
"""


class GrpcServer(Server):
    """A server that is asked by gRPC."""

    lane: Lane

    def poll_ready(self) -> bool:
        """Say whether it serves, which its log says."""
        self.require_running()
        is_ready = b"ready to roll" in self.log_path.read_bytes()
        if is_ready:
            self._note_watchers()
        return is_ready

    def ask_later(self, _path: str, body: Mapping[str, Any], timeout_s: float) -> threading.Thread:
        """Ask for tokens, in a process of its own."""
        command = [str(self.lane.python), "-c", ASK, f"127.0.0.1:{self.port}", json.dumps(body)]

        def ask() -> None:
            subprocess.run(command, env=self.lane.serve_env(), capture_output=True, timeout=timeout_s, check=False)

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        return thread


@contextmanager
def serving(release: str, folder: Path, env: Mapping[str, str] | None = None) -> Iterator[GrpcServer]:
    """A gRPC server of two ranks; that it is ready is not waited for."""
    lane = ensure_lane(release)
    command = [str(lane.python), "-c", "import smg_grpc_proto"]
    imported = subprocess.run(command, capture_output=True, text=True, timeout=EXIT_TIMEOUT_S, check=False)
    if imported.returncode:
        # The packages of the release's day do not fit each other.
        pytest.skip(f"gRPC does not work in lane {lane.name}: {imported.stderr.strip().splitlines()[-1]}")
    options = ["--crash-dump-folder", str(folder), LAUNCHES[release]]
    env = PATIENCE | {"SGLANG_CRASHKIT_HANG_SECS": str(HANG_SECS)} | dict(env or {})
    with GrpcServer.start(lane, tp=2, extra_args=options, env=env) as server:
        server.lane = lane
        yield server


@pytest.mark.parametrize("release", RELEASES)
def test_a_stopped_and_a_killed_rank_are_told_with_the_requests(release: str, tmp_path: Path) -> None:
    with serving(release, tmp_path) as server:
        server.wait_ready()
        # WHEN a rank stops while it serves
        rank = server.pid_of(TP1)
        first = ask(server, Sent("first", "Once upon a time"))
        wait_until(lambda: "first" in journaled_rids(server.pid), "the request is under way", NOTICED_S)
        with stopped(rank):
            wait_until(lambda: any(one.finished for one in find_incidents(tmp_path)), "the hang is told", NOTICED_S)
        (hang,) = find_incidents(tmp_path)
        watched = [one for one in find_running_servers() if one.pid in dict(server.processes())]
        # THEN it serves on, as what it is told to be
        assert server.popen.poll() is None
        assert [(one.handler, one.problem) for one in watched] == [(handler_pid(server), "")]
        # WHEN one is killed
        left = wreck(server, tmp_path, lambda _server: os.kill(rank, signal.SIGKILL), requests=2)
        first.join(EXIT_TIMEOUT_S)
    assert (hang.document["kind"], hang.document["verdict"]["first_failure"]["title"]) == ("hang", TP1)
    assert hang.document["requests"]["journal"]["unfinished"] == 1
    left.incidents.remove(next(one for one in left.incidents if one[0].name == hang.path.name))
    left.sent.insert(0, Sent("first", "Once upon a time"))
    assert (left.status, left.left) == (ServerExit.KILLED, [])
    assert_whole(left, {TP1: SIGKILLED})


@pytest.mark.matrix
@pytest.mark.parametrize("release", LAUNCHES)
def test_a_rank_that_raises_is_told_before_the_server_ends(release: str, tmp_path: Path) -> None:
    with serving(release, tmp_path, CRASH) as server:
        server.wait_ready()
        left = wreck(server, tmp_path, wait, breaks_by_itself=True)
    assert (left.status, left.left) == (ServerExit.RAISED, [])
    assert_whole(left)
    assert left.incident["kind"] == "exception"


@pytest.mark.matrix
@pytest.mark.parametrize("release", LAUNCHES)
def test_a_rank_that_is_killed_at_the_start_is_named(release: str, tmp_path: Path) -> None:
    with serving(release, tmp_path) as server:
        os.kill(rank_that_starts(server, TP1, EXIT_TIMEOUT_S), signal.SIGKILL)
        status = server.popen.wait(EXIT_TIMEOUT_S)
    (stored,) = find_incidents(tmp_path)
    assert status == ServerExit.KILLED
    assert stored.document["verdict"]["first_failure"]["title"] == TP1


@pytest.mark.matrix
@pytest.mark.parametrize("release", LAUNCHES)
@pytest.mark.parametrize("state", ["healthy", "stopped"])
def test_sigterm_ends_it_as_the_launcher_does(release: str, state: str, tmp_path: Path) -> None:
    with serving(release, tmp_path, {"SGLANG_CRASHKIT_HANG_SECS": "60"}) as server:
        server.wait_ready()
        handler = handler_pid(server)
        if state == "stopped":
            os.kill(server.pid_of(TP1), signal.SIGSTOP)
        os.kill(server.pid, signal.SIGTERM)
        status = server.popen.wait(EXIT_TIMEOUT_S)
        wait_until(lambda: procfs.read_stat(handler) is None, "the handler leaves", EXIT_TIMEOUT_S)
    # A launcher kills a rank that does not end, and ends in good order.
    assert status == 0
    assert find_incidents(tmp_path) == []
