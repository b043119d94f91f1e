"""A process of a server in a container raises, or is killed from inside: the container's end, and its volume."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from containers.docker_host import DockerHost
from containers.left import after_the_next_start, begin, report_of, stack_of, the_incident
from integration.faults import RAISE_SIGNAL, TP0, TP1, write_site
from lanelib.lanes import ensure_lane
from sglang_crashkit.incident.exit_status import ServerExit

pytestmark = [pytest.mark.live, pytest.mark.matrix, pytest.mark.timeout(900)]

#: Where Kubernetes gives a container the file of its termination message.
MESSAGE = "/dev/termination-log"


def test_a_rank_that_raises_is_in_the_status_and_in_the_termination_message(
    docker: DockerHost, volume: Path, temporary: Path
) -> None:
    message = temporary / "termination-log"
    message.touch()
    env = write_site(temporary / "site")
    options = [f"--volume={temporary}/site:{temporary}/site:ro", f"--volume={message}:{MESSAGE}"]
    with docker.serve(ensure_lane("0.5.23"), volume, *options, env=env) as server:
        begin(server)
        # The kernel keeps process 1 from what is sent inside its container, SIGKILL included.
        assert server.execute("kill", "-KILL", "1").returncode == 0
        os.kill(server.pid_of(TP1), RAISE_SIGNAL)
        assert server.popen.wait(120) == ServerExit.RAISED
        assert server.state("ExitCode") == str(int(ServerExit.RAISED))
    folder, document = the_incident(volume)
    assert document["verdict"]["first_failure"]["title"] == TP1
    assert "RuntimeError: asked to raise" in document["verdict"]["text"]
    assert stack_of(document, TP0)["status"] == "captured"
    exceptions = [piece for piece in report_of(document, TP1)["evidence"] if piece["kind"] == "exception"]
    assert [piece["status"] for piece in exceptions] == ["captured"]
    assert folder.stat().st_uid == os.geteuid()
    # As the container has it; what is read of it is the pod's status.
    assert document["verdict"]["text"] in message.read_text()
    assert folder.name in message.read_text()


def test_below_an_init_a_killed_main_process_ends_the_container_and_the_next_start_tells(
    docker: DockerHost, volume: Path, temporary: Path
) -> None:
    with docker.serve(ensure_lane("0.5.23"), volume, "--init", tp=1) as server:
        begin(server)
        (inside,) = server.execute("pgrep", "--full", "--oldest", "^[^ ]*python -m sglang.launch_server").stdout.split()
        assert inside != "1"
        assert server.execute("kill", "-KILL", inside).returncode == 0
        # As without the kit: the init hands on how its child ended, and the kernel kills whatever is left.
        assert server.popen.wait(120) == 137
        assert server.state("OOMKilled") == "false"
    # THEN the next start tells of it once, whether or not its incident was begun in the moment that was left
    (stored,) = after_the_next_start(volume, temporary)
    assert stored.document is not None
    assert (stored.document["kind"], stored.document["complete"]) in [("vanished", True), ("killed", False)]
    for begun in volume.glob("*/incidents/.partial-*"):
        os.utime(begun, (1.0, 1.0))
    assert [one.path for one in after_the_next_start(volume, temporary)] == [stored.path]
    assert list(volume.glob("*/incidents/.*")) == []
