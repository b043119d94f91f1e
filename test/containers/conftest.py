from __future__ import annotations

from collections.abc import Iterator

import pytest

from containers.docker_host import DockerHost, why_not


@pytest.fixture(scope="session")
def docker() -> Iterator[DockerHost]:
    if reason := why_not():
        pytest.skip(reason)
    with DockerHost() as host:
        yield host
