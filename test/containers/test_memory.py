"""The kernel's OOM killer takes a process of a container that has a limit: whose end it is, and what is said of it."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest

from containers.docker_host import Container, DockerHost
from containers.left import after_the_next_start, begin, incidents_of, report_of, stack_of, the_incident
from integration.faults import HOARD_SIGNAL, START_SIGNAL, TP0, TP1, write_site
from integration.scenario import handler_pid, run_kit
from lanelib.lanes import ensure_lane
from sglang_crashkit.incident.exit_status import OUT_OF_MEMORY, ServerExit
from unit.support.waiting import wait_until, watched_pids

pytestmark = [pytest.mark.live, pytest.mark.matrix, pytest.mark.timeout(900)]

#: More than a server needs, and less than it needs with what a process takes at a signal; with no swap beside it.
LIMIT = ("--memory=5g", "--memory-swap=5g")
HOARD = "hoard = []\nwhile True: hoard.append(b'x' * (64 << 20))"


def serve(docker: DockerHost, volume: Path, temporary: Path, tp: int) -> Container:
    env = write_site(temporary / "site")
    options = (*LIMIT, f"--volume={temporary}/site:{temporary}/site:ro")
    return docker.serve(ensure_lane("0.5.23"), volume, *options, env=env, tp=tp)


def hoard(server: Container, pid: int) -> None:
    """Have a process take memory until the kernel takes one, which is that process."""
    Path(f"/proc/{pid}/oom_score_adj").write_text("1000")
    os.kill(pid, HOARD_SIGNAL)


def let_the_handler_look(server: Container) -> None:
    """Wait until the crash handler has looked at all processes of its server once more."""
    handler, rank = handler_pid(server), server.pid_of(TP0)
    os.kill(rank, START_SIGNAL)
    helper = wait_until(lambda: [pid for pid, title in server.processes() if title == "sleep 600"], "a helper runs")[0]
    wait_until(lambda: helper in watched_pids(handler), "it is seen")
    os.kill(helper, signal.SIGKILL)
    wait_until(lambda: not {helper, -1} & watched_pids(handler), "it is let go of")


def test_a_rank_is_taken(docker: DockerHost, volume: Path, temporary: Path) -> None:
    with serve(docker, volume, temporary, 2) as server:
        begin(server)
        hoard(server, server.pid_of(TP1))
        assert server.popen.wait(120) == OUT_OF_MEMORY
        assert (server.state("ExitCode"), server.state("OOMKilled")) == (str(OUT_OF_MEMORY), "true")
    folder, document = the_incident(volume)
    assert document["verdict"]["first_failure"]["title"] == TP1
    assert (document["verdict"]["kind"], document["verdict"]["level"]) == ("oom_kill", "established")
    assert (document["cause"]["class"], document["cause"]["level"]) == ("host_oom", "established")
    assert report_of(document, TP1)["exit"]["cause"] == "oom_kill"
    assert stack_of(document, TP0)["status"] == "captured"
    assert "of 5.0 GiB (at most 5.0), 1 OOM kill" in (folder / "summary.md").read_text()


def test_the_main_process_is_taken(docker: DockerHost, volume: Path, temporary: Path) -> None:
    with serve(docker, volume, temporary, 1) as server:
        begin(server)
        hoard(server, server.pid)
        # It is process 1, with which the kernel kills the rest of the container.
        assert server.popen.wait(120) == 137
        assert server.state("OOMKilled") == "true"
        state = docker.run("inspect", "--format={{json .State}}", server.name)
    (stored,) = after_the_next_start(volume, temporary)
    assert stored.document is not None
    assert (stored.document["kind"], stored.document["cause"]["class"]) == ("vanished", "vanished")
    # Docker says what the limit was to the container; the kernel's own words have who and how much.
    (temporary / "state").write_text(state)
    verdict = json.loads(run_kit("explain", "--json", stored.path, temporary / "state").stdout)["verdict"]
    assert (verdict["class"], verdict["component"]) == ("host_oom", "cgroup")
    assert re.search(r"Memory cgroup out of memory: Killed process \d+ .*anon-rss:\d+kB", "".join(verdict["because"]))


def test_a_neighbour_is_taken_and_the_server_is_unharmed(docker: DockerHost, volume: Path, temporary: Path) -> None:
    with serve(docker, volume, temporary, 2) as server:
        begin(server, tokens=200)
        script = f'echo 1000 > /proc/self/oom_score_adj; exec python3 -S -c "{HOARD}"'
        assert server.execute("sh", "-c", script).returncode == 137
        assert server.generate("Hello", timeout_s=120)["output_ids"]
        assert incidents_of(volume) == []
        let_the_handler_look(server)
        # WHEN somebody kills a rank
        os.kill(server.pid_of(TP1), signal.SIGKILL)
        assert server.popen.wait(120) == ServerExit.KILLED
    _folder, document = the_incident(volume)
    assert (document["verdict"]["kind"], document["verdict"]["first_failure"]["title"]) == ("signal", TP1)
    assert report_of(document, TP1)["exit"]["cause"] == "signal"
