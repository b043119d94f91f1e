"""Slurm's own ``srun --container``: a real server in an OCI bundle, which runc runs."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from containers.docker_host import base_of
from containers.left import stack_of, the_incident
from integration.scenario import SCHEDULER, run_kit, serving
from lanelib.lanes import ensure_lane
from lanelib.paths import ROOT
from sglang_crashkit.incident.exit_status import ServerExit
from sglang_crashkit.kernel.discovery import Place
from slurm.cluster import LONG_S, Cluster
from slurm.test_two_nodes import rank_on

pytestmark = [
    pytest.mark.live,
    pytest.mark.matrix,
    pytest.mark.timeout(900),
    pytest.mark.skipif(shutil.which("runc", path="/usr/sbin:/usr/bin") is None, reason="no runc; apt-get install runc"),
]

SYSTEM = [Path(f"/{name}") for name in ("usr", "lib", "lib64", "bin", "sbin", "etc")]


@pytest.fixture
def volume() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="ck-"))
    yield folder
    shutil.rmtree(folder)


def test_a_rank_that_is_killed_ends_the_step_with_a_telling_status(
    cluster: Cluster, volume: Path, tmp_path: Path
) -> None:
    lane = ensure_lane("0.5.23")
    bundle = cluster.bundle([volume, Path("/tmp")], [*SYSTEM, ROOT, base_of(lane)])
    environ = {name: cluster.environ[name] for name in ("PATH", "SLURM_CONF")}
    with cluster.allocate(nodes=1) as job:
        step = ["srun", "--overlap", f"--jobid={job}", "--ntasks=1", f"--container={bundle}"]
        with serving(lane, volume, env=environ, name="slurm-oci", prefix=step) as server:
            # Nothing in such a container names the node.
            rank = rank_on(Place(job, ""), SCHEDULER)
            # The login node sees into the container of the job.
            argv = ("collect", f"--slurm-job={job}", "--json", "--snapshots=2", "--interval=0.2", "-o", tmp_path)
            done = run_kit(*argv, env=cluster.environ, timeout_s=LONG_S)
            (node,) = json.loads(done.stdout)["nodes"]
            assert [process["pid"] for process in node["processes"]] == [rank]
            os.kill(rank, signal.SIGKILL)
            assert server.popen.wait(LONG_S) == ServerExit.KILLED
    _folder, document = the_incident(volume)
    assert document["verdict"]["first_failure"]["title"] == SCHEDULER
    assert stack_of(document, "sglang::detokenizer")["status"] == "captured"
