"""On a real Slurm with two nodes: a job's nodes are found, and what they are asked ends in time, or is ended."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

from sglang_crashkit.collect.gather import Limits, NodeRun, Transport, run_on_nodes
from sglang_crashkit.collect.via import job_via
from sglang_crashkit.errors import NothingToDoError
from slurm.cluster import LONG_S, NODES, Cluster
from unit.support.waiting import wait_until

pytestmark = pytest.mark.live

#: Long enough for a node that answers, on a loaded machine; longer than is waited for what a step does meanwhile.
ENOUGH_SECS = 2 * LONG_S


def run_all(
    job: Transport, folder: Path, script: str, *, node_secs: float = ENOUGH_SECS, at_once: int = 8
) -> dict[str, NodeRun]:
    """Run a script on each node; return what became of it, in the order in which they ended."""
    runs: list[NodeRun] = []
    commands = {node: ["bash", "-c", script] for node in job.nodes}
    run_on_nodes(job, commands, runs.append, folder, Limits(at_once, node_secs))
    assert sorted(run.node for run in runs) == sorted(job.nodes)
    return {run.node: run for run in runs}


def wait_until_gone(cluster: Cluster, job: str, node: str) -> None:
    wait_until(
        lambda: not [step for step in cluster.steps(job) if step.endswith(f"-{node}")], "its step is gone", LONG_S
    )


def test_the_nodes_of_a_job_are_found(job: str) -> None:
    assert job_via(job).nodes == NODES


def test_a_missing_or_ended_job_is_nothing_to_do(cluster: Cluster) -> None:
    with pytest.raises(NothingToDoError, match="Slurm knows no job 99999, or no longer"):
        job_via("99999")
    job = cluster.allocate()
    cluster.cancel(job)
    with pytest.raises(NothingToDoError, match=f"job {job} does not run: CANCELLED") as error:
        job_via(job)
    assert error.value.next_step == f"scontrol show job {job}"


def test_nodes_are_asked_beside_a_step_with_all_their_resources(cluster: Cluster, job: str, tmp_path: Path) -> None:
    ready = [tmp_path / f"{node}.ready" for node in NODES]
    work = f"touch {tmp_path}/$SLURMD_NODENAME.ready; sleep 600"
    everything = ["--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=4", "--mem=0", "--exclusive"]
    with cluster.start(["srun", f"--jobid={job}", *everything, "bash", "-c", work]):
        wait_until(lambda: all(path.exists() for path in ready), "the workers run", LONG_S)
        found = job_via(job)
        script = "echo $SLURMD_NODENAME; echo to the log >&2; exit $SLURM_NTASKS"
        runs = run_all(found, tmp_path, script)
    assert {node: (run.status, run.output.split()) for node, run in runs.items()} == {
        node: (1, [node]) for node in NODES
    }
    for node in NODES:
        assert "to the log" in (tmp_path / node / found.log).read_text()


def test_no_more_than_asked_for_run_at_once(job: str, tmp_path: Path) -> None:
    found = job_via(job)
    script = f"mkdir {tmp_path}/alone && sleep 0.5 && rmdir {tmp_path}/alone"
    runs = run_all(found, tmp_path, script, at_once=1)
    assert [run.status for run in runs.values()] == [0, 0]


def test_what_does_not_end_in_time_is_ended_remotely(cluster: Cluster, job: str, tmp_path: Path) -> None:
    found = job_via(job)
    # One ends and the other never does, whatever it is asked.
    script = f"trap '' TERM INT; echo $$ >{tmp_path}/$SLURMD_NODENAME.pid; [ $SLURMD_NODENAME = n1 ] || sleep 600"
    runs = run_all(found, tmp_path, script, node_secs=30)
    assert (runs["n1"].status, runs["n1"].late) == (0, False)
    assert (runs["n2"].status, runs["n2"].late, runs["n2"].problem) == (None, True, "no answer within 30 s")
    pid = int((tmp_path / "n2.pid").read_text())
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), "the process on n2 is gone", LONG_S)
    wait_until_gone(cluster, job, "n2")


@pytest.mark.matrix
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_node_without_a_slurmd_that_answers_delays_no_other(
    cluster: Cluster, job: str, tmp_path: Path, number: signal.Signals
) -> None:
    found = job_via(job)
    cluster.stop_node("n2", number)
    try:
        runs = run_all(found, tmp_path, "echo here", node_secs=15)
    finally:
        cluster.start_node("n2")
    assert (runs["n1"].status, runs["n1"].output) == (0, "here\n")
    assert list(runs) == ["n1", "n2"]
    # srun may give up by itself before.
    assert runs["n2"].late or "Application launch failed" in runs["n2"].errors
    assert runs["n2"].status != 0


def test_an_interruption_ends_what_runs_and_keeps_what_was_had(cluster: Cluster, job: str, tmp_path: Path) -> None:
    found = job_via(job)
    script = f"echo $SLURMD_NODENAME; touch {tmp_path}/$SLURMD_NODENAME.ready; [ $SLURMD_NODENAME = n1 ] || sleep 600"

    def interrupt() -> None:
        wait_until(lambda: had and (tmp_path / "n2.ready").exists(), "one has ended, the other runs", LONG_S)
        os.kill(os.getpid(), signal.SIGINT)

    had: dict[str, NodeRun] = {}
    thread = threading.Thread(target=interrupt)
    thread.start()
    commands = {node: ["bash", "-c", script] for node in found.nodes}
    interrupted = run_on_nodes(
        found, commands, lambda run: had.update({run.node: run}), tmp_path, Limits(8, ENOUGH_SECS)
    )
    thread.join(LONG_S)
    assert interrupted is not None
    assert (had["n1"].status, had["n1"].output) == (0, "n1\n")
    assert (had["n2"].status, had["n2"].problem) == (None, "interrupted")
    wait_until_gone(cluster, job, "n2")
