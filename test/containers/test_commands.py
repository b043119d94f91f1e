"""The commands on servers in containers: inside, from the host, over two of them; and what Docker has of stderr."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from containers.docker_host import DockerHost
from containers.left import the_incident
from integration.faults import ABORT_SIGNAL, ABORT_WORDS, TP0, TP1, write_site
from integration.scenario import SCHEDULER, run_kit, stopped
from lanelib.lanes import ensure_lane
from lanelib.servers import wait_all_ready
from sglang_crashkit.errors import ExitCode
from unit.support.waiting import LONG

pytestmark = [pytest.mark.live, pytest.mark.matrix, pytest.mark.timeout(1200)]

#: For a collector on a loaded machine, in seconds.
LONG_S = 240.0
COLLECT = ("collect", "--json", "--snapshots=2", "--interval=0.2")


@dataclass(frozen=True)
class Story:
    """A server with two ranks, of which one is stopped, and a server beside it, each in a container."""

    names: tuple[str, str]  # of the containers
    pids: dict[str, int]  # of the ranks, as they are called outside
    inside: dict[str, Any]  # what ``collect`` printed in the first container
    outside: dict[str, Any]  # what it printed on the host, of that container's server
    both: dict[str, Any]  # what it printed of both containers
    answers: tuple[list[int], list[int]]  # the first server's to the same request before and after
    status: int  # how the first container ended, once a rank had aborted in C++
    incident: dict[str, Any]  # what that left, by itself
    log: str  # what Docker has of the first container's output
    explained: dict[str, Any]  # what ``explain`` prints of the incident and of that log


def document_of(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == ExitCode.DONE, (done.returncode, done.stdout, done.stderr)
    return dict(json.loads(done.stdout))


@pytest.fixture(scope="module")
def folders() -> Iterator[Sequence[Path]]:
    found = [Path(tempfile.mkdtemp(prefix="ck-")) for _ in range(3)]
    for folder in found:
        folder.chmod(0o777)
    yield found
    for folder in found:
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def story(docker: DockerHost, folders: Sequence[Path]) -> Story:
    volume, others_volume, output = folders
    env = write_site(output / "site")
    site = f"--volume={output}/site:{output}/site:ro"
    with (
        docker.serve(ensure_lane("0.5.23"), volume, site, env=env) as one,
        docker.serve(ensure_lane("0.5.23"), others_volume, tp=1) as other,
    ):
        wait_all_ready([one, other])
        pids = {title: one.pid_of(title) for title in (TP0, TP1)} | {SCHEDULER: other.pid_of(SCHEDULER)}
        before = one.generate()["output_ids"]
        with stopped(pids[TP1]):
            inside = document_of(one.execute("sglang-crashkit", *COLLECT, "-o", "/tmp/inside", timeout_s=LONG_S))
            outside = document_of(run_kit(*COLLECT, f"--pid={one.pid}", "-o", str(output / "outside")))
            via = shlex.join(docker.command("exec", "{host}"))
            hosts = f"--hosts={one.name},{other.name}"
            both = document_of(run_kit(*COLLECT, f"--via={via}", hosts, "-o", str(output / "both")))
        after = one.generate(timeout_s=LONG_S)["output_ids"]
        os.kill(pids[TP1], ABORT_SIGNAL)
        status = one.popen.wait(LONG)
        done = subprocess.run(
            docker.command("logs", one.name), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=True, timeout=LONG
        )
        log = done.stdout.decode(errors="replace")
        folder, incident = the_incident(volume)
        explained = document_of(run_kit("explain", "--json", "-", str(folder), input=log))
        names = (one.name, other.name)
        return Story(names, pids, inside, outside, both, (before, after), status, incident, log, explained)


def ranks_of(collected: dict[str, Any]) -> dict[str, set[str]]:
    """Return the states in which each rank was seen."""
    return {process["title"]: set(process["states"]) for process in collected["processes"]}


def test_in_the_container_all_ranks_are_seen_and_the_stopped_one_is_named(story: Story) -> None:
    seen = ranks_of(story.inside)
    assert (seen.keys(), seen[TP1]) == ({TP0, TP1}, {"T"})
    assert story.inside["verdict"]["class"] == "stopped_process"


def test_so_they_are_on_the_host(story: Story) -> None:
    seen = ranks_of(story.outside)
    assert (seen.keys(), seen[TP1]) == ({TP0, TP1}, {"T"})
    assert {process["pid"] for process in story.outside["processes"]} == {story.pids[TP0], story.pids[TP1]}
    assert story.outside["verdict"]["first"].startswith("TP1")


def test_two_containers_are_one_result_with_their_names(story: Story) -> None:
    nodes = {node["node"]: node for node in story.both["nodes"]}
    one, other = story.names
    assert nodes.keys() == {one, other}
    assert ranks_of(nodes[one]).keys() == {TP0, TP1}
    assert ranks_of(nodes[other]).keys() == {SCHEDULER}
    assert story.both["verdict"]["first"] == f"TP1 on {one}"


def test_the_server_serves_as_before(story: Story) -> None:
    before, after = story.answers
    assert before == after


def test_what_cpp_said_as_it_aborted_joins_the_incident(story: Story) -> None:
    assert story.status == 128 + signal.SIGABRT
    assert story.incident["verdict"]["first_failure"]["title"] == TP1
    assert f"what():  {ABORT_WORDS}" in story.log
    assert (story.explained["verdict"]["class"], story.explained["verdict"]["first"]) == ("cuda_fault", "TP1")
    assert any(ABORT_WORDS in line for line in story.explained["verdict"]["because"])
