"""Real SGLang on two nodes of a real Slurm, one rank on each: one hangs, and one command sees both."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from integration.commands.test_collect import Collected, collect
from integration.faults import TP0, TP1
from integration.hangs.hang_story import ask_later
from integration.scenario import stopped
from lanelib.lanes import ensure_lane
from lanelib.servers import Server, free_port, wait_all_ready
from sglang_crashkit.errors import ExitCode
from sglang_crashkit.kernel import procfs
from sglang_crashkit.kernel.discovery import Place, place_of
from sglang_crashkit.model.sample import Sample, main_thread
from sglang_crashkit.model.snapshot import parse
from slurm.cluster import NODES, Cluster
from unit.support.waiting import child

pytestmark = [pytest.mark.live, pytest.mark.timeout(1500)]

#: As published: nothing in the server knows of the kit.
RELEASE = "0.5.23"
RANKS = (TP0, TP1)
READY_TIMEOUT_S = 900.0
COLLECT_TIMEOUT_S = 300.0


@dataclass
class Story:
    """A server whose rank on the second node was stopped with a request in flight."""

    pids: dict[str, int]  # the pid of the rank on each node
    collected: Collected  # what the command left
    answer: list[int]  # the tokens of the request, once the rank went on

    def last(self, name: str) -> Sample:
        """What the last round saw of the rank on a node."""
        path = max((self.collected.folder / name).glob("snapshot_*.json"))
        (found,) = [one for one in parse(path.read_text()).processes if one.pid == self.pids[name]]
        return found


@contextlib.contextmanager
def server_on(cluster: Cluster, job: str) -> Iterator[tuple[Server, Server]]:
    """Run a server with one rank on each node of a job."""
    lane, address = ensure_lane(RELEASE, pristine=True), f"127.0.0.1:{free_port()}"

    def start(number: int) -> Server:
        step = ["srun", "--overlap", f"--jobid={job}", f"--nodelist={NODES[number]}", "--nodes=1", "--ntasks=1"]
        arguments = ["--nnodes", "2", "--node-rank", str(number), "--dist-init-addr", address]
        environ = {name: cluster.environ[name] for name in ("PATH", "SLURM_CONF")}
        name = f"slurm-{NODES[number]}"
        return Server.start(lane, tp=2, extra_args=arguments, env=environ, name=name, prefix=step)

    with start(0) as first, start(1) as second:
        yield first, second


def rank_on(place: Place, title: str) -> int:
    """Return the pid of the rank with that title in a step."""
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    (pid,) = [pid for pid in pids if procfs.read_title(pid) == title and place_of(pid) == place]
    return pid


@pytest.fixture(scope="module")
def story(running_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    cluster, output = running_cluster, tmp_path_factory.mktemp("slurm") / "output"
    with cluster.allocate() as job:
        with server_on(cluster, job) as servers:
            wait_all_ready(servers, READY_TIMEOUT_S)
            pids = {node: rank_on(Place(job, node), title) for node, title in zip(NODES, RANKS, strict=True)}
            # Of no job: another server's rank on the same machine, which is not asked about.
            with child("ready(); pause()", title=RANKS[1]) as other:
                os.kill(other.pid, signal.SIGSTOP)
                with stopped(pids["n2"]):
                    answer = ask_later(servers[0], 8)
                    # Every round of the event loop hands on what came in, so the other rank waits within milliseconds.
                    words = (f"--slurm-job={job}", "--snapshots=2", "--interval=1")
                    collected = collect(output, *words, env=cluster.environ, timeout_s=COLLECT_TIMEOUT_S)
                told = Story(pids, collected, answer())
        yield told


def test_the_ranks_of_both_nodes_are_in_one_result(story: Story) -> None:
    assert story.collected.status == ExitCode.DONE, story.collected.document
    for node, title in zip(NODES, RANKS, strict=True):
        found = {process["pid"]: process["title"] for process in story.collected.node(node)["processes"]}
        assert found[story.pids[node]] == title
        # Both nodes are this machine, and neither has the other's.
        assert not {pid for its, pid in story.pids.items() if its != node} & found.keys()


def test_the_stopped_rank_is_seen_and_the_other_waits(story: Story) -> None:
    states = {one["pid"]: one["states"] for one in story.collected.node("n2")["processes"]}
    assert states[story.pids["n2"]] == ["T", "T"]
    first, second = story.last("n1"), story.last("n2")
    assert (first.ranks, second.ranks) == ({"tp": 0}, {"tp": 1})
    # They are one server's: both name the address at which its nodes meet.
    assert first.rendezvous == second.rendezvous is not None
    thread = main_thread(first.threads, first.pid)
    assert any("distributed_c10d.py" in frame.file for frame in thread.frames)


def test_the_verdict_names_the_rank_and_its_node(story: Story) -> None:
    verdict = story.collected.document["verdict"]
    assert (verdict["class"], verdict["level"], verdict["first"]) == ("stopped_process", "established", "TP1 on n2")
    assert f"`kill -CONT {story.pids['n2']}` lets TP1 on n2 continue" in verdict["next"]


def test_the_stacks_are_in_the_folder_of_each_node(story: Story) -> None:
    for node, pid in story.pids.items():
        (path,) = (story.collected.folder / node).glob(f"pyspy_*_{pid}.txt")
        assert "run_scheduler_process" in path.read_text()


def test_the_server_goes_on_afterwards(story: Story) -> None:
    assert len(story.answer) == 8
