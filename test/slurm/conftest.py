from __future__ import annotations

from collections.abc import Iterator

import pytest

from slurm.cluster import Cluster, why_not


@pytest.fixture(scope="session")
def running_cluster() -> Iterator[Cluster]:
    if reason := why_not():
        pytest.skip(reason)
    with Cluster() as cluster:
        yield cluster


@pytest.fixture
def cluster(running_cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """A Slurm with two nodes, which this process's own clients talk to."""
    for name in ("PATH", "SLURM_CONF"):
        monkeypatch.setenv(name, running_cluster.environ[name])
    return running_cluster


@pytest.fixture
def job(cluster: Cluster) -> Iterator[str]:
    """A job on both nodes, without processes of its own."""
    with cluster.allocate() as job:
        yield job
