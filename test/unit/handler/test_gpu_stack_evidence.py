"""What cuda-gdb says of a server that hangs: after its cores, in the incident's time, and nobody stays stopped."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_crashkit.capture.debugger import Debugger
from sglang_crashkit.handler.collectors.gpu import stacks
from sglang_crashkit.handler.collectors.gpu.stacks import GpuStacks
from sglang_crashkit.incident.store import StoredIncident
from sglang_crashkit.model.incident import ProcessReport
from unit.handler.driver import HOST, Server, report_of
from unit.waiting import LONG

Start = Callable[..., Server]
#: What cuda-gdb prints of a kernel that hangs, as its manual has it.
LISTING = """
== info cuda kernels
  Kernel Parent Dev Grid Status   SMs Mask GridDim BlockDim Invocation
*      0      -   0   27 Active 0x00000001 (1,1,1) (32,1,1) spin_until(flag=0x7f0000000000)
== thread apply all bt

Thread 1 (Thread 0x7f9043fff6c0 (LWP 7359) "sglang::schedul"):
#0  0x00007f91bef01d3e in cuStreamSynchronize () from /lib/libcuda.so.1
"""


class CudaGdb:
    """A stand-in for cuda-gdb, which notes whom it was run on and what cores there were by then."""

    def __init__(self, folder: Path, cores: Path) -> None:
        self.folder = folder / "cuda"
        self._bin = self.folder / "bin"
        self._bin.mkdir(parents=True)
        self._cores = cores
        self.behaves("cat $HERE/listing")
        (self.folder / "listing").write_text(LISTING)

    def behaves(self, script: str) -> None:
        """Have it do this for process ``$PID``."""
        program = self._bin / "cuda-gdb"
        program.write_text(
            f'#!/bin/sh\nHERE={self.folder}\nwhile [ "$1" != -p ]; do shift; done; PID=$2\n'
            f"cat {self._cores}/core.cuda.* | wc -c > $HERE/$PID.cores\n{script}\n"
        )
        program.chmod(0o755)

    def ran_on(self) -> dict[int, int]:
        """Return the bytes of all cores that there were when it was run, by process."""
        return {int(path.stem): int(path.read_text()) for path in self.folder.glob("*.cores")}


@pytest.fixture
def cuda_gdb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CudaGdb:
    cores = tmp_path / "crash" / HOST
    cores.mkdir(parents=True, exist_ok=True)
    made = CudaGdb(tmp_path, cores)
    monkeypatch.setenv("CUDA_HOME", str(made.folder))
    return made


def hang(server: Server) -> StoredIncident:
    """Have a rank's watchdog end the server, and return the incident."""
    assert server.ask("tell scheduler_TP0 cuda 0.5 1") == "listening"
    # It says who took the stacks, which is upstream's py-spy where the handler takes none.
    assert server.ask("tell scheduler_TP0 watchdog hard") in ("the handler", "upstream's")
    assert server.line() == "sigquit"
    server.process.wait(2 * LONG)
    stored = server.wait_for_the_end()
    assert stored.document["complete"]
    return stored


def pieces_of(stored: StoredIncident, title: str, kind: str = "gpu_stack") -> list[dict[str, Any]]:
    report = report_of(stored.document or {}, title)
    return [piece for piece in report["evidence"] if piece["kind"] == kind]


def test_what_it_prints_is_in_the_incident_of_a_hang(
    start_gpu_server: Start, cuda_gdb: CudaGdb, tmp_path: Path
) -> None:
    server = start_gpu_server()
    stored = hang(server)
    (piece,) = pieces_of(stored, "scheduler_TP0")
    assert (piece["status"], piece["reason"], piece["source"]) == ("captured", None, "cuda-gdb")
    assert (stored.path / piece["path"]).read_text() == LISTING
    assert (stored.path / piece["path"]).stat().st_mode & 0o077 == 0
    # It saw the whole core, and the rank that wrote none was left alone.
    (core,) = (tmp_path / "crash" / HOST).glob("core.cuda.*")
    assert cuda_gdb.ran_on() == {server.ranks["scheduler_TP0"]: core.stat().st_size}
    assert pieces_of(stored, "scheduler_TP1") == []
    events = [entry["event"] for entry in stored.document["timeline"]]
    assert events.index("cuda_cores_asked") < events.index("gpu_stacks") < events.index("incident_finished")


