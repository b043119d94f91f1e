"""A server with several tokenizer workers loses its scheduler: their requests are saved, and the server ends."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from integration.scenario import Wreck, wreck
from lanelib.lanes import ensure_lane
from lanelib.servers import Server
from sglang_crashkit.core.exit_status import ServerExit

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]

SCHEDULER = "sglang::scheduler"
REQUESTS = 6


@dataclass(frozen=True)
class Case:
    """How the scheduler ends.

    Attributes:
        env: more environment for the server.
        signum: the signal that it gets; None where it ends by itself.
        status: the server's exit status.
    """

    env: Mapping[str, str]
    signum: signal.Signals | None
    status: ServerExit


#: Upstream's supervisor of the workers takes the SIGQUIT of a scheduler that raises, and the server is there for ever.
RAISED = Case({"SGLANG_TEST_CRASH_AFTER_STREAM_OUTPUTS": "200"}, None, ServerExit.RAISED)
KILLED = Case({}, signal.SIGKILL, ServerExit.KILLED)


# Under earlier releases uvicorn kills, again and again, a worker that needs over 5 s to import SGLang, as it does here.
@pytest.fixture(
    scope="module",
    params=[pytest.param(RAISED, id="raised"), pytest.param(KILLED, id="killed", marks=pytest.mark.matrix)],
)
def case(request: pytest.FixtureRequest) -> Case:
    found: Case = request.param
    return found


@pytest.fixture(scope="module")
def left(case: Case, tmp_path_factory: pytest.TempPathFactory) -> Wreck:
    folder = tmp_path_factory.mktemp("crash")
    arguments = ["--crash-dump-folder", str(folder), "--tokenizer-worker-num", "2"]

    def fault(server: Server) -> None:
        if case.signum is not None:
            os.kill(server.pid_of(SCHEDULER), case.signum)

    with Server.start(ensure_lane("0.5.23"), extra_args=arguments, env=case.env) as server:
        server.wait_ready()
        return wreck(server, folder, fault, requests=REQUESTS)


def test_the_server_ends_with_all_of_its_processes(case: Case, left: Wreck) -> None:
    assert left.status == case.status
    assert left.left == []
    assert left.seconds_to_exit < 60


def test_the_requests_of_the_workers_are_in_one_incident(left: Wreck) -> None:
    verdict, requests = left.incident["verdict"], left.incident["requests"]
    assert verdict["first_failure"]["title"] == SCHEDULER
    assert requests["unfinished"] == REQUESTS
    assert requests["reason"] is None
    saved = [entry["path"] for entry in left.incident["timeline"] if entry["event"] == "requests_saved"]
    assert requests["path"] in saved
    assert sorted(saved) == sorted(map(str, Path(requests["path"]).parent.glob("crash_dump_*.pkl")))
