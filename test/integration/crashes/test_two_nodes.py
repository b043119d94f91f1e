"""Two nodes of one server on one machine: each ends with its own ranks, and says whose failure it was."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from integration.crashes.whole import assert_ends, assert_present, assert_told, assert_whole
from integration.faults import TP0, TP1
from integration.scenario import (
    PATIENCE,
    Sent,
    Wreck,
    ask_in_flight,
    incidents_of,
    left_of,
    members_of,
    rank_that_starts,
    wreck,
)
from lanelib.lanes import ensure_lane
from lanelib.servers import Server, free_port, wait_all_ready
from sglang_crashkit.cli.main import main
from sglang_crashkit.errors import ExitCode
from sglang_crashkit.incident.exit_status import ServerExit
from unit.support.waiting import wait_until

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]

RANKS = (TP0, TP1)
TITLE_TIMEOUT_S = 400.0
EXIT_TIMEOUT_S = 90.0
#: A machine that is not busy needs 4 s. Upstream's node of rank 1 is there then, and ends with 0 whenever it does.
AT_ONCE_S = 20.0


@contextlib.contextmanager
def two_nodes(release: str, folder: Path) -> Iterator[tuple[Server, Server]]:
    """Start both nodes of one server with two ranks."""
    lane, address = ensure_lane(release), f"127.0.0.1:{free_port()}"

    def start(rank: int) -> Server:
        arguments = ["--nnodes", "2", "--node-rank", str(rank), "--dist-init-addr", address]
        arguments += ["--crash-dump-folder", str(folder / str(rank))]
        return Server.start(lane, tp=2, extra_args=arguments, env=PATIENCE, name=f"node{rank}-{release}")

    with start(0) as first, start(1) as second:
        yield first, second


def end_of(
    nodes: tuple[Server, Server], folder: Path, fault: Callable[[], None], sent: Sequence[Sent] = ()
) -> tuple[Wreck, Wreck]:
    """Break a server, and gather what is left of each node; `sent` are the requests that the first one works on."""
    members = [members_of(node) for node in nodes]
    ranks = [node.pid_of(title) for node, title in zip(nodes, RANKS, strict=True)]
    began = time.monotonic()
    fault()
    with ThreadPoolExecutor(len(nodes)) as pool:
        ends = [*pool.map(lambda node: (node.popen.wait(EXIT_TIMEOUT_S), time.monotonic() - began), nodes)]
    folders = [folder / str(number) for number in range(len(nodes))]
    wait_until(
        lambda: all(one.finished for each in folders for one in incidents_of(each)),
        "the crash handlers have finished their incidents",
        EXIT_TIMEOUT_S,
    )
    first, second = (
        Wreck(
            crash_folder=folders[number],
            status=ends[number][0],
            incidents=[(one.path, one.document or {}) for one in incidents_of(folders[number])],
            members=members[number],
            pids={RANKS[number]: ranks[number]},
            sent=[] if number else list(sent),
            left=left_of([node], [member.process for member in members[number]]),
            log=node.log_path.read_text(errors="replace"),
            seconds_to_exit=ends[number][1],
        )
        for number, node in enumerate(nodes)
    )
    return first, second


@pytest.fixture(scope="module", params=[1, pytest.param(0, marks=pytest.mark.matrix)], ids=["rank1", "rank0"])
def loss(request: pytest.FixtureRequest, release: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Wreck, Wreck]:
    """The node that lost its rank, and the other one."""
    victim, folder = request.param, tmp_path_factory.mktemp("crash")
    with two_nodes(release, folder) as nodes:
        wait_all_ready(nodes)
        sent = Sent("in-flight", "Once upon a time")
        ask_in_flight(nodes[0], sent)
        pid = nodes[victim].pid_of(RANKS[victim])
        both = end_of(nodes, folder, lambda: os.kill(pid, signal.SIGKILL), [sent])
    return both[victim], both[1 - victim]


def test_the_node_of_a_killed_rank_ends_at_once(loss: tuple[Wreck, Wreck]) -> None:
    victim, _other = loss
    assert victim.status == ServerExit.KILLED, victim.log[-3000:]
    assert victim.left == []
    assert victim.seconds_to_exit < AT_ONCE_S
    verdict, ((title, pid),) = victim.incident["verdict"], victim.pids.items()
    assert (verdict["kind"], verdict["first_failure"]["pid"]) == ("signal", pid)
    assert_whole(victim, {title: ("signal", "SIGKILL")})


def test_the_other_node_says_that_it_lost_a_peer(loss: tuple[Wreck, Wreck]) -> None:
    _victim, other = loss
    assert other.status == ServerExit.LOST_PEER, other.log[-3000:]
    assert other.left == []
    verdict = other.incident["verdict"]
    assert (verdict["kind"], verdict["level"]) == ("lost_peer", "supported")
    assert [verdict["first_failure"]["pid"]] == [*other.pids.values()]
    assert_whole(other)


def test_both_incidents_together_name_who_was_first(
    loss: tuple[Wreck, Wreck], capsys: pytest.CaptureFixture[str]
) -> None:
    victim, other = loss
    folders = [str(node.incidents[0][0].parents[1]) for node in (other, victim)]
    assert main(["explain", *folders, "--json"]) == ExitCode.DONE
    verdict = json.loads(capsys.readouterr().out)["verdict"]
    # Where the other node lost the connection before the kernel told of the death, it is no more than supported.
    assert verdict["class"] == "killed"
    # SGLang's title of the one that was killed.
    assert victim.pids.keys() == {f"sglang::scheduler_{verdict['first']}"}


@pytest.mark.matrix
def test_an_orderly_shutdown_is_no_failure_of_any_node(release: str, tmp_path: Path) -> None:
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
    verdicts = [document["verdict"]["kind"] for _path, document in first.incidents]
    assert verdicts == (["lost_peer"] if first.status else [])


@pytest.mark.matrix
def test_a_rank_killed_on_node_1_while_loading_ends_it(release: str, tmp_path: Path) -> None:
    with two_nodes(release, tmp_path) as nodes:
        pid = rank_that_starts(nodes[1], RANKS[1], TITLE_TIMEOUT_S)
        left = wreck(nodes[1], tmp_path / "1", lambda _node: os.kill(pid, signal.SIGKILL), requests=0)
    assert (left.status, left.left) == (ServerExit.KILLED, [])
    assert "Rank 0 scheduler died during initialization (exit code: -9)." in left.log
    assert left.incident["verdict"]["first_failure"]["pid"] == pid
    assert_present(left.incident, left.members)
    assert_told(left.incident, left.folder, [pid])
    assert_ends(left.incident, {pid: ("signal", "SIGKILL")})