def test_one_that_does_not_end_is_killed_in_time(start_gpu_server: Start, cuda_gdb: CudaGdb) -> None:
    cuda_gdb.behaves("head -4 $HERE/listing; kill -STOP $PID; sleep 600")
    stored = hang(start_gpu_server(SGLANG_CRASHKIT_BUDGET_SECS="10"))
    (piece,) = pieces_of(stored, "scheduler_TP0")
    # What it had printed by then is kept, and the process that it had stopped could end by itself.
    assert piece["status"] == "captured"
    assert "cuda-gdb did not end within" in piece["reason"]
    assert "it left the process stopped, which was sent SIGCONT" in piece["reason"]
    # It is late on a busy machine, and its debugger sleeps for 600 s.
    assert piece["seconds"] <= LONG
    assert "spin_until" in (stored.path / piece["path"]).read_text()


def test_one_that_prints_nothing_is_told_of(start_gpu_server: Start, cuda_gdb: CudaGdb) -> None:
    cuda_gdb.behaves("exit 3")
    (piece,) = pieces_of(hang(start_gpu_server()), "scheduler_TP0")
    assert (piece["status"], piece["path"]) == ("failed", None)
    assert piece["reason"] == "cuda-gdb ended with status 3"


def test_without_time_it_is_not_run(start_gpu_server: Start, cuda_gdb: CudaGdb) -> None:
    (piece,) = pieces_of(hang(start_gpu_server(SGLANG_CRASHKIT_BUDGET_SECS="2")), "scheduler_TP0")
    assert (piece["status"], cuda_gdb.ran_on()) == ("skipped", {})
    assert piece["reason"] == "SGLANG_CRASHKIT_BUDGET_SECS leaves no time for cuda-gdb"


@pytest.mark.parametrize("switch", ["SGLANG_CRASHKIT_NATIVE", "SGLANG_PYSPY_DUMP_BEFORE_CRASH"])
def test_where_no_process_may_be_stopped_it_is_not_run(start_gpu_server: Start, cuda_gdb: CudaGdb, switch: str) -> None:
    stored = hang(start_gpu_server(**{switch: "0"}))
    assert (pieces_of(stored, "scheduler_TP0"), cuda_gdb.ran_on()) == ([], {})
    assert [piece["status"] for piece in pieces_of(stored, "scheduler_TP0", "cuda_core")] == ["captured"]


@pytest.mark.story
def test_a_server_that_was_killed_ends_without_it(start_gpu_server: Start, cuda_gdb: CudaGdb) -> None:
    server = start_gpu_server()
    assert server.ask("tell scheduler_TP0 cuda 0.5 1") == "listening"
    server.kill("scheduler_TP1", signal.SIGKILL)
    server.process.wait(2 * LONG)
    stored = server.wait_for_the_end()
    assert stored is not None
    assert [piece["status"] for piece in pieces_of(stored, "scheduler_TP0", "cuda_core")] == ["captured"]
    assert (pieces_of(stored, "scheduler_TP0"), cuda_gdb.ran_on()) == ([], {})


@pytest.mark.parametrize("debugger", [None, Debugger("gdb", "/usr/bin/gdb")])
def test_without_it_that_is_said(monkeypatch: pytest.MonkeyPatch, debugger: Debugger | None) -> None:
    monkeypatch.setattr(stacks, "find_debugger", lambda: (debugger, "missing"))
    report = ProcessReport(pid=7, title="sglang::scheduler", role="scheduler", rank={})
    run: Any = SimpleNamespace(report=lambda process: report)
    process: Any = SimpleNamespace(pid=7)
    assert GpuStacks(run, [process], LONG).are_done
    (piece,) = report.evidence
    assert (piece.kind, piece.status) == ("gpu_stack", "skipped")
    assert (piece.reason or "").startswith("cuda-gdb is not installed; next: ")
