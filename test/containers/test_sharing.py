"""Servers that share a container, a PID namespace or ``/dev/shm``: the end of one touches nothing of another."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import pytest

from containers.docker_host import DockerHost
from containers.left import after_the_next_start, begin, incidents_of, report_of, the_incident
from integration.crashes.test_process_1 import TWO
from integration.faults import DETOKENIZER
from integration.scenario import SCHEDULER, shared_memory_of
from lanelib.lanes import ensure_lane
from lanelib.procs import title_of, tree_of
from lanelib.servers import free_port, wait_all_ready
from sglang_crashkit.incident.exit_status import ServerExit
from sglang_crashkit.incident.store import find_incidents
from sglang_crashkit.kernel import procfs
from unit.support.server_driver import Server as StandIn
from unit.support.waiting import LONG, wait_until

pytestmark = [pytest.mark.live, pytest.mark.matrix, pytest.mark.timeout(1200)]


def assert_is_of_one_server(document: dict[str, object]) -> None:
    """An incident names its own scheduler and detokenizer, and no other."""
    assert report_of(document, SCHEDULER)["exit"]["signal"] == "SIGKILL"
    assert report_of(document, DETOKENIZER)


def test_two_servers_of_a_pod_with_one_pid_namespace_and_one_shared_memory(
    docker: DockerHost, volume: Path, temporary: Path
) -> None:
    # GIVEN a pod with shareProcessNamespace, whose process 1 only waits
    lane = ensure_lane("0.5.23")
    with docker.beside("--ipc=shareable", "--shm-size=1g") as pod:
        shared = (f"--pid=container:{pod}", f"--ipc=container:{pod}")
        with docker.serve(lane, volume, *shared, tp=1) as one, docker.serve(lane, volume, *shared, tp=1) as other:
            wait_all_ready([one, other])
            begin(one)
            others, segments = {(p.pid, p.started) for p in tree_of(other.pid)}, shared_memory_of(other)
            as_outside = Path(f"/proc/{other.pid}/root/dev/shm")
            os.kill(one.pid_of(SCHEDULER), signal.SIGKILL)
            assert one.popen.wait(LONG) == ServerExit.KILLED
            # THEN the other one serves on with all that it had
            assert other.generate("Hello", timeout_s=LONG)["output_ids"]
            assert others <= {(p.pid, p.started) for p in tree_of(other.pid)}
            assert [name for name in segments if not (as_outside / name).exists()] == []
            _folder, document = the_incident(volume)
            assert_is_of_one_server(document)
            docker.run("stop", f"--time={int(LONG)}", other.name)
    # Nobody vanished.
    assert len(after_the_next_start(volume, temporary)) == 1


def test_a_server_in_the_pid_namespace_of_the_host(docker: DockerHost, volume: Path, temporary: Path) -> None:
    with contextlib.closing(StandIn(temporary, crash_folder=temporary / "crash")) as stand_in:
        with docker.serve(ensure_lane("0.5.23"), volume, "--pid=host", tp=1) as server:
            begin(server)
            os.kill(server.pid_of(SCHEDULER), signal.SIGKILL)
            assert server.popen.wait(LONG) == ServerExit.KILLED
        _folder, document = the_incident(volume)
        assert_is_of_one_server(document)
        assert document["requests"]["unfinished"] == 1
        # A server outside is none of its business.
        assert stand_in.process.poll() is None
        assert all(procfs.read_stat(pid) is not None for pid in stand_in.ranks.values())
        assert incidents_of(temporary / "crash") == []
    assert len(after_the_next_start(volume, temporary)) == 1


def test_two_servers_of_one_container(docker: DockerHost, volume: Path, temporary: Path) -> None:
    port, prefix = free_port(), ("sh", "-c", TWO, "sh")
    lane = ensure_lane("0.5.23")
    with docker.serve(lane, volume, tp=1, prefix=(*prefix, str(port), str(free_port()))) as container:
        container.wait_ready()
        first, container.url = container.url, f"http://127.0.0.1:{port}"
        begin(container)
        (second,) = [pid for pid, title in container.processes() if f"--port {port}" in title and "launch" in title]
        (rank,) = [p.pid for p in tree_of(second) if title_of(p.pid) == SCHEDULER]
        os.kill(rank, signal.SIGKILL)
        container.url = first
        assert container.generate("Hello", timeout_s=LONG)["output_ids"]
        wait_until(lambda: any(one.finished for one in find_incidents(volume)), "the incident is whole")
        _folder, document = the_incident(volume)
        assert_is_of_one_server(document)
        docker.run("stop", f"--time={int(LONG)}", container.name)
    assert len(after_the_next_start(volume, temporary)) == 1
