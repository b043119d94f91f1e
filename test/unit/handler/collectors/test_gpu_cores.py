"""GPU cores in an incident: asked for, waited for as long as they grow, and no one killed meanwhile; then cuda-gdb."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from sglang_crashkit.capture.cuda_core.trigger import is_whole_core
from sglang_crashkit.incident.exit_status import ServerExit
from unit.capture.cuda_core.synthetic_core import core_bytes
from unit.support.flight_dumps import document, entry, pickled
from unit.support.server_driver import HOST, Server, crash, document_of, events_of, piece_if_any, piece_of, report_of
from unit.support.waiting import LONG, wait_until

Start = Callable[..., Server]
Behaves = Callable[[str], object]
WAIT = "SGLANG_CUDA_COREDUMP_BEFORE_CRASH_WAIT_SECS"


#: What cuda-gdb 12.4 prints of a core.
CORE = """Opening GPU coredump: core

CUDA Exception: Warp Illegal Address
The exception was triggered at PC 0x7fffd0001020
[Current focus set to CUDA kernel 0, grid 9, block (3,1,0), thread (0,0,0), device 0, sm 2, warp 5, lane 0]
#0  0x00007fffd0001040 in copy_kernel(float const*, float*, int)<<<(8,2,1),(64,1,1)>>> ()
== devices
  Dev PCI Bus/Dev ID        Name Description SM Type SMs Warps/SM Lanes/Warp Max Regs/Lane Active SMs Mask
*   0        1b:00.0 NVIDIA H200       GH100   sm_90   4       64         32           255      0x00000004
== kernels
  Kernel Parent Dev Grid Status   SMs Mask GridDim BlockDim Invocation
*      0      -   0    9 Active 0x00000004 (8,2,1) (64,1,1) copy_kernel()
"""
KERNEL = "kernel copy_kernel() on GPU 0: grid 8x2x1, block 64x1x1, active, grid id 9"
FAILURE = (
    "exception: Warp Illegal Address at 0x7fffd0001020 in copy_kernel(float const*, float*, int) "
    "(grid 9, block (3,1,0), device 0, sm 2, warp 5)"
)


@pytest.fixture
def cuda_gdb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], object]:
    """A stand-in for cuda-gdb, which reads a core; return what has it do something else."""
    program = tmp_path / "cuda" / "bin" / "cuda-gdb"
    program.parent.mkdir(parents=True)
    (tmp_path / "told").write_text(CORE)

    def behaves(script: str) -> None:
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)

    behaves(f"cat {tmp_path}/told")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    return behaves


def core_of(server: Server, document: dict[str, Any], title: str) -> dict[str, Any]:
    assert report_of(document, title)["pid"] == server.ranks[title]
    return piece_if_any(document, title, "cuda_core")


def crash_with_core(server: Server, how: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Kill the second rank of a server, whose first one writes a core so; return the incident and its piece."""
    assert server.ask(f"tell scheduler_TP0 cuda {how}") == "listening"
    told = crash(server, status=ServerExit.KILLED)
    return told, core_of(server, told, "scheduler_TP0")


@pytest.mark.parametrize(
    ("environ", "how", "status", "reason"),
    [
        ({}, "0.1 1", "captured", None),
        # One that grows is waited for beyond the wait.
        ({WAIT: "2.5"}, "4 1 - 40", "captured", None),
        ({WAIT: "1.5"}, "0.1 0.5 hang", "failed", r"not whole, and nothing was written for 1.5 s: .* bytes so far"),
        ({WAIT: "1.5"}, "0.1 0 hang", "failed", "not whole, and nothing was written for 1.5 s: "),
        ({}, "0.2 0.5", "failed", ".*is no whole core"),
        ({}, "0.2 0.5 die", "failed", ".*(no whole core|it ended while its core)"),
        ({}, "", "skipped", ".*CUDA was not initialised"),
        ({WAIT: "0"}, "60 1", "skipped", f"{WAIT} leaves no time for it$"),
        ({}, "stopped", "skipped", "it is stopped and reads no pipe$"),
        (
            {"SGLANG_CRASHKIT_KEEP_FREE_MB": "1000000000000"},
            "60 1",
            "skipped",
            "less than SGLANG_CRASHKIT_KEEP_FREE_MB ",
        ),
        (
            {"SGLANG_CRASHKIT_MAX_USE_MB": "100"},
            "60 1",
            "skipped",
            r"incidents would take more than SGLANG_CRASHKIT_MAX_USE_MB \(100 MB\)$",
        ),
        (
            {"SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0"},
            "60 1",
            "skipped",
            "switched off by SGLANG_CUDA_COREDUMP_BEFORE_CRASH$",
        ),
    ],
)
def test_a_core_is_waited_for_or_the_reason_is_said(
    start_gpu_server: Start, tmp_path: Path, environ: dict[str, str], how: str, status: str, reason: str | None
) -> None:
    server = start_gpu_server(**environ)
    if how:
        assert server.ask(f"tell scheduler_TP0 cuda {'60 1' if how == 'stopped' else how}") == "listening"
    if how == "stopped":
        server.kill("scheduler_TP0", signal.SIGSTOP)
    told = crash(server, status=ServerExit.KILLED)
    piece = core_of(server, told, "scheduler_TP0")
    assert (piece["status"], piece["reason"] is None) == (status, reason is None), piece
    assert reason is None or re.match(reason, piece["reason"]), piece
    if status == "skipped":
        assert list((tmp_path / "crash" / HOST).glob("core.cuda.*")) == []
    if how == "0.1 1":
        # Without cuda-gdb the core is kept, and how to read it is said.
        report = report_of(told, "scheduler_TP0")
        read = piece_of(report, "gpu_kernels")
        core = (told["folder"] / piece["path"]).resolve()
        assert (read["status"], report["gpu"], told["complete"]) == ("skipped", [], True)
        assert read["reason"] == f"cuda-gdb, which reads it, is not installed here; next: sglang-crashkit core {core}"
        assert f"sglang-crashkit core {core}" in (told["folder"] / "summary.md").read_text()
    if how == "":
        assert "cuda_cores_asked" not in events_of(told)


