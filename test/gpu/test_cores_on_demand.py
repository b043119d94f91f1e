"""GPU cores of a server that is well: where the driver's pipe is, what makes it write, and that it serves on after it.

Not run on a GPU so far; see `test_faults_on_gpu`. The tests share one server and run in order: what is least certain
comes last.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gpu.gpu_server import READY_S, SCHEDULER, pipes_of, start
from integration.scenario import answers_of
from lanelib.servers import Server
from sglang_crashkit.capture.cuda_core.trigger import TRIGGER, CoreRequest
from sglang_crashkit.capture.debugger import debug, find_debugger
from sglang_crashkit.incident.store import find_incidents
from sglang_crashkit.kernel import procfs
from unit.support.waiting import wait_until

pytestmark = [pytest.mark.gpu, pytest.mark.live, pytest.mark.timeout(900)]

CORE_S = 120.0
LONG_WRITE = b"1" * (1 << 20)


@dataclass(frozen=True)
class Healthy:
    """A server that is well.

    Attributes:
        server: it.
        folder: its crash folder.
        environ: the variables of GPU cores that it was started with.
    """

    server: Server
    folder: Path
    environ: dict[str, str]

    @property
    def pid(self) -> int:
        """The scheduler's."""
        return self.server.pid_of(SCHEDULER)

    def request(self) -> CoreRequest:
        """Return a core of the scheduler that is not asked for yet."""
        return CoreRequest(self.pid, self.environ)


@pytest.fixture(scope="module")
def healthy(lane: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Healthy]:
    folder = tmp_path_factory.mktemp("healthy")
    environ = {
        "CUDA_ENABLE_USER_TRIGGERED_COREDUMP": "1",
        "CUDA_COREDUMP_FILE": f"{folder}/%h/core.cuda.%t.%p",
        "CUDA_COREDUMP_PIPE": f"{folder}/corepipe.cuda.%h.%p",
    }
    with start(lane, folder, environ) as server:
        server.wait_ready(READY_S)
        yield Healthy(server, folder, environ)


def test_the_pipe_is_where_the_template_says(healthy, findings):
    findings["named pipes that the scheduler has open"] = pipes_of(healthy.pid)

    path = healthy.request().find_pipes()[0]

    findings["pipe"] = path.name
    assert stat.S_ISFIFO(path.stat().st_mode)
    assert path.parent == healthy.folder
    assert str(path) in pipes_of(healthy.pid)


def test_a_server_serves_on_after_a_core(healthy, findings, read_core):
    before = answers_of(healthy.server)
    request, began = healthy.request(), time.monotonic()
    assert len(TRIGGER) == 1

    request.send()
    core = wait_until(request.look, "a core after a write of one byte", CORE_S)

    findings["a write of one byte"] = f"a core after {time.monotonic() - began:.1f} s: {core.name}"
    assert answers_of(healthy.server) == before
    assert healthy.server.popen.poll() is None
    assert find_incidents(healthy.folder) == []
    told = read_core(core, "healthy")
    assert told is None or len(told.devices) >= 1


def test_a_server_serves_on_after_cuda_gdb(healthy, findings):
    debugger, missing = find_debugger()
    if debugger is None or debugger.name != "cuda-gdb":
        pytest.skip(missing)
    before, pid = answers_of(healthy.server), healthy.pid
    stat = procfs.read_stat(pid)
    assert stat is not None

    debugged = debug(debugger, pid, stat.start_ticks, CORE_S)

    printed = f"{len(debugged.threads)} threads, kernels {list(debugged.kernels)}"
    findings["cuda-gdb on a server that is well"] = (
        f"{debugged.seconds} s, {printed}, {debugged.problem or 'no problem'}"
    )
    assert answers_of(healthy.server) == before
    assert healthy.server.popen.poll() is None
    assert set(procfs.thread_states(pid).values()) <= set("RSD")


def test_a_server_serves_on_after_a_long_write(healthy, findings):
    before = answers_of(healthy.server)
    request, taken = healthy.request(), 0
    descriptor = os.open(request.find_pipes()[0], os.O_WRONLY | os.O_NONBLOCK)
    try:
        # A pipe holds 64 KiB, and whether anybody reads more than the first byte is the question.
        os.set_blocking(descriptor, False)
        try:
            while taken < len(LONG_WRITE):
                taken += os.write(descriptor, LONG_WRITE[taken:])
        except BlockingIOError:
            pass
    finally:
        os.close(descriptor)

    def cores() -> set[Path]:
        return set(healthy.folder.glob("*/core.cuda.*"))

    known = cores()
    deadline = time.monotonic() + CORE_S / 4
    while cores() == known and time.monotonic() < deadline:
        time.sleep(0.1)

    findings["a write of 1 MB"] = f"{taken} bytes were taken at once, {len(cores() - known)} cores after it"
    assert taken > 0
    assert answers_of(healthy.server) == before
    assert healthy.server.popen.poll() is None
