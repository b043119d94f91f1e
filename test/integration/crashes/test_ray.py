"""Ranks that are Ray's actors, of a cluster that is there before the server: their crashes and hangs are told."""

from __future__ import annotations

import json
import os
import re
import signal
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from integration.crashes.whole import assert_told, journaled
from integration.faults import RAISE_SIGNAL, SITE_CODE, TP1
from integration.import_hook import write_site
from integration.scenario import (
    EXIT_TIMEOUT_S,
    IN_FLIGHT_S,
    PATIENCE,
    Sent,
    ask,
    journaled_rids,
    left_of,
    stopped,
    wait_for_incident,
    whole_incidents,
)
from lanelib.lanes import ensure_lane
from lanelib.procs import tree_of
from lanelib.servers import ManagedProcess, command_of, free_port, parallel_env
from sglang_crashkit.incident.store import StoredIncident, find_incidents
from unit.support.waiting import wait_until

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]

RELEASE = "0.5.23"
HANG_SECS = 5.0
#: A server that starts may be told of, too.
TOLD_S, NOTICED_S = 180.0, 60.0
#: Ray starts its daemon and the actors as they are asked for; what is in its environment is in theirs.
CLUSTER = """
import sys, time, ray
ray.init(num_gpus=2, num_cpus=4, include_dashboard=False, _temp_dir=sys.argv[1])
print("cluster", ray.get_runtime_context().gcs_address, flush=True)
time.sleep(10_000)
"""
SERVER = """
import runpy, ray
ray.init(address={address!r})
runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
"""
#: There is no GPU here, and each actor sets its own.
CPU = "def change(module):\n    module.set_device = lambda *_: None\n"
SENT = Sent("in-flight", "Once upon a time")


