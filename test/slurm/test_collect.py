"""One command collects on both nodes of a job of a real Slurm; a node that does not answer is named.

The ranks are no SGLang's, but processes with such a title below a launcher.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from integration.commands.test_collect import Collected, collect
from integration.scenario import run_kit, stopped
from sglang_crashkit.errors import ExitCode
from sglang_crashkit.model.snapshot import parse
from slurm.cluster import LONG_S, NODES, Cluster
from unit.support.targets import make_tool
from unit.support.waiting import wait_until

pytestmark = pytest.mark.live

KIT = (sys.executable, "-m", "sglang_crashkit")
#: Whose the ranks are, so that what else runs on this machine is not collected.
USER = 54321
QUICK = ("--snapshots=2", "--interval=0.2", f"--user={USER}")
#: What launches a rank keeps its environment; the rank's title overwrites it.
LAUNCHER = """
import subprocess, sys
sys.exit(subprocess.call([sys.executable, "-c", sys.argv[2], sys.argv[1]]))
"""
RANK = f"""
import os, sys, time, setproctitle
number, node = os.environ["SLURM_NODEID"], os.environ["SLURMD_NODENAME"]
setproctitle.setproctitle(f"sglang::scheduler_TP{{number}}")
def all_reduce():
    with open(f"{{sys.argv[1]}}/{{node}}.pid", "w") as file:
        os.setuid({USER})
        file.write(f"{{os.getpid()}}\\n")
    time.sleep(600)
all_reduce()
"""


def workers(folder: Path) -> str:
    """Return the line of a job's script that runs a rank on each node."""
    return shlex.join(["srun", "--ntasks-per-node=1", sys.executable, "-c", LAUNCHER, str(folder), RANK])


@dataclass(frozen=True)
class Crowd:
    """A job with a rank on each node."""

    job: str  # its id
    ranks: dict[str, int]  # the pid of the rank on each node


def wait_for_ranks(cluster: Cluster, job: str, folder: Path) -> Crowd:
    paths = {node: folder / f"{node}.pid" for node in NODES}

    def told() -> dict[str, int]:
        return {node: int(path.read_text()) for node, path in paths.items() if path.exists() and path.read_text()}

    return Crowd(job, wait_until(lambda: len(told()) == len(NODES) and told(), "the ranks run", LONG_S))


@pytest.fixture(scope="module")
def crowd(running_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crowd]:
    folder = tmp_path_factory.mktemp("ranks")
    with running_cluster.batch(workers(folder)) as job:
        yield wait_for_ranks(running_cluster, job, folder)


def collect_text(cluster: Cluster, job: str, output: Path) -> subprocess.CompletedProcess[str]:
    """Run ``sglang-crashkit collect`` for a job as a person does."""
    argv = ("collect", f"--slurm-job={job}", *QUICK, f"--output-dir={output}")
    return run_kit(*argv, status=None, env=cluster.environ, timeout_s=LONG_S)


def collect_for(cluster: Cluster, job: str, output: Path, *words: str) -> Collected:
    return collect(output, f"--slurm-job={job}", *QUICK, *words, env=cluster.environ, timeout_s=LONG_S)


def pids_of(found: Collected) -> dict[str, list[int]]:
    return {node["node"]: [process["pid"] for process in node["processes"]] for node in found.document["nodes"]}


def only_on(node: str, command: str, otherwise: str = f'exec {shlex.join(KIT)} "$@"') -> str:
    """Return a command for the nodes that is `command` on one of them, and the kit on the other."""
    script = f"if [ $SLURMD_NODENAME = {node} ]; then {command}; else {otherwise}; fi"
    return shlex.join(["bash", "-c", script, "bash"])


def test_each_rank_is_shown_with_its_node_and_place(cluster: Cluster, crowd: Crowd, tmp_path: Path) -> None:
    with stopped(crowd.ranks["n2"]):
        done = collect_text(cluster, crowd.job, tmp_path)
    lines = [line.split()[:6] for line in done.stdout.splitlines() if line.startswith(("n1 ", "n2 "))]
    assert lines == [
        ["n1", "TP0", "pid", str(crowd.ranks["n1"]), "S", "all_reduce"],
        ["n2", "TP1", "pid", str(crowd.ranks["n2"]), "T", "all_reduce"],
    ]
    assert any(line.startswith("TP1 on n2 is stopped (state T") for line in done.stdout.splitlines())
    assert f"`kill -CONT {crowd.ranks['n2']}` lets TP1 on n2 continue" in done.stdout
    assert "n2: 1 process (" in done.stderr
    explanation = (tmp_path / "explanation.txt").read_text().splitlines()
    assert explanation[: len(NODES)] == [line for line in done.stdout.splitlines() if line.startswith(("n1 ", "n2 "))]
    # The stacks of both nodes' ranks are merged.
    assert any(re.search(r"n1:\d+ TP0; n2:\d+ TP1: .*all_reduce", line) for line in explanation)


