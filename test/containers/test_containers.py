"""A real server as process 1 of a real container, with requests in flight: what its end leaves on the volume."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from containers.docker_host import Container, DockerHost
from incident_schema import assert_fits
from integration.scenario import RELEASES, Sent, ask_in_flight
from lanelib.lanes import ensure_lane
from sglang_crashkit.incident.exit_status import ServerExit
from sglang_crashkit.incident.store import find_incidents
from unit.support.waiting import LONG

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]

RANKS = TP0, TP1 = "sglang::scheduler_TP0", "sglang::scheduler_TP1"
REQUEST = Sent("in-flight", "Once upon a time")
USER = 1000
#: As a cluster's policy for pods wants it, with Docker's default size of ``/dev/shm``.
LOCKED = ("--read-only", "--tmpfs=/tmp", "--cap-drop=ALL", "--security-opt=no-new-privileges", f"--user={USER}")


@pytest.fixture
def volume() -> Iterator[Path]:
    """A folder that is mounted into a container, and not below one that only root may enter."""
    folder = Path(tempfile.mkdtemp(prefix="ck-"))
    folder.chmod(0o777)
    yield folder
    shutil.rmtree(folder)


def the_incident(volume: Path) -> tuple[Path, dict[str, Any]]:
    """Return the folder and the document of the only incident, which is whole."""
    (stored,) = find_incidents(volume)
    assert stored.finished, stored.path
    assert stored.document is not None
    assert_fits(stored.document)
    return stored.path, stored.document


def stack_of(document: dict[str, Any], title: str) -> dict[str, Any]:
    (report,) = [one for one in document["processes"] if one["title"].split(" ")[0] == title]
    return next(piece for piece in report["evidence"] if piece["kind"] == "stack")


def begin(server: Container) -> None:
    """Have the server work on a request."""
    server.wait_ready()
    ask_in_flight(server, REQUEST)


@pytest.mark.parametrize("release", RELEASES)
def test_a_killed_rank_ends_the_container_with_a_telling_status(docker: DockerHost, volume: Path, release: str) -> None:
    with docker.serve(ensure_lane(release), volume) as server:
        begin(server)
        os.kill(server.pid_of(TP1), signal.SIGKILL)
        assert server.popen.wait(LONG) == ServerExit.KILLED
        assert (server.state("ExitCode"), server.state("OOMKilled")) == (str(int(ServerExit.KILLED)), "false")
    folder, document = the_incident(volume)
    assert document["verdict"]["first_failure"]["title"] == TP1
    assert stack_of(document, TP0)["status"] == "captured"
    assert document["requests"]["unfinished"] == 1
    assert folder.stat().st_uid == os.geteuid()


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


@pytest.mark.parametrize("release", RELEASES)
def test_a_locked_container_has_a_whole_incident(docker: DockerHost, volume: Path, release: str) -> None:
    with docker.serve(ensure_lane(release), volume, *LOCKED) as server:
        begin(server)
        os.kill(server.pid_of(TP1), signal.SIGKILL)
        assert server.popen.wait(LONG) == ServerExit.KILLED
    folder, document = the_incident(volume)
    assert document["verdict"]["first_failure"]["title"] == TP1
    assert stack_of(document, TP0)["status"] == "captured"
    assert document["requests"]["unfinished"] == 1
    assert folder.stat().st_uid == USER
