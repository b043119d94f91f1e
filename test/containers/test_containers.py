"""A real server as process 1 of a real container, with requests in flight: what its end leaves on the volume."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from containers.docker_host import DockerHost
from containers.left import begin, kill_a_rank, stack_of, the_incident
from integration.faults import TP0, TP1
from integration.scenario import RELEASES
from lanelib.lanes import ensure_lane
from sglang_crashkit.incident.exit_status import ServerExit
from unit.support.waiting import LONG

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]

RANKS = (TP0, TP1)
USER = 1000
#: As a cluster's policy for pods wants it, with Docker's default size of ``/dev/shm``.
LOCKED = ("--read-only", "--tmpfs=/tmp", "--cap-drop=ALL", "--security-opt=no-new-privileges", f"--user={USER}")


@pytest.mark.parametrize(("options", "user"), [((), os.geteuid()), (LOCKED, USER)], ids=["usual", "locked"])
@pytest.mark.parametrize("release", RELEASES)
def test_a_killed_rank_ends_the_container_with_a_telling_status(
    docker: DockerHost, volume: Path, release: str, options: tuple[str, ...], user: int
) -> None:
    with docker.serve(ensure_lane(release), volume, *options) as server:
        folder, document = kill_a_rank(server, volume)
        assert (server.state("ExitCode"), server.state("OOMKilled")) == (str(int(ServerExit.KILLED)), "false")
    assert document["requests"]["unfinished"] == 1
    assert folder.stat().st_uid == user


@pytest.mark.parametrize("release", RELEASES)
def test_a_hung_server_has_its_incident_before_docker_stop_kills_it(
    docker: DockerHost, volume: Path, release: str
) -> None:
    with docker.serve(ensure_lane(release), volume) as server:
        begin(server)
        os.kill(server.pid_of(TP1), signal.SIGSTOP)
        # Docker sends SIGTERM, and SIGKILL 10 s later.
        docker.run("stop", server.name)
        assert server.popen.wait(LONG) == 128 + signal.SIGKILL
    _folder, document = the_incident(volume)
    assert (document["kind"], document["trigger"]["event"]) == ("hang", "silent_at_sigterm")
    assert document["verdict"]["first_failure"]["title"] == TP1
    assert {stack_of(document, title)["status"] for title in RANKS} == {"captured"}
    assert document["requests"]["journal"]["unfinished"] == 1
