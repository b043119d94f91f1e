"""The volume of a container for its incidents is full, read-only, or gone: the server serves on, and says so once."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

from containers.docker_host import CRASH, Container, DockerHost
from containers.left import begin, stack_of, the_incident
from integration.faults import DETOKENIZER
from integration.scenario import SCHEDULER
from lanelib.lanes import ensure_lane
from sglang_crashkit.incident.exit_status import ServerExit
from unit.support.small_disk import fill, mounted
from unit.support.waiting import LONG, wait_until

pytestmark = [pytest.mark.live, pytest.mark.matrix, pytest.mark.timeout(900)]

FALLBACK = "/tmp/sglang-crashkit-0"


def problems_told(server: Container) -> list[str]:
    """Return the lines of the kit's that say what is wrong with the crash folder."""
    lines = server.log_path.read_text(errors="replace").splitlines()
    return [line for line in lines if "crash kit: " in line and CRASH in line and "cannot be " in line]


def serves_and_says(server: Container, words: str) -> None:
    """Expect one line of the log, with these words, while the server answers."""
    server.wait_ready()
    wait_until(lambda: problems_told(server), "the log says it")
    (line,) = problems_told(server)
    assert words in line, line
    begin(server)


def incident_elsewhere(docker: DockerHost, server: Container, to: Path) -> None:
    """Kill the rank of a server, and expect the incident in the container's own temporary folder."""
    os.kill(server.pid_of(SCHEDULER), signal.SIGKILL)
    assert server.popen.wait(LONG) == ServerExit.KILLED
    docker.run("cp", f"{server.name}:{FALLBACK}", str(to))
    _folder, document = the_incident(to / Path(FALLBACK).name)
    assert f"crash kit: incident {FALLBACK}/" in server.log_path.read_text(errors="replace")
    assert document["verdict"]["first_failure"]["title"] == SCHEDULER
    assert stack_of(document, DETOKENIZER)["status"] == "captured"
    assert document["requests"]["unfinished"] == 1
    assert Path(document["requests"]["path"]).is_relative_to(FALLBACK)


def test_a_full_one(docker: DockerHost, volume: Path, temporary: Path) -> None:
    with mounted(volume / "small", "size=8m,mode=777") as small:
        fill(small)
        with docker.serve(ensure_lane("0.5.23"), small, tp=1) as server:
            serves_and_says(server, "cannot be kept (No space left on device)")
            incident_elsewhere(docker, server, temporary)


def test_a_read_only_one(docker: DockerHost, volume: Path, temporary: Path) -> None:
    with docker.serve(ensure_lane("0.5.23"), volume, f"--volume={volume}:{CRASH}:ro", tp=1) as server:
        serves_and_says(server, f"crash folder {CRASH}/test-host cannot be used (Read-only file system: ")
        incident_elsewhere(docker, server, temporary)
    assert list(volume.iterdir()) == []


def test_one_that_is_removed_meanwhile(docker: DockerHost, volume: Path, temporary: Path) -> None:
    with docker.serve(ensure_lane("0.5.23"), volume, tp=1) as server:
        server.wait_ready()
        assert problems_told(server) == []
        shutil.rmtree(volume)
        serves_and_says(server, "cannot be kept (No such file or directory)")
        incident_elsewhere(docker, server, temporary)
