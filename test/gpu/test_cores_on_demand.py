"""GPU cores on demand: where the driver's pipe is, what makes it write, and that the process ends by it.

Run on an H200 with driver 580.159.04 and torch 2.11.0+cu130: one byte gives a core in 0.6 s, and the driver then aborts
the process. With ``skip_abort`` it lives, but each CUDA call of it fails from then on. So a core is asked for only
where the server ends (`sglang_crashkit.policy`). After cuda-gdb a server serves on, and its driver writes no core.
"""

from __future__ import annotations

import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpu.gpu_server import READY_S, SCHEDULER, pipes_of, start
from integration.scenario import answers_of
from lanelib.servers import Server
from sglang_crashkit.capture.cuda_core.trigger import TRIGGER, CoreRequest
from sglang_crashkit.capture.debugger import Debugged, debug_all, find_cuda_gdb
from sglang_crashkit.incident.store import find_incidents
from sglang_crashkit.kernel import procfs
from unit.support.waiting import wait_until

pytestmark = [pytest.mark.gpu, pytest.mark.live, pytest.mark.timeout(900)]

CORE_S = 120.0


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {
        "CUDA_ENABLE_USER_TRIGGERED_COREDUMP": "1",
        "CUDA_COREDUMP_FILE": f"{tmp_path}/%h/core.cuda.%t.%p",
        "CUDA_COREDUMP_PIPE": f"{tmp_path}/corepipe.cuda.%h.%p",
    }


@pytest.fixture
def healthy(lane: Any, tmp_path: Path, environ: dict[str, str]) -> Iterator[Server]:
    """Start a server that is well."""
    with start(lane, tmp_path, environ) as server:
        server.wait_ready(READY_S)
        yield server


def test_one_byte_gives_a_core_and_ends_the_process(healthy, environ, tmp_path, findings, read_core):
    pid = healthy.pid_of(SCHEDULER)
    findings["named pipes that the scheduler has open"] = pipes_of(pid)
    answers_of(healthy)
    request = CoreRequest(pid, environ)
    path = request.find_pipes()[0]
    assert stat.S_ISFIFO(path.stat().st_mode)
    assert path.parent == tmp_path
    assert str(path) in pipes_of(pid)
    began = time.monotonic()
    assert len(TRIGGER) == 1

    request.send()
    core = wait_until(request.look, "a core after a write of one byte", CORE_S)

    findings["a write of one byte"] = f"a core after {time.monotonic() - began:.1f} s: {core.name}"
    told = read_core(core, "on-demand")
    assert told is None or len(told.devices) >= 1
    findings["status of the server after a core on demand"] = healthy.popen.wait(CORE_S)
    (incident,) = find_incidents(tmp_path)
    findings["incident after a core on demand"] = incident.name


def test_a_server_serves_on_after_cuda_gdb(healthy, findings):
    if (cuda_gdb := find_cuda_gdb()) is None:
        pytest.skip("cuda-gdb is not installed")
    before, pid = answers_of(healthy), healthy.pid_of(SCHEDULER)
    stat = procfs.read_stat(pid)

    taken: dict[int, Debugged] = {}
    debug_all(cuda_gdb, {pid: stat.start_ticks}, CORE_S, taken.__setitem__)
    debugged = taken[pid]

    printed = f"{len(debugged.threads)} threads, kernels {list(debugged.kernels)}"
    findings["cuda-gdb on a server that is well"] = (
        f"{debugged.seconds} s, {printed}, {debugged.problem or 'no problem'}"
    )
    assert answers_of(healthy) == before
    assert healthy.popen.poll() is None
    assert set(procfs.thread_states(pid).values()) <= set("RSD")
