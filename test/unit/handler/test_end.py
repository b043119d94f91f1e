"""How a stand-in server ends after an incident, and what its container's status says of it."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_crashkit.incident.exit_status import TERMINATION_LOG as VARIABLE
from sglang_crashkit.incident.exit_status import ServerExit
from sglang_crashkit.kernel import procfs
from unit.handler.driver import HOST, Server
from unit.waiting import LONG, wait_until

Start = Callable[..., Server]


@pytest.mark.parametrize(
    ("fault", "status"),
    [
        ("kill", ServerExit.KILLED),
        ("abort", 128 + signal.SIGABRT),
        ("raise ValueError", ServerExit.RAISED),
        ("raise Connection closed by peer", ServerExit.LOST_PEER),
        ("exit 0", ServerExit.EXITED),
        ("watchdog hard", ServerExit.HUNG),
    ],
)
def test_the_servers_status_tells_what_came_first(start_server: Start, fault: str, status: int) -> None:
    server = start_server()
    if fault == "kill":
        server.kill("scheduler_TP1")
    else:
        server.say(f"tell scheduler_TP1 {fault}")
    assert server.process.wait(LONG) == status


@pytest.mark.parametrize(
    ("fault", "status"), [("raise out of memory", ServerExit.FAILED_START), ("abort", 128 + signal.SIGABRT)]
)
def test_so_does_that_of_a_server_that_did_not_start(start_server: Start, fault: str, status: int) -> None:
    server = start_server(launching=True)
    server.say(f"tell scheduler_TP0 {fault}")
    assert server.process.wait(LONG) == status


def test_a_server_that_is_asked_to_end_ends_as_before(start_server: Start) -> None:
    server = start_server()
    os.kill(server.pid, signal.SIGTERM)
    assert server.process.wait(LONG) == 41
    assert server.wait_for_the_end() is None


def test_what_went_on_before_says_nothing_of_the_end(start_server: Start) -> None:
    server = start_server()
    assert server.ask("tell scheduler_TP0 watchdog soft") == "the handler"
    server.say("teardown")
    assert server.process.wait(LONG) == 41


def test_a_child_that_fails_before_there_are_requests_is_no_failed_start(start_server: Start) -> None:
    server = start_server(launching=True, started=True)
    server.say("tell scheduler_TP0 raise out of memory")
    assert server.process.wait(LONG) == ServerExit.RAISED
    stored = server.wait_for_the_end()
    assert stored is not None
    assert stored.document is not None
    assert "child_failed" in [entry["event"] for entry in stored.document["timeline"]]
    assert stored.document["requests"]["reason"] == "the server's main process held no requests"


def test_the_containers_status_has_the_verdict(start_server: Start, tmp_path: Path) -> None:
    message = tmp_path / "message"
    message.touch()
    server = start_server(environ={VARIABLE: str(message)})
    server.kill("scheduler_TP1")
    stored = server.wait_for_the_end()
    assert stored is not None
    assert stored.document is not None
    verdict, where, *rest = message.read_text().splitlines()
    assert verdict == f"{stored.document['verdict']['text']} (established)"
    assert str(stored.path) in where
    assert "3 finished and 1 unfinished" in where
    assert rest == []


@pytest.mark.parametrize(
    ("fault", "status"), [("kill", ServerExit.KILLED), ("raise ValueError", ServerExit.RAISED), ("exit 0", 84)]
)
def test_a_crash_that_cannot_be_written_anywhere_ends_the_server_with_its_status(
    start_server: Start, tmp_path: Path, capfd: pytest.CaptureFixture[str], fault: str, status: int
) -> None:
    message = tmp_path / "message"
    message.touch()
    server = start_server(environ={VARIABLE: str(message)})
    assert server.crash_folder is not None
    for folder in (server.crash_folder / HOST, server.fallback):
        shutil.rmtree(folder / "incidents", ignore_errors=True)
        (folder / "incidents").write_text("a file")
    if fault == "kill":
        server.kill("scheduler_TP1")
    else:
        server.say(f"tell scheduler_TP1 {fault}")
    assert server.process.wait(LONG) == status
    server.wait_for_handler()
    said = capfd.readouterr().err
    assert f"the incident is not written: no incident can be written below {server.crash_folder / HOST}: " in said
    assert server.incidents() == server.incidents(server.fallback) == []
    verdict, where = message.read_text().splitlines()
    assert "sglang::scheduler_TP1" in verdict
    assert where.startswith("incident not written, ")
    log = (server.crash_folder / HOST / "crash_handler.log").read_text()
    assert f"no incident can be written below {server.crash_folder / HOST}: " in log
    assert "incident nowhere: " + verdict.partition(" (")[0] in log


def test_what_went_on_is_not_in_the_containers_status(start_server: Start, tmp_path: Path) -> None:
    message = tmp_path / "message"
    message.touch()
    server = start_server(environ={VARIABLE: str(message)})
    assert server.ask("tell scheduler_TP0 watchdog soft") == "the handler"
    server.incident()
    os.kill(server.pid, signal.SIGTERM)
    assert server.process.wait(LONG) == 41
    assert message.read_text() == ""


def test_a_main_process_that_stands_still_is_ended(start_server: Start) -> None:
    environ = {"SGLANG_CRASHKIT_BUDGET_SECS": "0.5", "SGLANG_CRASHKIT_END_SECS": "0.2"}
    server = start_server(environ=environ)
    assert server.ask("stand_still") == "done"
    server.kill("scheduler_TP0")
    assert server.process.wait(LONG) == -signal.SIGALRM
    stored = server.wait_for_the_end()
    assert stored is not None
    assert stored.document is not None
    assert stored.document["verdict"]["first_failure"]["title"] == "sglang::scheduler_TP0"


def test_a_main_process_that_hangs_in_its_dump_ends_by_itself(start_server: Start) -> None:
    environ = {"SGLANG_CRASHKIT_BUDGET_SECS": "0.5", "SGLANG_CRASHKIT_END_SECS": "0.2"}
    server = start_server(environ=environ, dump_secs=3600.0)
    server.kill("scheduler_TP0")
    assert server.process.wait(LONG) == ServerExit.CRASHED


def test_a_main_process_that_somebody_stopped_stays_as_it_is(start_server: Start) -> None:
    environ = {"SGLANG_CRASHKIT_BUDGET_SECS": "0.5", "SGLANG_CRASHKIT_END_SECS": "0.05"}
    server = start_server(environ=environ)
    os.kill(server.pid, signal.SIGSTOP)
    server.kill("scheduler_TP0")
    server.incident()
    with pytest.raises(TimeoutError):
        _wait(server, 1.0)
    os.kill(server.pid, signal.SIGCONT)
    assert server.process.wait(LONG) in (ServerExit.KILLED, -signal.SIGALRM)


def is_dead(pid: int) -> bool:
    stat = procfs.read_stat(pid)
    return stat is None or stat.state in "ZX"


def _wait(server: Server, seconds: float) -> None:
    try:
        server.process.wait(seconds)
    except Exception as error:
        raise TimeoutError from error


# -- an end that was asked for


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_main_process_that_a_signal_asks_to_end_is_no_incident(start_server: Start, signum: signal.Signals) -> None:
    # As a node of rank above 0 has it before 0.5.21, and any server before it serves.
    server = start_server(catches_sigterm=False)
    os.kill(server.pid, signum)
    assert server.process.wait(LONG) == -signum
    assert server.wait_for_the_end() is None


def test_a_signal_to_the_whole_group_is_no_incident(start_server: Start) -> None:
    server = start_server(catches_sigterm=False)
    server.kill("scheduler_TP0", signal.SIGTERM)
    os.killpg(server.pid, signal.SIGTERM)
    assert server.process.wait(LONG) == -signal.SIGTERM
    assert server.wait_for_the_end() is None


def test_a_rank_that_crashed_before_is_an_incident_all_the_same(start_server: Start) -> None:
    server = start_server(catches_sigterm=False)
    server.say("tell scheduler_TP0 exit 3")
    wait_until(lambda: is_dead(server.ranks["scheduler_TP0"]), "the rank is dead")
    os.kill(server.pid, signal.SIGTERM)
    server.process.wait(LONG)
    stored = server.wait_for_the_end()
    assert stored is not None
    assert stored.document is not None
    assert "scheduler_TP0" in stored.document["verdict"]["text"]


def test_ranks_that_end_before_the_server_drains_are_no_incident(start_server: Start) -> None:
    # Rank 0 told the ranks of a node above 0 to end, and not its main process.
    server = start_server()
    server.say("tell scheduler_TP0 exit 0")
    assert server.ask("draining") == "done"
    server.say("tell scheduler_TP1 exit 0")
    server.say("leave 0")
    assert server.wait_for_the_end() is None


def test_a_rank_that_crashes_before_the_server_drains_is_an_incident(start_server: Start) -> None:
    server = start_server()
    server.say("tell scheduler_TP0 exit 3")
    assert server.ask("draining") == "done"
    assert server.process.wait(LONG) == ServerExit.EXITED
    assert server.wait_for_the_end() is not None
