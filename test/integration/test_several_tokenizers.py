"""A server with several tokenizer workers loses its scheduler: their requests are saved, and the server ends."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from integration.scenario import Wreck, wreck
from lanelib.lanes import ensure_lane
from lanelib.servers import Server
from sglang_crashkit.core.exit_status import ServerExit

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]

SCHEDULER = "sglang::scheduler"
REQUESTS = 6


# Under earlier releases uvicorn kills, again and again, a worker that needs over 5 s to import SGLang, as it does here.
@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Wreck:
    folder = tmp_path_factory.mktemp("crash")
    arguments = ["--crash-dump-folder", str(folder), "--tokenizer-worker-num", "2"]
    with Server.start(ensure_lane("0.5.23"), extra_args=arguments) as server:
        server.wait_ready()
        return wreck(server, folder, lambda s: os.kill(s.pid_of(SCHEDULER), signal.SIGKILL), requests=REQUESTS)


def test_the_server_ends_with_all_of_its_processes(left: Wreck) -> None:
    assert left.status == ServerExit.KILLED
    assert left.left == []
    assert left.seconds_to_exit < 20


def test_the_requests_of_the_workers_are_in_one_incident(left: Wreck) -> None:
    verdict, requests = left.incident["verdict"], left.incident["requests"]
    assert verdict["first_failure"]["title"] == SCHEDULER
    assert requests["unfinished"] == REQUESTS
    assert requests["reason"] is None
    saved = [entry["path"] for entry in left.incident["timeline"] if entry["event"] == "requests_saved"]
    assert requests["path"] in saved
    assert sorted(saved) == sorted(map(str, Path(requests["path"]).parent.glob("crash_dump_*.pkl")))