def test_a_node_without_the_tool_is_named_beside_the_result(cluster: Cluster, crowd: Crowd, tmp_path: Path) -> None:
    command = only_on("n2", "exec python3 -I -S -m sglang_crashkit")
    found = collect_for(cluster, crowd.job, tmp_path, f"--remote-command={command}")
    assert found.status == ExitCode.PARTIAL, found.document
    assert pids_of(found) == {"n1": [crowd.ranks["n1"]], "n2": []}
    (problem,) = found.node("n2")["problems"]
    assert "No module named sglang_crashkit" in problem["why"]
    assert "install sglang-crashkit" in problem["next"]


def test_a_node_without_slurmd_is_named_beside_the_others_result(
    cluster: Cluster, crowd: Crowd, tmp_path: Path
) -> None:
    with cluster.without_node("n2"):
        found = collect_for(cluster, crowd.job, tmp_path)
    assert found.status == ExitCode.PARTIAL, found.document
    assert pids_of(found) == {"n1": [crowd.ranks["n1"]], "n2": []}
    (problem,) = found.node("n2")["problems"]
    assert "without a result: " in problem["why"]
    assert problem["next"].endswith("scontrol show node n2")


def test_endless_debuggers_are_called_off_before_nodes_are_given_up(
    cluster: Cluster, crowd: Crowd, tmp_path: Path
) -> None:
    make_tool(tmp_path / "bin", "echo it began\nexec sleep 600", "cuda-gdb")
    command = shlex.join(["env", f"PATH={tmp_path}/bin:/usr/bin:/bin", *KIT])
    output = tmp_path / "output"
    words = (f"--remote-command={command}", "--node-timeout=60", "--native")
    found = collect_for(cluster, crowd.job, output, *words)
    assert found.status == ExitCode.DONE, found.document
    assert pids_of(found) == {node: [pid] for node, pid in crowd.ranks.items()}
    for node, pid in crowd.ranks.items():
        assert [problem["why"] for problem in found.node(node)["problems"]] == ["cuda-gdb was called off"]
        (text,) = (output / node).glob(f"cudagdb_*_{pid}.txt")
        assert "it began" in text.read_text()


def test_files_come_with_the_answer_of_a_node_with_a_file_system_of_its_own(
    cluster: Cluster, crowd: Crowd, tmp_path: Path
) -> None:
    probe = subprocess.run(["unshare", "--mount", "true"], capture_output=True, text=True, timeout=LONG_S, check=False)
    if probe.returncode != 0:
        pytest.skip(f"no file system of its own can be given to a node here: {probe.stderr.strip()}")
    output = tmp_path / "output"
    own = f'exec unshare --mount bash -c \'mount -t tmpfs own {tmp_path} && exec {shlex.join(KIT)} "$@"\' bash "$@"'
    found = collect_for(cluster, crowd.job, output, f"--remote-command={only_on('n2', own)}")
    assert found.status == ExitCode.DONE, found.document
    assert pids_of(found) == {node: [pid] for node, pid in crowd.ranks.items()}
    assert found.node("n2")["problems"] == []
    (text,) = (output / "n2").glob(f"pyspy_*_{crowd.ranks['n2']}.txt")
    assert "all_reduce" in text.read_text()
    rounds = [parse(path.read_text()) for path in sorted((output / "n2").glob("snapshot_*.json"))]
    assert [[process.pid for process in one.processes] for one in rounds] == [[crowd.ranks["n2"]]] * 2


def test_a_job_without_sglang_is_nothing_to_do(cluster: Cluster, job: str, tmp_path: Path) -> None:
    done = collect_text(cluster, job, tmp_path)
    assert done.returncode == ExitCode.NOTHING, done.stderr
    assert done.stdout.splitlines()[1:3] == ["n1  no process of SGLang", "n2  no process of SGLang"]


def test_the_collector_of_a_job_script_collects_on_both_nodes(cluster: Cluster, tmp_path: Path) -> None:
    log_dir, ranks = tmp_path / "logs", tmp_path / "ranks"
    ranks.mkdir()
    config = tmp_path / "job.yaml"
    config.write_text("name: some-job\ndebug:\n  enabled: true\n  wait_seconds: 1\n")
    collector = ["collect", f"--config={config}", f"--log-dir={log_dir}", *QUICK]
    beside = shlex.join(["srun", "--overlap", "--ntasks-per-node=1", *KIT, *collector])
    until = f"until [ -s {ranks}/n1.pid ] && [ -s {ranks}/n2.pid ]; do sleep 0.1; done"
    script = textwrap.dedent(f"""
        {workers(ranks)} &
        {until}
        {beside} &
        wait %2
        touch {tmp_path}/collected
        wait
    """)
    with cluster.batch(script) as job:
        crowd = wait_for_ranks(cluster, job, ranks)
        wait_until((tmp_path / "collected").exists, f"it has collected\n{cluster.logs()}", LONG_S)
        found = {path.name.rpartition("_")[2] for path in (log_dir / "backtraces").glob("pyspy_*.txt")}
        assert found == {f"{pid}.txt" for pid in crowd.ranks.values()}, cluster.logs()
