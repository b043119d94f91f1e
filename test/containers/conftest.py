from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from containers.docker_host import DockerHost, why_not


@pytest.fixture(scope="session")
def docker() -> Iterator[DockerHost]:
    if reason := why_not():
        pytest.skip(reason)
    with DockerHost() as host:
        yield host


@pytest.fixture
def volume() -> Iterator[Path]:
    """A folder that is mounted into a container, and not below one that only root may enter."""
    yield from _folder()


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A folder for the sockets of a server, whose paths must be short."""
    yield from _folder()


def _folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="ck-"))
    folder.chmod(0o777)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
