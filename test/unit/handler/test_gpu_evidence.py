"""What an incident asks of the GPUs comes one after the other: a process that writes a core answers nothing else."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

from sglang_crashkit.incident.exit_status import ServerExit
from unit.flight_dumps import document, entry, pickled
from unit.handler.driver import HOST, Server, report_of
from unit.waiting import LONG

Start = Callable[..., Server]
#: How long the stand-in recorder takes; the incident has nothing else to do that takes as long.
DUMP_SECS = 2.0


def crash(server: Server) -> dict[str, Any]:
    """Kill the second rank, and return the incident once the server has ended."""
    server.kill("scheduler_TP1")
    assert server.process.wait(2 * LONG) == ServerExit.KILLED
    stored = server.wait_for_the_end()
    assert stored is not None
    assert stored.document is not None
    return stored.document


def test_the_flight_recorder_is_whole_before_a_core_is_asked_for(
    start_server: Callable[..., Server], tmp_path: Path
) -> None:
    host_folder = tmp_path / "crash" / HOST
    host_folder.mkdir(parents=True)
    content = tmp_path / "content"
    content.write_bytes(pickled(document([entry(0, 1, state="scheduled")])))
    environ = {
        "TORCH_FR_BUFFER_SIZE": "2000",
        "SGLANG_CRASHKIT_FLIGHT_FOLDER": str(host_folder / "flight_recorder"),
        "CUDA_ENABLE_USER_TRIGGERED_COREDUMP": "1",
        "CUDA_COREDUMP_PIPE": str(tmp_path / "corepipe.cuda.%p"),
        "CUDA_COREDUMP_FILE": str(host_folder / "core.cuda.%t.%p"),
    }
    server = start_server(environ=environ)
    assert server.ask(f"tell scheduler_TP0 nccl 0 {content} {DUMP_SECS}") == "listening"
    assert server.ask("tell scheduler_TP0 cuda 1 1") == "listening"
    told = crash(server)
    evidence = {piece["kind"]: piece for piece in report_of(told, "scheduler_TP0")["evidence"]}
    assert [evidence[kind]["status"] for kind in ("stack", "flight_recorder", "cuda_core")] == ["captured"] * 3
    times = {event["event"]: datetime.fromisoformat(event["time"][:-1]) for event in told["timeline"]}
    asked_secs = (times["cuda_cores_asked"] - times["flight_recorders_asked"]).total_seconds()
    assert asked_secs >= evidence["flight_recorder"]["seconds"] >= DUMP_SECS
    assert times["stacks_captured"] <= times["flight_recorders_asked"]
    assert times["cuda_cores_asked"] < times["incident_finished"]


def test_without_a_gpu_no_core_is_asked_or_waited_for(start_server: Callable[..., Server]) -> None:
    told = crash(start_server())
    events = {event["event"] for event in told["timeline"]}
    assert "cuda_cores_asked" not in events
    assert report_of(told, "scheduler_TP0")["gpu"] == []
