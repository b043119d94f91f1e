"""A server with several tokenizer workers loses its scheduler, or its supervisor: requests are saved, and it ends."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from integration.crashes.whole import assert_whole
from integration.faults import Fault, killed, raised, send, wait
from integration.import_hook import write_site
from integration.scenario import PATIENCE, SCHEDULER, Wreck, serving, wreck
from lanelib.servers import Server
from unit.support.waiting import wait_until

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]

WORKER = "sglang::tokenizer_worker"
WORKERS, REQUESTS = 2, 6
#: On a busy machine, in seconds.
LONG = 300.0
#: uvicorn kills a worker that does not answer within so many seconds, which one that imports SGLang cannot.
PATIENT = {"SGLANG_UVICORN_WORKER_HEALTHCHECK_TIMEOUT": "300"}
#: 0.5.9 knows no such setting: what each Python process of a server runs first sets uvicorn's own, 5 s.
SITE = """
from uvicorn.config import Config
original = Config.__init__
def init(self, *arguments, **options):
    original(self, *arguments, **options | {"timeout_worker_healthcheck": 300})
Config.__init__ = init
"""
#: Upstream's supervisor of the workers takes the SIGQUIT of a scheduler that raises, and the server is there for ever.
RAISED = raised("raised", wait, SCHEDULER, env={"SGLANG_TEST_CRASH_AFTER_STREAM_OUTPUTS": "200"})
KILLED = killed("killed", send(SCHEDULER), SCHEDULER)


@pytest.fixture(scope="module", params=[RAISED, pytest.param(KILLED, marks=pytest.mark.matrix)], ids=str)
def fault(request: pytest.FixtureRequest) -> Fault:
    found: Fault = request.param
    return found


@pytest.fixture(scope="module")
def left(fault: Fault, release: str, tmp_path_factory: pytest.TempPathFactory) -> Wreck:
    folder = tmp_path_factory.mktemp("crash")
    with serving_by_workers(release, folder, fault.env) as server:
        return wreck(server, folder, fault.strike, requests=REQUESTS, breaks_by_itself=fault is RAISED)


@contextmanager
def serving_by_workers(release: str, folder: Path, env: Mapping[str, str] = {}) -> Iterator[Server]:
    """A server whose workers are all there: it answers as soon as the first of them does."""
    env = PATIENT | PATIENCE | write_site(folder.with_name(f"{folder.name}-site"), SITE) | dict(env)
    with serving(release, folder, "--tokenizer-worker-num", str(WORKERS), env=env) as server:
        wait_until(
            lambda: sum(title.startswith(WORKER) for _pid, title in server.processes()) == WORKERS,
            "every tokenizer worker has its title",
            LONG,
        )
        yield server


def test_the_server_ends_with_all_of_its_processes(fault: Fault, left: Wreck) -> None:
    assert left.status == fault.status
    assert left.left == []


def test_the_requests_of_the_workers_are_in_one_incident(left: Wreck) -> None:
    verdict, requests = left.incident["verdict"], left.incident["requests"]
    assert verdict["first_failure"]["title"] == SCHEDULER
    assert requests["reason"] is None
    saved = [entry["path"] for entry in left.incident["timeline"] if entry["event"] == "requests_saved"]
    assert requests["path"] in saved
    assert sorted(saved) == sorted(map(str, Path(requests["path"]).parent.glob("crash_dump_*.pkl")))


def test_every_process_has_a_stack_or_its_end(fault: Fault, left: Wreck) -> None:
    assert_whole(left, {SCHEDULER: fault.end} if fault.end else {})
    assert [member.title.startswith(WORKER) for member in left.members].count(True) == WORKERS


@pytest.mark.matrix
def test_a_killed_supervisor_leaves_requests_and_every_workers_stack(release: str, tmp_path: Path) -> None:
    with serving_by_workers(release, tmp_path) as server:
        left = wreck(server, tmp_path, lambda broken: os.kill(broken.pid, signal.SIGKILL), requests=REQUESTS)
    assert left.status == -signal.SIGKILL
    # Uvicorn's workers get no signal, with the kit or without it; the parent-death signal ends the scheduler.
    assert sorted(one.partition(" ")[2].partition(":")[0] for one in left.left if "resource_tracker" not in one) == (
        ["sglang"] * WORKERS
    )
    incident = left.incident
    first = incident["verdict"]["first_failure"]
    assert (incident["kind"], first["title"]) == ("killed", "python -m sglang.launch_server"), incident["verdict"]
    assert_whole(left, {first["title"]: ("signal", "SIGKILL")})
    assert [member.title.startswith(WORKER) for member in left.members].count(True) == WORKERS
