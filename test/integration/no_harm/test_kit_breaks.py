"""The kit's own parts fail: the server serves on, and a crash still ends it."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from integration.faults import DP1, send
from integration.scenario import (
    EXIT_TIMEOUT_S,
    IN_FLIGHT_S,
    SCHEDULER,
    answers_of,
    handler_pid,
    left_of,
    members_of,
    serving,
    worked_on,
    wreck,
)
from sglang_crashkit.incident.exit_status import ServerExit
from sglang_crashkit.incident.store import find_incidents
from sglang_crashkit.kernel import procfs
from sglang_crashkit.settings import runtime_folder, socket_of
from unit.support.waiting import wait_until

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]

RELEASE = "0.5.23"
#: Requests that are under way at SIGTERM, and how long their answers are: some seconds.
REQUESTS, TOKENS = 3, 250
#: A server that lost a rank has ended this soon on a busy machine, in seconds.
SOON_S = 50.0
#: In its log where no one else was first to notice that a process had died.
NO_HANDLER = "ended by SIGKILL and there is no crash handler; the server ends"


@pytest.fixture
def env(temporary: Path) -> dict[str, str]:
    return {"TMPDIR": str(temporary)}


def test_without_its_handler_it_serves_until_a_rank_dies(release: str, tmp_path: Path, env: dict[str, str]) -> None:
    with serving(release, tmp_path / "crash", env=env) as server:
        before = answers_of(server)
        os.kill(handler_pid(server), signal.SIGKILL)
        assert answers_of(server) == before
        left = wreck(server, tmp_path / "crash", send(SCHEDULER), requests=1)
    assert left.left == []
    # From 0.5.10 on upstream looks at its children every second, and may be the first to see it.
    assert left.status == ServerExit.KILLED or (release != "0.5.9" and left.status == ServerExit.CRASHED)
    assert left.status == ServerExit.CRASHED or NO_HANDLER in left.log
    assert left.seconds_to_exit < SOON_S
    # Upstream's own dump is the fallback.
    assert list((tmp_path / "crash").glob("*/crash_dump_*.pkl"))


@pytest.mark.matrix
def test_a_killed_rank_that_upstream_overlooks_ends_it_too(tmp_path: Path, env: dict[str, str]) -> None:
    with serving(RELEASE, tmp_path / "crash", dp=2, env=env) as server:
        os.kill(handler_pid(server), signal.SIGKILL)
        left = wreck(server, tmp_path / "crash", send(DP1), requests=2)
    assert left.left == []
    assert left.status == ServerExit.KILLED
    assert f"process {left.pids[DP1]} ({DP1}) {NO_HANDLER}" in left.log
    # Upstream alone waits 60 s for cores of the scheduler that lives, pipes or not.
    assert left.seconds_to_exit < SOON_S
    assert list((tmp_path / "crash").glob("*/crash_dump_*.pkl"))


@pytest.mark.matrix
def test_without_its_socket_it_serves_and_the_handler_ends_it(
    tmp_path: Path, temporary: Path, env: dict[str, str]
) -> None:
    with serving(RELEASE, tmp_path / "crash", env=env) as server:
        before = answers_of(server)
        name = socket_of(server.pid).relative_to(runtime_folder(0, 0).parents[2])
        (temporary / name).unlink()
        assert answers_of(server) == before
        left = wreck(server, tmp_path / "crash", send(SCHEDULER), requests=1)
    assert left.left == []
    assert left.status != 0
    assert left.incident["verdict"]["first_failure"]["title"] == SCHEDULER


def test_sigterm_lets_a_healthy_server_answer_without_an_incident(
    release: str, tmp_path: Path, temporary: Path, env: dict[str, str]
) -> None:
    with serving(release, tmp_path / "crash", tp=2, env=env) as server:
        answers_of(server)
        handler = handler_pid(server)
        known = [member.process for member in members_of(server)]
        log_from = server.log_path.stat().st_size
        with ThreadPoolExecutor(REQUESTS) as pool:
            asked = [
                pool.submit(
                    server.generate, f"Once upon a time there were {number}", max_new_tokens=TOKENS, timeout_s=300
                )
                for number in range(REQUESTS)
            ]
            wait_until(lambda: worked_on(server, log_from) >= REQUESTS, "the requests are worked on", IN_FLIGHT_S)
            assert not any(one.done() for one in asked)
            os.kill(server.pid, signal.SIGTERM)
            answers = [one.result() for one in asked]
        status = server.popen.wait(timeout=EXIT_TIMEOUT_S)
        left = left_of([server], known)
        wait_until(lambda: procfs.read_stat(handler) is None, "the handler leaves", EXIT_TIMEOUT_S)
    assert [len(answer["output_ids"]) for answer in answers] == [TOKENS] * REQUESTS
    # The older releases end themselves with their tree, by SIGKILL.
    assert status == (0 if release == RELEASE else -signal.SIGKILL)
    assert left == []
    assert find_incidents(tmp_path / "crash") == []
    assert not list(temporary.glob("sglang-crashkit-*/run/*"))
