"""``docker stop`` of a server with the kit and of one without; ``docker kill`` and ``docker start``."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from containers.docker_host import Container, DockerHost
from containers.left import after_the_next_start, begin, incidents_of
from integration.scenario import PATIENCE, SCHEDULER
from lanelib.lanes import ensure_lane
from sglang_crashkit.incident.store import find_incidents
from unit.support.targets import make_tool
from unit.support.waiting import LONG, wait_until

pytestmark = [pytest.mark.live, pytest.mark.matrix, pytest.mark.timeout(1200)]

#: Longer than a server takes to end by itself, in seconds.
GRACE_S = 120


def stop(docker: DockerHost, server: Container) -> int:
    """Stop a container, and return its exit code."""
    docker.run("stop", f"--time={GRACE_S}", server.name, timeout_s=2 * GRACE_S)
    return server.popen.wait(LONG)


@pytest.mark.parametrize("tokens", [0, 400], ids=["idle", "with-a-request-in-flight"])
def test_it_ends_a_server_as_without_the_kit(docker: DockerHost, volume: Path, temporary: Path, tokens: int) -> None:
    ends = {}
    for is_pristine in (True, False):
        with docker.serve(ensure_lane("0.5.23", pristine=is_pristine), volume, tp=1) as server:
            server.wait_ready()
            if tokens:
                begin(server, tokens)
            ends[is_pristine] = stop(docker, server)
    assert ends[True] == ends[False] != 137
    assert incidents_of(volume) == []
    assert after_the_next_start(volume, temporary) == []


def test_the_start_after_a_kill_finishes_what_was_begun_and_tells_what_vanished(
    docker: DockerHost, volume: Path, temporary: Path
) -> None:
    # GIVEN an incident whose stacks take long
    slow = make_tool(temporary, "exec sleep 600")
    env = PATIENCE | {"SGLANG_CRASHKIT_PYSPY": slow, "SGLANG_CRASHKIT_CAPTURE_SECS": "60"}
    with docker.serve(ensure_lane("0.5.23"), volume, f"--volume={slow}:{slow}:ro", env=env, tp=1) as server:
        begin(server)
        os.kill(server.pid_of(SCHEDULER), signal.SIGKILL)
        wait_until(lambda: list(volume.glob("*/incidents/.partial-*/events.jsonl")), "an incident is begun")
        docker.run("kill", server.name)
        server.start_again()
        server.wait_ready()
        # THEN there is that incident and no other
        (begun,) = incidents_of(volume)
        assert begun.document is not None
        assert (begun.document["kind"], begun.document["complete"]) == ("killed", False)
        assert begun.document["verdict"]["first_failure"]["title"] == SCHEDULER
        assert "the crash handler was killed" in (begun.path / "summary.md").read_text().lower()
        # WHEN it is killed while nothing happens
        docker.run("kill", server.name)
        server.start_again()
        wait_until(lambda: len(find_incidents(volume)) == 2, "the third start tells of the second")
        docker.run("kill", server.name)
    vanished, again = sorted(incidents_of(volume), key=lambda one: one.path == begun.path)
    assert again.path == begun.path
    assert vanished.document is not None
    assert vanished.document["kind"] == "vanished"
    assert vanished.document["cause"]["class"] == "vanished"