def test_the_servers_end_waits_while_a_core_is_written(start_gpu_server: Start, cuda_gdb: Behaves) -> None:
    # Longer than the whole budget of the incident, and than what the server waits for by itself.
    server = start_gpu_server(SGLANG_CRASHKIT_BUDGET_SECS="4", SGLANG_CRASHKIT_END_SECS="1")
    told, piece = crash_with_core(server, "5 1")
    assert (piece["status"], piece["reason"]) == ("captured", None)
    assert piece["seconds"] > 4.0
    path = (told["folder"] / piece["path"]).resolve()
    assert is_whole_core(path)
    assert path.stat().st_mode & 0o077 == 0
    report = report_of(told, "scheduler_TP0")
    assert report["gpu"] == [KERNEL, FAILURE]
    assert (told["folder"] / piece_of(report, "gpu_kernels")["path"]).read_text() == CORE
    assert f"- GPU: {KERNEL}" in (told["folder"] / "summary.md").read_text()
    assert f"sglang::scheduler_TP0 (pid {report['pid']}) had on its GPU: {FAILURE}" in told["verdict"]["text"]
    assert told["verdict"]["first_failure"]["title"] == "sglang::scheduler_TP1"
    events = [entry["event"] for entry in told["timeline"]]
    assert events.count("budget_spent") == 0
    assert events.index("requests_saved") < events.index("cuda_cores_asked") < events.index("teardown")
    # The dead rank has none to give.
    assert core_of(server, told, "scheduler_TP1") == {}


@pytest.mark.story
@pytest.mark.parametrize("raises", [False, True])
def test_the_core_of_a_rank_whose_gpu_failed_is_read(
    start_gpu_server: Start, cuda_gdb: Behaves, tmp_path: Path, raises: bool
) -> None:
    server = start_gpu_server()
    pid = server.ranks["scheduler_TP1"]
    # The driver writes it, and then ends the process by SIGABRT, or has the call fail.
    (tmp_path / "crash" / HOST / f"core.cuda.1795000000.{pid}").write_bytes(core_bytes())
    if raises:
        server.say("tell scheduler_TP1 raise CUDA error: an illegal memory access was encountered")
    else:
        server.kill("scheduler_TP1", signal.SIGABRT)
    assert server.process.wait(2 * LONG) == (ServerExit.RAISED if raises else 128 + signal.SIGABRT)
    told = document_of(server)
    assert core_of(server, told, "scheduler_TP1")["status"] == "captured"
    assert report_of(told, "scheduler_TP1")["gpu"] == [KERNEL, FAILURE]
    assert raises or f"had on its GPU: {FAILURE}." in told["verdict"]["text"]


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("kill -SEGV $$", "cannot be read by cuda-gdb: it died by SIGSEGV, as on a damaged core"),
        ("sleep 600 & sleep 600", "cannot be read by cuda-gdb: cuda-gdb did not end within "),
    ],
)
def test_a_core_that_cuda_gdb_does_not_bear_costs_no_more_than_its_account(
    start_gpu_server: Start, cuda_gdb: Behaves, script: str, why: str
) -> None:
    cuda_gdb(script)
    told, _core = crash_with_core(start_gpu_server(SGLANG_CRASHKIT_EXIT_SECS="12"), "0.1 1")
    piece = piece_of(report_of(told, "scheduler_TP0"), "gpu_kernels")
    assert (piece["status"], told["complete"]) == ("failed", True)
    assert why in piece["reason"]
    assert "; next: sglang-crashkit core /" in piece["reason"]


