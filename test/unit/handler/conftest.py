from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from incident_schema import assert_fits
from unit.support.beating import Beating
from unit.support.launching import Case, watched
from unit.support.server_driver import HOST, Server


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave a whole handler's tests out of ``scripts/test --fast``, but those that are marked as a story."""
    for item in items:
        if "start_server" in getattr(item, "fixturenames", ()) and not item.get_closest_marker("story"):
            item.add_marker(pytest.mark.wide)


@pytest.fixture
def start_server(tmp_path: Path, short_folder: Path) -> Iterator[Callable[..., Server]]:
    """Start a stand-in server with its crash handler; both are gone after the test."""
    servers: list[Server] = []

    def start(**options: Any) -> Server:
        options.setdefault("crash_folder", tmp_path / "crash")
        servers.append(Server(short_folder, **options))
        return servers[-1]

    yield start
    for server in servers:
        server.close()
    for path in tmp_path.glob("crash/*/incidents/*/incident.json"):
        assert_fits(json.loads(path.read_text()))


@pytest.fixture
def start_gpu_server(start_server: Callable[..., Server], tmp_path: Path) -> Callable[..., Server]:
    """Start a stand-in server in the environment that ``--crash-dump-folder`` makes for the CUDA driver, and more."""
    host_folder = tmp_path / "crash" / HOST
    host_folder.mkdir(parents=True, exist_ok=True)
    driver = {
        "CUDA_ENABLE_USER_TRIGGERED_COREDUMP": "1",
        "CUDA_COREDUMP_PIPE": str(tmp_path / "corepipe.cuda.%p"),
        "CUDA_COREDUMP_FILE": str(host_folder / "core.cuda.%t.%p"),
    }
    return lambda **environ: start_server(environ=driver | environ)


@pytest.fixture
def launching(tmp_path: Path, short_folder: Path) -> Iterator[Case]:
    """A server that starts, watched by a crash handler in this process."""
    with watched(tmp_path, short_folder) as case:
        case.handler.look()
        yield case


@pytest.fixture(autouse=True)
def beating_closed() -> Iterator[None]:
    yield
    while Beating.made:
        Beating.made.pop().close()


@pytest.fixture(scope="module")
def quiet_server() -> Iterator[Server]:
    """A stand-in server in which nothing happens, and has not when the last test is over."""
    folder = Path(tempfile.mkdtemp(prefix="ck-"))
    try:
        server = Server(folder, crash_folder=folder / "crash")
        try:
            yield server
            assert server.process.poll() is None
            assert server.incidents() == []
        finally:
            server.close()
    finally:
        shutil.rmtree(folder)