@contextmanager
def serving(
    folder: Path, *, cpu: str = CPU, env: Mapping[str, str] | None = None
) -> Iterator[tuple[ManagedProcess, ManagedProcess]]:
    """A cluster, and a server of two ranks in it; that it is ready is not waited for."""
    lane, crash_folder = ensure_lane(RELEASE), folder / "crash"
    env = lane.serve_env() | parallel_env(lane, tp=2, dp=1) | PATIENCE | dict(env or {})
    env |= {"SGLANG_CRASHKIT_HANG_SECS": str(HANG_SECS), "RAY_DEDUP_LOGS": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    site = write_site(folder, SITE_CODE + cpu, "torch.cuda")
    # The path of a socket may have so many bytes only.
    with (
        tempfile.TemporaryDirectory(prefix="ck-ray-") as short,
        ManagedProcess(
            "ray-cluster",
            [lane.python, "-c", CLUSTER, short],
            env=env | site,
            host="127.0.0.1",
            port=free_port(),
        ) as cluster,
    ):
        wait_until(lambda: "\ncluster " in f"\n{cluster.log_path.read_text()}", "the cluster is up", EXIT_TIMEOUT_S)
        address = re.findall(r"^cluster (\S+)", cluster.log_path.read_text(), re.MULTILINE)[0]
        script, port = folder / "server.py", free_port()
        script.write_text(SERVER.format(address=address))
        argv = command_of(lane, port, tp=2)
        argv[1:3] = [script]
        argv += ["--use-ray", "--nccl-port", str(free_port()), "--crash-dump-folder", str(crash_folder)]
        with ManagedProcess(f"ray-{lane.name}", argv, env=env | site, host="127.0.0.1", port=port) as server:
            yield server, cluster


def rank_of(server: ManagedProcess, number: int) -> int:
    """Return the pid of the actor that is a rank, as the server's log has it."""
    log = server.log_path.read_text(errors="replace")
    return int(re.findall(rf"\(SchedulerActor pid=(\d+)\).* TP{number}\]", log)[0])


def ask_one(server: ManagedProcess) -> None:
    """Have one request in flight."""
    ask(server, SENT)
    wait_until(lambda: SENT.rid in journaled_rids(server.pid), "it is in flight", IN_FLIGHT_S)


def first_failure(stored: StoredIncident) -> Any:
    return stored.document["verdict"]["first_failure"]


def test_a_stopped_and_a_killed_rank_are_told_with_stacks_and_requests(tmp_path: Path) -> None:
    folder = tmp_path / "crash"
    with serving(tmp_path) as (server, _):
        server.wait_ready()
        # GIVEN a rank that is none of the server's own children
        rank = rank_of(server, 1)
        assert rank not in {process.pid for process in tree_of(server.pid)}
        # WHEN one stops while it serves
        ask_one(server)
        with stopped(rank):
            hang = wait_for_incident(folder, TOLD_S)
        # WHEN it is killed
        os.kill(rank, signal.SIGKILL)
        wait_until(lambda: len(whole_incidents(folder)) == 2, "its end", NOTICED_S)
        killed = wait_for_incident(folder, TOLD_S)
        # THEN the server is left to upstream, which lets it live
        assert server.popen.poll() is None
    assert (hang.document["kind"], first_failure(hang)["title"]) == ("hang", TP1)
    assert (killed.document["kind"], first_failure(killed)["title"]) == ("killed", TP1)
    assert_told(killed.document, killed.path, {rank})
    assert journaled(killed.document, killed.path, "unfinished") == {SENT.rid: SENT.text}


@pytest.mark.matrix
def test_an_end_that_is_asked_for_leaves_no_incident(tmp_path: Path) -> None:
    with serving(tmp_path) as (server, cluster):
        server.wait_ready()
        actors = {rank_of(server, number) for number in (0, 1)}
        server.terminate()
        assert server.popen.wait(EXIT_TIMEOUT_S) == 0
        assert left_of([server], []) == []
        wait_until(lambda: not actors & {process.pid for process in tree_of(cluster.pid)}, "the actors end", NOTICED_S)
    assert find_incidents(tmp_path / "crash") == []


@pytest.mark.matrix
def test_an_actor_on_another_node_is_told_of_by_a_handler_of_its_own(tmp_path: Path) -> None:
    # GIVEN a cluster whose machine seems to be another one
    elsewhere = CPU + "if 'ray/_private/workers' in ' '.join(sys.orig_argv):\n"
    elsewhere += "    from sglang_crashkit.kernel import procfs\n    procfs.boot_id = lambda: 'another'\n"
    with serving(tmp_path, cpu=elsewhere) as (server, _):
        server.wait_ready()
        rank = rank_of(server, 1)
        os.kill(rank, signal.SIGKILL)
        kinds = {"killed": rank, "exception": rank_of(server, 0)}
        # THEN each rank is the root of an incident: one of its end, one of the connection that it lost
        wait_for_incident(tmp_path / "crash", TOLD_S)
        wait_until(lambda: kinds == roots(tmp_path / "crash"), "both are told", NOTICED_S)


def roots(folder: Path) -> dict[str, int]:
    """Return the main process of each whole incident, by its kind."""
    documents = [one.document or {} for one in whole_incidents(folder)]
    return {document["kind"]: document["server"]["pid"] for document in documents}


@pytest.mark.matrix
def test_a_rank_that_raises_is_told_with_its_traceback(tmp_path: Path) -> None:
    with serving(tmp_path) as (server, _):
        server.wait_ready()
        ask_one(server)
        os.kill(rank_of(server, 1), RAISE_SIGNAL)
        stored = wait_for_incident(tmp_path / "crash", TOLD_S)
    assert (stored.document["kind"], first_failure(stored)["title"]) == ("exception", TP1)
    assert "asked to raise" in json.dumps(stored.document["verdict"])


@pytest.mark.matrix
def test_ranks_that_fail_as_they_begin_to_serve_are_told(tmp_path: Path) -> None:
    # Where an actor cannot have its GPU, its constructor succeeds and its event loop does not begin.
    refuse = "def change(module):\n    def set_device(*_):\n        raise RuntimeError('no such device')\n"
    with serving(tmp_path, cpu=refuse + "    module.set_device = set_device\n") as _:
        stored = wait_for_incident(tmp_path / "crash", TOLD_S)
    assert stored.document["kind"] == "exception"
    assert "no such device" in json.dumps(stored.document["verdict"])


@pytest.mark.matrix
def test_a_start_whose_actor_fails_is_a_failed_start(tmp_path: Path) -> None:
    with serving(tmp_path, env={"SGLANG_USE_CPU_ENGINE": "0"}) as (server, _cluster):
        status = server.popen.wait(EXIT_TIMEOUT_S)
        stored = wait_for_incident(tmp_path / "crash", TOLD_S)
    assert status != 0
    assert first_failure(stored)["title"].startswith("sglang::scheduler_TP")
