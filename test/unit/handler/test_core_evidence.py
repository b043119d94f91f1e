"""GPU cores in an incident: asked for, waited for as long as they grow, and nobody killed meanwhile."""

from __future__ import annotations

import signal
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from sglang_crashkit.core.cuda_core import is_whole_core
from sglang_crashkit.core.exit_status import ServerExit
from sglang_crashkit.core.incident_store import StoredIncident
from unit.handler.driver import HOST, Server
from unit.waiting import LONG, wait_until

Start = Callable[..., Server]
WAIT = "SGLANG_CUDA_COREDUMP_BEFORE_CRASH_WAIT_SECS"


@pytest.fixture
def start_gpu_server(start_server: Start, tmp_path: Path) -> Start:
    """Start a stand-in server in the environment that ``--crash-dump-folder`` makes."""
    host_folder = tmp_path / "crash" / HOST
    host_folder.mkdir(parents=True)
    driver = {
        "CUDA_ENABLE_USER_TRIGGERED_COREDUMP": "1",
        "CUDA_COREDUMP_PIPE": str(tmp_path / "corepipe.cuda.%p"),
        "CUDA_COREDUMP_FILE": str(host_folder / "core.cuda.%t.%p"),
    }
    return lambda **environ: start_server(environ=driver | environ)


def crash(server: Server, status: int = ServerExit.KILLED) -> StoredIncident:
    """Kill a rank, and return the incident once the server has ended."""
    server.kill("scheduler_TP1")
    assert server.process.wait(2 * LONG) == status
    stored = server.wait_for_the_end()
    assert stored is not None
    return stored


def core_of(server: Server, stored: StoredIncident, title: str) -> dict[str, Any]:
    assert stored.document is not None
    pid = server.ranks[title]
    report = next(one for one in stored.document["processes"] if one["pid"] == pid)
    found = [piece for piece in report["evidence"] if piece["kind"] == "cuda_core"]
    assert len(found) <= 1
    return found[0] if found else {}


def test_the_servers_end_waits_while_a_core_is_written(start_gpu_server: Start) -> None:
    # Longer than the whole budget of the incident, and than what the server waits for by itself.
    server = start_gpu_server(SGLANG_CRASHKIT_BUDGET_SECS="1", SGLANG_CRASHKIT_END_SECS="1")
    assert server.ask("tell scheduler_TP0 cuda 5 1") == "listening"
    stored = crash(server)
    piece = core_of(server, stored, "scheduler_TP0")
    assert (piece["status"], piece["reason"]) == ("captured", None)
    assert piece["seconds"] > 4.0
    path = (stored.path / piece["path"]).resolve()
    assert is_whole_core(path)
    assert path.stat().st_mode & 0o077 == 0
    assert stored.document is not None
    assert stored.document["verdict"]["first_failure"]["title"] == "sglang::scheduler_TP1"
    events = [entry["event"] for entry in stored.document["timeline"]]
    assert events.count("budget_spent") == 0
    assert events.index("requests_saved") < events.index("cuda_cores_asked") < events.index("teardown")
    # The dead rank has none to give.
    assert core_of(server, stored, "scheduler_TP1") == {}


def test_without_a_pipe_nothing_is_waited_for(start_gpu_server: Start) -> None:
    server = start_gpu_server()
    stored = crash(server)
    piece = core_of(server, stored, "scheduler_TP0")
    assert piece["status"] == "skipped"
    assert "CUDA was not initialised" in piece["reason"]
    assert stored.document is not None
    times = {entry["event"]: datetime.fromisoformat(entry["time"][:-1]) for entry in stored.document["timeline"]}
    assert (times["incident_finished"] - times["requests_saved"]).total_seconds() < 20.0
    assert "cuda_cores_asked" not in times


def test_a_core_that_takes_too_long_is_given_up(start_gpu_server: Start) -> None:
    server = start_gpu_server(**{WAIT: "1.5"})
    assert server.ask("tell scheduler_TP0 cuda 60 1") == "listening"
    piece = core_of(server, crash(server), "scheduler_TP0")
    assert piece["status"] == "failed"
    assert piece["reason"].startswith("not whole within 1.5 s: ")
    assert "bytes so far" in piece["reason"]


@pytest.mark.parametrize(
    ("how", "reason"), [("0.2 0.5", "is no whole core"), ("0.2 0.5 die", "no whole core|it ended while its core")]
)
def test_half_a_core_is_none(start_gpu_server: Start, how: str, reason: str) -> None:
    server = start_gpu_server()
    assert server.ask(f"tell scheduler_TP0 cuda {how}") == "listening"
    piece = core_of(server, crash(server), "scheduler_TP0")
    assert piece["status"] == "failed"
    assert any(words in piece["reason"] for words in reason.split("|")), piece


def test_cores_can_be_switched_off(start_gpu_server: Start) -> None:
    server = start_gpu_server(SGLANG_CUDA_COREDUMP_BEFORE_CRASH="0")
    assert server.ask("tell scheduler_TP0 cuda 60 1") == "listening"
    piece = core_of(server, crash(server), "scheduler_TP0")
    assert (piece["status"], piece["reason"]) == ("skipped", "switched off by SGLANG_CUDA_COREDUMP_BEFORE_CRASH")


def test_a_stopped_rank_is_not_asked(start_gpu_server: Start) -> None:
    server = start_gpu_server()
    assert server.ask("tell scheduler_TP0 cuda 60 1") == "listening"
    server.kill("scheduler_TP0", signal.SIGSTOP)
    piece = core_of(server, crash(server), "scheduler_TP0")
    assert (piece["status"], piece["reason"]) == ("skipped", "it is stopped, so that nobody reads its pipe")


def test_the_end_of_the_server_ends_the_wait(start_gpu_server: Start, tmp_path: Path) -> None:
    server = start_gpu_server()
    assert server.ask("tell scheduler_TP0 cuda 60 1") == "listening"
    server.kill("scheduler_TP1")
    wait_until(lambda: list((tmp_path / "crash" / HOST).glob("core.cuda.*")), "the core has begun")
    server.process.kill()
    stored = server.wait_for_the_end()
    assert stored is not None
    piece = core_of(server, stored, "scheduler_TP0")
    assert piece["status"] == "failed"
    assert "ended" in piece["reason"]


def test_a_server_that_goes_on_is_not_asked_for_cores(start_gpu_server: Start) -> None:
    server = start_gpu_server()
    assert server.ask("tell scheduler_TP0 cuda 60 1") == "listening"
    assert server.ask("tell scheduler_TP1 watchdog soft") == "the handler"
    stored = server.incident()
    assert core_of(server, stored, "scheduler_TP0") == {}
