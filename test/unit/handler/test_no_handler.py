"""A stand-in server whose crash handler is gone: a worker's death ends it nevertheless, and its own end is no crash."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_crashkit.incident.exit_status import ServerExit
from sglang_crashkit.kernel import procfs
from unit.handler.driver import HOST, Server
from unit.waiting import LONG, wait_until, watched_pids

Start = Callable[..., Server]

#: Longer than the main process takes to look at its workers once.
LOOK_SECS = 2.5
QUICK = {"SGLANG_CRASHKIT_END_SECS": "1"}


def kill_handler(server: Server, *seen: int) -> None:
    """Kill the crash handler, and wait until the main process watches its workers, and those in `seen`."""
    server.handler.send_signal(signal.SIGKILL)
    wait_until(server.handler.has_exited, "the handler is dead")
    wait_until(lambda: {*server.ranks.values(), *seen} <= watched_pids(server.pid), "the main process took over")


def saved(server: Server) -> bytes:
    assert server.crash_folder is not None
    return (server.crash_folder / HOST / "crash_dump.pkl").read_bytes()


def serves_on(server: Server) -> bool:
    """Say whether the server has neither ended nor been told of a failed child, after a while."""
    time.sleep(LOOK_SECS)
    return server.process.poll() is None and server.ask("draining") == "done"


@pytest.mark.parametrize(
    ("signum", "status"), [(signal.SIGKILL, ServerExit.KILLED), (signal.SIGSEGV, 128 + signal.SIGSEGV)]
)
@pytest.mark.parametrize("name", ["scheduler_TP1", "detokenizer"])
def test_the_death_of_a_worker_ends_the_server_with_its_requests_saved(
    start_server: Start, capfd: pytest.CaptureFixture[str], name: str, signum: signal.Signals, status: int
) -> None:
    server = start_server()
    kill_handler(server)
    server.kill(name, signum)
    assert server.line() == "sigquit"
    assert server.process.wait(LONG) == status
    assert saved(server) == b"requests"
    words = f"process {server.ranks[name]} (sglang::{name}) ended by {signum.name} and there is no crash handler"
    assert f"crash kit: {words}; the server ends\n" in capfd.readouterr().err


def test_so_does_one_that_ended_before_the_handler_did_and_was_not_seen_alive(start_server: Start) -> None:
    server = start_server()
    server.handler.send_signal(signal.SIGSTOP)
    server.kill("scheduler_TP0")
    server.handler.send_signal(signal.SIGKILL)
    assert server.process.wait(LONG) == ServerExit.KILLED
    assert saved(server) == b"requests"


def test_so_does_the_death_of_a_rank_below_the_data_parallel_controller(start_server: Start) -> None:
    server = start_server()
    rank = int(server.ask("tell scheduler_TP0 become_armed_controller sglang::scheduler_DP1_TP0"))
    kill_handler(server, rank)
    os.kill(rank, signal.SIGKILL)
    assert server.line() == "sigquit"
    assert server.process.wait(LONG) == ServerExit.KILLED


@pytest.mark.story
def test_so_does_one_that_was_started_later(start_server: Start) -> None:
    server = start_server()
    kill_handler(server)
    pid = int(server.ask("start sglang::scheduler_TP2"))
    wait_until(lambda: pid in watched_pids(server.pid), "it is seen")
    os.kill(pid, signal.SIGKILL)
    assert server.process.wait(LONG) == ServerExit.KILLED


def test_a_worker_that_ends_by_itself_ends_the_server_a_moment_later(start_server: Start) -> None:
    server = start_server()
    kill_handler(server)
    server.say("tell scheduler_TP1 exit 3")
    assert server.process.wait(LONG) == ServerExit.EXITED


def test_one_that_ends_well_does_so_where_nobody_asked_the_server_to_end(start_server: Start) -> None:
    server = start_server(environ=QUICK)
    kill_handler(server)
    server.say("tell scheduler_TP1 exit 0")
    assert server.process.wait(LONG) == ServerExit.EXITED


@pytest.mark.parametrize("stacks", ["1", "0"])
def test_where_the_handler_did_not_start_the_workers_are_watched_too(
    start_server: Start, short_folder: Path, stacks: str
) -> None:
    # In the place of the folder for the handler's socket.
    (short_folder / f"sglang-crashkit-{os.getuid()}").write_text("a file")
    server = start_server(with_handler=False, environ={"SGLANG_PYSPY_DUMP_BEFORE_CRASH": stacks})
    server.kill("scheduler_TP0")
    assert server.line() == "sigquit"
    assert server.process.wait(LONG) == ServerExit.KILLED


def test_and_where_processes_are_not_armed(start_server: Start) -> None:
    server = start_server(environ={"SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0"})
    kill_handler(server)
    server.kill("scheduler_TP0")
    assert server.line() == "sigquit"
    assert server.process.wait(LONG) == ServerExit.KILLED


def test_a_main_process_that_does_not_answer_ends_all_the_same(start_server: Start) -> None:
    server = start_server(answers_sigquit=False, environ=QUICK)
    kill_handler(server)
    server.kill("scheduler_TP0")
    assert server.line() == "sigquit"
    assert server.process.wait(LONG) == ServerExit.KILLED
    wait_until(lambda: all(procfs.read_stat(pid) is None for pid in server.ranks.values()), "its ranks are gone")


def test_a_main_process_that_does_not_handle_the_signal_ends_with_its_ranks_and_a_status(start_server: Start) -> None:
    server = start_server(catches_sigquit=False)
    kill_handler(server)
    server.kill("scheduler_TP0")
    assert server.process.wait(LONG) == ServerExit.KILLED


# -- what is no crash


def test_without_a_handler_a_server_that_is_asked_to_end_ends_as_before(start_server: Start) -> None:
    server = start_server()
    kill_handler(server)
    os.kill(server.pid, signal.SIGTERM)
    assert server.process.wait(LONG) == 41


def test_a_teardown_is_no_crash(start_server: Start) -> None:
    server = start_server()
    kill_handler(server)
    assert server.ask("teardown children") == "done"
    assert serves_on(server)


def test_nor_is_one_that_the_handler_saw(start_server: Start) -> None:
    server = start_server()
    assert server.ask("teardown children") == "done"
    server.handler.send_signal(signal.SIGKILL)
    assert serves_on(server)


@pytest.mark.parametrize("fault", ["exit 0", "terminate"])
def test_ranks_that_end_well_while_the_server_drains_are_no_crash(start_server: Start, fault: str) -> None:
    server = start_server(tears_down_on_sigterm=False, environ=QUICK)
    kill_handler(server)
    os.kill(server.pid, signal.SIGTERM)
    assert server.line() == "draining"
    if fault == "terminate":
        server.kill("scheduler_TP1", signal.SIGTERM)
    else:
        server.say(f"tell scheduler_TP1 {fault}")
    assert serves_on(server)


def test_a_rank_that_is_killed_while_the_server_drains_is_a_crash(start_server: Start) -> None:
    server = start_server(tears_down_on_sigterm=False)
    kill_handler(server)
    os.kill(server.pid, signal.SIGTERM)
    assert server.line() == "draining"
    server.kill("scheduler_TP1")
    assert server.process.wait(LONG) == ServerExit.KILLED


def test_a_rank_that_dies_while_ranks_are_waited_for_is_left_to_whoever_waits(start_server: Start) -> None:
    server = start_server(started=False)
    kill_handler(server)
    server.kill("scheduler_TP1")
    assert serves_on(server)


def test_a_helper_and_a_process_that_a_rank_runs_under_its_title_may_end(start_server: Start) -> None:
    server = start_server()
    helper, copy = int(server.ask("helper")), int(server.ask("tell scheduler_TP0 copy"))
    kill_handler(server)
    time.sleep(LOOK_SECS)
    for pid in (helper, copy):
        os.kill(pid, signal.SIGKILL)
    assert serves_on(server)


def test_a_crash_that_the_handler_sees_is_left_to_it(start_server: Start, capfd: pytest.CaptureFixture[str]) -> None:
    server = start_server()
    server.kill("scheduler_TP1")
    assert server.wait_for_the_end() is not None
    assert "there is no crash handler" not in capfd.readouterr().err


@pytest.mark.parametrize("switch", ["SGLANG_CRASHKIT_ENABLED", "both diagnostics"])
def test_where_no_handler_is_wanted_nobody_watches(start_server: Start, switch: str) -> None:
    names = [switch] if switch.isupper() else ["SGLANG_PYSPY_DUMP_BEFORE_CRASH", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH"]
    server = start_server(with_handler=False, crash_folder=None, environ=dict.fromkeys(names, "0"))
    server.kill("scheduler_TP0")
    assert serves_on(server)


def test_looking_costs_little(start_server: Start) -> None:
    server = start_server()
    kill_handler(server)
    time.sleep(LOOK_SECS)
    before = procfs.read_stat(server.pid)
    time.sleep(4.0)
    after = procfs.read_stat(server.pid)
    # Of a core, and with this machine's processes to look through.
    assert (after.cpu_ticks - before.cpu_ticks) / os.sysconf("SC_CLK_TCK") < 0.05 * 4
