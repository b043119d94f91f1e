"""On a real Slurm with two nodes: a job's nodes are found, and what they are asked ends in time, or is ended."""

from __future__ import annotations

import os
import re
import signal
import threading
from pathlib import Path

import pytest

from sglang_crashkit.collect.gather import NodeResult, Transport, gather
from sglang_crashkit.collect.via import job_via
from sglang_crashkit.errors import NothingToDoError
from slurm.cluster import LONG_S, NODES, Cluster
from unit.support.waiting import wait_until

pytestmark = pytest.mark.live

#: Long enough for a node that answers, on a loaded machine; longer than is waited for what a step does meanwhile.
ENOUGH_SECS = 2 * LONG_S


#: The answer of a collector, as the last line of what a script prints.
ANSWERS = """; echo '{"exit_code": 0, "texts": {"node.txt": "'$SLURMD_NODENAME'"}}'"""


def ask(
    job: Transport, folder: Path, script: str, *, node_secs: float = ENOUGH_SECS, at_once: int = 8
) -> dict[str, NodeResult]:
    """Run a script on each node in the place of the collector; return what became of it."""
    result = gather(job, ["bash", "-c", script], folder, lambda _line: None, at_once=at_once, node_secs=node_secs)
    assert result.interrupt is None
    return {one.node: one for one in result.nodes}


def wait_until_gone(cluster: Cluster, job: str, node: str) -> None:
    wait_until(
        lambda: not [step for step in cluster.steps(job) if step.endswith(f"-{node}")], "its step is gone", LONG_S
    )


def test_a_missing_or_ended_job_is_nothing_to_do(cluster: Cluster) -> None:
    with pytest.raises(NothingToDoError, match="Slurm knows no job 99999, or no longer"):
        job_via("99999")
    with cluster.allocate() as job:
        pass
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
        script = "echo to the log >&2; [ $SLURM_NTASKS = 1 ]"
        results = ask(found, tmp_path, f"{script}{ANSWERS.replace(';', ' &&', 1)}")
    assert [one.status for one in results.values()] == [0, 0]
    for node in NODES:
        assert "to the log" in (tmp_path / node / found.log).read_text()
        assert (tmp_path / node / "node.txt").read_text() == node


def test_no_more_than_asked_for_run_at_once(job: str, tmp_path: Path) -> None:
    found = job_via(job)
    script = f"mkdir {tmp_path}/alone && sleep 0.5 && rmdir {tmp_path}/alone || exit{ANSWERS}"
    results = ask(found, tmp_path, script, at_once=1)
    assert [one.status for one in results.values()] == [0, 0]


def test_what_does_not_end_in_time_is_ended_remotely(cluster: Cluster, job: str, tmp_path: Path) -> None:
    found = job_via(job)
    # One ends and the other never does, whatever it is asked.
    script = f"trap '' TERM INT; echo $$ >{tmp_path}/$SLURMD_NODENAME.pid; [ $SLURMD_NODENAME = n1 ] || sleep 600"
    results = ask(found, tmp_path, f"{script}{ANSWERS}", node_secs=30)
    assert (results["n1"].status, results["n2"].status) == (0, None)
    assert results["n2"].problems[0].why.startswith("no answer within 30 s")
    pid = int((tmp_path / "n2.pid").read_text())
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), "the process on n2 is gone", LONG_S)
    wait_until_gone(cluster, job, "n2")


@pytest.mark.matrix
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_node_without_a_slurmd_that_answers_delays_no_other(
    cluster: Cluster, job: str, tmp_path: Path, number: signal.Signals
) -> None:
    found = job_via(job)
    with cluster.without_node("n2", number):
        results = ask(found, tmp_path, f"true{ANSWERS}", node_secs=15)
    assert (results["n1"].status, results["n2"].status) == (0, None)
    # srun may give up by itself before.
    assert re.match(r"no answer within|.*launch failed", results["n2"].problems[0].why)


def test_an_interruption_ends_what_runs_and_keeps_what_was_had(cluster: Cluster, job: str, tmp_path: Path) -> None:
    script = f"touch {tmp_path}/$SLURMD_NODENAME.ready; [ $SLURMD_NODENAME = n1 ] || sleep 600"
    had: list[str] = []

    def interrupt() -> None:
        wait_until(lambda: had and (tmp_path / "n2.ready").exists(), "one has ended, the other runs", LONG_S)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    result = gather(job_via(job), ["bash", "-c", f"{script}{ANSWERS}"], tmp_path, had.append, node_secs=ENOUGH_SECS)
    thread.join(LONG_S)
    assert result.interrupt is not None
    assert [one.status for one in result.nodes] == [0, None]
    assert result.nodes[1].problems[0].why == "interrupted"
    wait_until_gone(cluster, job, "n2")