def test_a_core_of_the_drivers_own_is_waited_for(start_gpu_server: Start, cuda_gdb: Behaves, tmp_path: Path) -> None:
    server = start_gpu_server()
    assert server.ask("tell scheduler_TP0 cuda 5 1") == "listening"
    # As where the GPU of one rank failed, and the end of another one is noticed before it has written its core.
    (tmp_path / f"corepipe.cuda.{server.ranks['scheduler_TP0']}").write_bytes(b"1")
    folder = tmp_path / "crash" / HOST
    wait_until(lambda: list(folder.glob("core.cuda.*")), "the core has begun")
    told = crash(server, status=ServerExit.KILLED)
    assert core_of(server, told, "scheduler_TP0")["status"] == "captured"
    assert len(list(folder.glob("core.cuda.*"))) == 1
    assert FAILURE in report_of(told, "scheduler_TP0")["gpu"]


def test_a_core_of_an_earlier_process_is_not_taken(start_gpu_server: Start, tmp_path: Path) -> None:
    server = start_gpu_server()
    path = tmp_path / "crash" / HOST / f"core.cuda.1.{server.ranks['scheduler_TP1']}"
    path.write_bytes(core_bytes())
    os.utime(path, (1.0, 1.0))
    assert core_of(server, crash(server, status=ServerExit.KILLED), "scheduler_TP1") == {}


def test_the_flight_recorder_comes_before_the_core(start_gpu_server: Start, tmp_path: Path) -> None:
    """A process that writes a core answers nothing else."""
    content, dump_secs = tmp_path / "content", 1.0
    content.write_bytes(pickled(document([entry(0, 1, state="scheduled")])))
    folder = str(tmp_path / "crash" / HOST / "flight_recorder")
    server = start_gpu_server(TORCH_NCCL_TRACE_BUFFER_SIZE="2000", SGLANG_CRASHKIT_FLIGHT_FOLDER=folder)
    assert server.ask(f"tell scheduler_TP0 nccl 0 {content} {dump_secs}") == "listening"
    assert server.ask("tell scheduler_TP0 cuda 1 1") == "listening"
    told = crash(server, status=ServerExit.KILLED)
    evidence = {piece["kind"]: piece for piece in report_of(told, "scheduler_TP0")["evidence"]}
    assert [evidence[kind]["status"] for kind in ("stack", "flight_recorder", "cuda_core")] == ["captured"] * 3
    times = {event["event"]: datetime.fromisoformat(event["time"][:-1]) for event in told["timeline"]}
    asked_secs = (times["cuda_cores_asked"] - times["flight_recorders_asked"]).total_seconds()
    assert asked_secs >= evidence["flight_recorder"]["seconds"] >= dump_secs
    assert times["stacks_captured"] <= times["flight_recorders_asked"]
    assert times["cuda_cores_asked"] < times["incident_finished"]


def test_all_that_the_end_waits_for_has_one_end(start_gpu_server: Start) -> None:
    server = start_gpu_server(**{WAIT: "60", "SGLANG_CRASHKIT_EXIT_SECS": "8", "SGLANG_CRASHKIT_END_SECS": "1"})
    before = time.monotonic()
    _told, piece = crash_with_core(server, "60 1 - 600")
    assert piece["status"] == "failed"
    reason = "cut short, as the server's end waits no longer than SGLANG_CRASHKIT_EXIT_SECS (8 s): "
    assert piece["reason"].startswith(reason)
    assert "core.cuda." in piece["reason"]
    assert piece["reason"].endswith(" bytes so far")
    # It is late on a busy machine, and without the limit the core alone has 60 s.
    assert piece["seconds"] < 30.0
    assert time.monotonic() - before < LONG


def test_a_core_that_grows_too_long_is_cut_short(start_gpu_server: Start) -> None:
    server = start_gpu_server(SGLANG_CRASHKIT_MAX_CORE_MB="0.00195313")
    told, piece = crash_with_core(server, "60 1 - 600")
    assert piece["status"] == "failed"
    pid = server.ranks["scheduler_TP0"]
    assert piece["reason"].startswith(
        f"cut short, that of process {pid} takes more than SGLANG_CRASHKIT_MAX_CORE_MB (0.00195312 MB): "
    )
    assert piece["reason"].endswith(" bytes so far")
    (event,) = (entry for entry in told["timeline"] if entry["event"] == "cuda_cores_cut_short")
    assert event["bytes"] == {str(pid): 4096}


def test_the_end_of_the_server_ends_the_wait(start_gpu_server: Start, tmp_path: Path) -> None:
    server = start_gpu_server()
    assert server.ask("tell scheduler_TP0 cuda 60 1") == "listening"
    server.kill("scheduler_TP1")
    wait_until(lambda: list((tmp_path / "crash" / HOST).glob("core.cuda.*")), "the core has begun")
    server.process.kill()
    piece = core_of(server, document_of(server), "scheduler_TP0")
    assert piece["status"] == "failed"
    assert "ended" in piece["reason"]
