"""Two nodes of one server on one machine: each ends with its own ranks, and says whose failure it was."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import urllib.error
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from integration.scenario import RELEASES
from lanelib.lanes import ensure_lane
from lanelib.managed import free_port, wait_all_ready
from lanelib.servers import Server
from sglang_crashkit.core import procfs
from sglang_crashkit.core.exit_status import ServerExit
from sglang_crashkit.core.incident_store import find_incidents

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]

RANKS = ("sglang::scheduler_TP0", "sglang::scheduler_TP1")
TITLE_TIMEOUT_S = 400.0
EXIT_TIMEOUT_S = 90.0
#: Upstream's node of rank 1 is there 5 s later, and ends with 0.
AT_ONCE_S = 4.0


@dataclass(frozen=True)
class Node:
    """What is left of one node.

    Attributes:
        status: its main process's exit status, negative for a signal.
        seconds: from the fault to its exit.
        incidents: what each ``incident.json`` below its crash folder holds.
        rank: pid of its scheduler.
        left: its processes that were still there after its main process had gone and 5 s had passed.
        log: what it printed.
    """

    status: int
    seconds: float
    incidents: list[dict[str, Any]]
    rank: int
    left: list[int]
    log: str

    @property
    def incident(self) -> dict[str, Any]:
        """The only incident."""
        assert len(self.incidents) == 1, f"{[found['verdict'] for found in self.incidents]}\n{self.log[-3000:]}"
        return self.incidents[0]


@contextlib.contextmanager
def two_nodes(release: str, folder: Path) -> Iterator[tuple[Server, Server]]:
    """Start both nodes of one server with two ranks."""
    lane, address = ensure_lane(release), f"127.0.0.1:{free_port()}"

    def start(rank: int) -> Server:
        arguments = ["--nnodes", "2", "--node-rank", str(rank), "--dist-init-addr", address]
        arguments += ["--crash-dump-folder", str(folder / str(rank))]
        return Server.start(lane, tp=2, extra_args=arguments, name=f"node{rank}-{release}")

    with start(0) as first, start(1) as second:
        yield first, second


def end_of(nodes: tuple[Server, Server], folder: Path, fault: Callable[[], None]) -> tuple[Node, Node]:
    """Break a server with a request in flight, and gather what is left of each node."""
    pids = [[pid for pid, _title in node.processes()] for node in nodes]
    ranks = [node.pid_of(title) for node, title in zip(nodes, RANKS, strict=True)]
    began = time.monotonic()
    fault()
    seconds = [0.0, 0.0]
    while any(node.popen.poll() is None for node in nodes) and time.monotonic() < began + EXIT_TIMEOUT_S:
        time.sleep(0.02)
        for number, node in enumerate(nodes):
            if seconds[number] == 0.0 and node.popen.poll() is not None:
                seconds[number] = time.monotonic() - began
    deadline = time.monotonic() + 5.0
    while any(is_running(pid) for known in pids for pid in known) and time.monotonic() < deadline:
        time.sleep(0.05)
    first, second = (
        Node(
            status=node.popen.wait(timeout=1),
            seconds=seconds[number],
            incidents=incidents_of(folder / str(number)),
            rank=ranks[number],
            left=[pid for pid in pids[number] if is_running(pid)],
            log=node.log_path.read_text(errors="replace"),
        )
        for number, node in enumerate(nodes)
    )
    return first, second


def is_running(pid: int) -> bool:
    stat = procfs.read_stat(pid)
    return stat is not None and stat.state != "Z"


def incidents_of(folder: Path) -> list[dict[str, Any]]:
    """Return the incidents of a node, once its crash handler has finished them."""
    deadline = time.monotonic() + 10.0
    while True:
        found = find_incidents(folder) if folder.is_dir() else []
        if all(one.finished for one in found) or time.monotonic() > deadline:
            return [one.document or {} for one in found]
        time.sleep(0.1)


def ask(server: Server) -> None:
    """Ask for what takes longer than the test."""

    def generate() -> None:
        with contextlib.suppress(urllib.error.URLError, OSError, ValueError):
            server.generate("Once upon a time", max_new_tokens=4000, timeout_s=EXIT_TIMEOUT_S)

    threading.Thread(target=generate, daemon=True).start()
    time.sleep(1.5)


@pytest.fixture(scope="module", params=RELEASES)
def release(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(scope="module", params=[1, 0], ids=["rank1", "rank0"])
def loss(request: pytest.FixtureRequest, release: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Node, Node]:
    """The node that lost its rank, and the other one."""
    victim, folder = request.param, tmp_path_factory.mktemp("crash")
    with two_nodes(release, folder) as nodes:
        wait_all_ready(nodes)
        ask(nodes[0])
        pid = nodes[victim].pid_of(RANKS[victim])
        both = end_of(nodes, folder, lambda: os.kill(pid, signal.SIGKILL))
    return both[victim], both[1 - victim]


def test_the_node_of_a_killed_rank_ends_at_once_and_says_so(loss: tuple[Node, Node]) -> None:
    victim, _other = loss
    assert victim.status == ServerExit.KILLED, victim.log[-3000:]
    assert victim.left == []
    assert victim.seconds < AT_ONCE_S
    verdict = victim.incident["verdict"]
    assert (verdict["kind"], verdict["first_failure"]["pid"]) == ("signal", victim.rank)


def test_the_other_node_says_that_it_lost_a_peer(loss: tuple[Node, Node]) -> None:
    _victim, other = loss
    assert other.status == ServerExit.LOST_PEER, other.log[-3000:]
    assert other.left == []
    verdict = other.incident["verdict"]
    assert (verdict["kind"], verdict["level"]) == ("lost_peer", "supported")
    assert verdict["first_failure"]["pid"] == other.rank


def test_a_server_that_is_asked_to_end_is_no_failure_of_any_node(release: str, tmp_path: Path) -> None:
    with two_nodes(release, tmp_path) as nodes:
        wait_all_ready(nodes)

        def fault() -> None:
            for node in reversed(nodes):
                os.kill(node.pid, signal.SIGTERM)

        first, second = end_of(nodes, tmp_path, fault)
    assert (second.incidents, first.left, second.left) == ([], [], [])
    if release == "0.5.23":
        assert (first.status, second.status) == (0, 0), second.log[-3000:]
    else:
        # Upstream's node of rank 1 has no handler for SIGTERM: it is gone at once, and the other one, which drains,
        # may lose it before it has ended.
        assert second.status == -signal.SIGTERM
        assert first.status in (0, ServerExit.LOST_PEER), first.log[-3000:]
    assert [one["verdict"]["kind"] for one in first.incidents] == (["lost_peer"] if first.status else [])


def test_a_rank_that_is_killed_on_node_1_while_it_loads_ends_that_node(release: str, tmp_path: Path) -> None:
    with two_nodes(release, tmp_path) as nodes:
        deadline = time.monotonic() + TITLE_TIMEOUT_S
        while (pid := titled(nodes[1], RANKS[1])) is None:
            assert nodes[1].popen.poll() is None, nodes[1].log_tail()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        os.kill(pid, signal.SIGKILL)
        assert nodes[1].popen.wait(timeout=EXIT_TIMEOUT_S) == ServerExit.KILLED
        log = nodes[1].log_path.read_text(errors="replace")
    assert "Rank 0 scheduler died during initialization (exit code: -9)." in log
    incidents = incidents_of(tmp_path / "1")
    assert [one["verdict"]["first_failure"]["pid"] for one in incidents] == [pid]


def titled(server: Server, title: str) -> int | None:
    return next((pid for pid, its in server.processes() if its.split(" ")[0] == title), None)
