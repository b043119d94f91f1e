"""A real SGLang on a GPU that hangs, fails, is killed or stopped: its incident says which kernel it was at.

They passed on an H200 with driver 580.159.04 and torch 2.11.0+cu130; ``scripts/gpu_lane`` prints what it saw below
"what the driver does". cuda-gdb 13.0 died on the core of the illegal access, which 12.4 reads.

A process that was killed has nothing on the GPU any more, and one that is stopped does not read its pipe, so that their
incidents name no kernel but say why.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from gpu.gpu_server import SCHEDULER, break_server
from gpu.kernels import ILLEGAL, ILLEGAL_SIGNAL, SITE_CODE, SPIN, SPIN_SIGNAL
from integration.faults import HANG, UNHEALTHY, send, then_terminate
from integration.import_hook import write_site
from integration.scenario import Wreck
from sglang_crashkit.capture.debugger import find_cuda_gdb

pytestmark = [pytest.mark.gpu, pytest.mark.live, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def hung(lane: Any, tmp_path_factory: pytest.TempPathFactory) -> Wreck:
    """Return what is left of a server with a kernel that never ends, ended as an orchestrator would."""
    folder = tmp_path_factory.mktemp("hung")
    env = write_site(folder / "site", SITE_CODE) | UNHEALTHY
    return break_server(lane, folder / "crash", then_terminate(SCHEDULER, signum=SPIN_SIGNAL), env)


def core_of(left: Wreck) -> Path:
    """Return the core of the scheduler that its incident names."""
    piece = left.evidence(SCHEDULER, "cuda_core")
    assert piece["status"] == "captured", piece
    return left.folder / piece["path"]


def test_the_incident_of_a_hung_kernel_names_it(hung, findings, read_core):
    core = core_of(hung)
    told = read_core(core, "hung")
    findings["name of a core on demand"] = core.name
    findings["seconds that a core on demand took"] = hung.evidence(SCHEDULER, "cuda_core")["seconds"]
    findings["GPU of the hung scheduler"] = hung.report(SCHEDULER)["gpu"]
    findings["timeline of the hung server"] = [
        f"{one['time'][11:23]} {one['event']}" for one in hung.incident["timeline"]
    ]
    pieces = hung.report(SCHEDULER)["evidence"]
    findings["flight recorder of a rank alone"] = [piece for piece in pieces if piece["kind"] == "flight_recorder"]

    assert hung.incident["kind"] in HANG
    assert hung.left == []
    piece = hung.evidence(SCHEDULER, "gpu_kernels")
    if told is None:
        assert piece["status"] == ("skipped" if find_cuda_gdb() is None else "failed")
        assert f"sglang-crashkit core {core.resolve()}" in (hung.folder / "summary.md").read_text()
        return
    assert piece["status"] == "captured"
    assert any(SPIN in kernel.call for kernel in told.kernels)
    assert any(SPIN in line for line in hung.report(SCHEDULER)["gpu"])
    assert SPIN in (hung.folder / "summary.md").read_text()


def test_the_core_is_private_and_lacks_the_gpus_memory(hung):
    core = core_of(hung)

    assert core.stat().st_mode & 0o777 == 0o600
    assert core.stat().st_size < 1 << 30


def test_an_illegal_access_names_the_kernel_and_what_it_did(lane, tmp_path, findings, read_core):
    env = write_site(tmp_path / "site", SITE_CODE)

    left = break_server(lane, tmp_path / "crash", send(SCHEDULER, ILLEGAL_SIGNAL), env)

    report = left.report(SCHEDULER)
    findings["end of a process after an illegal access"] = report["exit"]
    findings["GPU of the scheduler with an illegal access"] = report["gpu"]
    told = read_core(core_of(left), "illegal")
    assert left.incident["kind"] in ("killed", "exited", "exception")
    assert left.incident["verdict"]["first_failure"]["pid"] == left.pids[SCHEDULER]
    if told is not None:
        assert any(ILLEGAL in line for line in report["gpu"])
        assert any(line.startswith("exception:") for line in report["gpu"])


def test_the_incident_of_a_killed_scheduler_names_its_end(lane, tmp_path):
    left = break_server(lane, tmp_path / "crash", send(SCHEDULER, signal.SIGKILL))

    report = left.report(SCHEDULER)
    assert left.incident["kind"] == "killed"
    assert left.incident["verdict"]["first_failure"]["pid"] == left.pids[SCHEDULER]
    assert (report["exit"]["signal"], report["gpu"], left.left) == ("SIGKILL", [], [])
    assert not any(piece["kind"] == "cuda_core" and piece["status"] == "captured" for piece in report["evidence"])


def test_a_stopped_scheduler_has_a_reason_for_no_core(lane, tmp_path):
    left = break_server(lane, tmp_path / "crash", then_terminate(SCHEDULER), UNHEALTHY)

    piece = left.evidence(SCHEDULER, "cuda_core")
    assert left.incident["kind"] in HANG
    assert (piece["status"], left.left) == ("skipped", [])
    assert "stopped" in piece["reason"]


def test_the_flight_recorder_of_a_rank_that_waits_is_read(lane, device, tmp_path):
    if device.count < 2:
        pytest.skip("NCCL takes one rank per GPU, and there is one: no rank can wait for another")
    options = ["--tp", "2"]
    left = break_server(lane, tmp_path / "crash", then_terminate(f"{SCHEDULER}_TP1"), UNHEALTHY, options)

    piece = left.evidence(f"{SCHEDULER}_TP0", "flight_recorder")
    assert piece["status"] == "captured", piece
