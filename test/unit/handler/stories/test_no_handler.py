"""A stand-in server whose crash handler is gone: a worker's death ends it nevertheless, and its own end is no crash."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from sglang_crashkit.incident.exit_status import ServerExit
from sglang_crashkit.kernel import procfs
from unit.support.server_driver import HOST, Server, Start
from unit.support.waiting import LONG, wait_until, watched_pids

#: Longer than the main process takes to look at its workers once.
LOOK_SECS = 2.5
QUICK = {"SGLANG_CRASHKIT_END_SECS": "1"}


def kill_handler(server: Server, *seen: int) -> None:
    """Kill the crash handler, and wait until the main process watches its workers, and those in `seen`."""
    server.handler.send_signal(signal.SIGKILL)
    wait_until(server.handler.has_exited, "the handler is dead")
    wait_until(lambda: {*server.ranks.values(), *seen} <= watched_pids(server.pid), "the main process took over")


def saved(server: Server) -> bytes:
    return (server.crash_folder / HOST / "crash_dump.pkl").read_bytes()


def serves_on(server: Server) -> bool:
    """Say whether the server has neither ended nor heard that a child failed, after a while."""
    time.sleep(LOOK_SECS)
    return server.process.poll() is None and server.ask("draining") == "done"


@pytest.mark.parametrize("name", ["scheduler_TP1", "detokenizer"])
@pytest.mark.parametrize(
    ("fault", "status"),
    [
        ("SIGKILL", ServerExit.KILLED),
        ("SIGSEGV", 128 + signal.SIGSEGV),
        # Those that end by themselves do so a moment later, and also where they end well: no one asked the server to.
        ("exit 3", ServerExit.EXITED),
        ("exit 0", ServerExit.EXITED),
    ],
)
def test_a_workers_end_ends_the_server_with_its_requests_saved(
    start_server: Start, capfd: pytest.CaptureFixture[str], name: str, fault: str, status: int
) -> None:
    server = start_server(environ=QUICK)
    kill_handler(server)
    server.strike(name, fault)
    assert server.line() == "sigquit"
    assert server.process.wait(LONG) == status
    assert saved(server) == b"requests"
    how = f"with status {fault.split()[1]}" if fault.startswith("exit") else f"by {fault}"
    words = f"process {server.ranks[name]} (sglang::{name}) ended {how} and there is no crash handler"
    assert f"crash kit: {words}; the server ends\n" in capfd.readouterr().err


@pytest.mark.story
@pytest.mark.parametrize("start", ["start sglang::scheduler_TP2", "tell scheduler_TP0 become_hooked_controller DP1"])
def test_so_does_that_of_one_started_later(start_server: Start, start: str) -> None:
    server = start_server()
    if "controller" in start:
        pid = int(server.ask(start.replace("DP1", "sglang::scheduler_DP1_TP0")))
        kill_handler(server, pid)
    else:
        kill_handler(server)
        pid = int(server.ask(start))
        wait_until(lambda: pid in watched_pids(server.pid), "it is seen")
    os.kill(pid, signal.SIGKILL)
    assert server.process.wait(LONG) == ServerExit.KILLED


def test_so_does_one_that_ended_before_the_handler_did(start_server: Start) -> None:
    server = start_server()
    server.handler.send_signal(signal.SIGSTOP)
    server.kill("scheduler_TP0")
    server.handler.send_signal(signal.SIGKILL)
    assert server.process.wait(LONG) == ServerExit.KILLED
    assert saved(server) == b"requests"


@pytest.mark.parametrize("stacks", ["1", "0"])
@pytest.mark.parametrize("died", [False, True])
def test_without_a_handler_from_the_start_workers_are_watched(
    start_server: Start, short_folder: Path, stacks: str, died: bool
) -> None:
    environ = {"SGLANG_PYSPY_DUMP_BEFORE_CRASH": stacks}
    if died:
        server = start_server(environ=environ)
        kill_handler(server)
    else:
        # In the place of the folder for the handler's socket.
        (short_folder / f"sglang-crashkit-{os.getuid()}").write_text("a file")
        server = start_server(with_handler=False, environ=environ)
    server.kill("scheduler_TP0")
    assert server.line() == "sigquit"
    assert server.process.wait(LONG) == ServerExit.KILLED


@pytest.mark.parametrize("options", [{"answers_sigquit": False, "environ": QUICK}, {"catches_sigquit": False}])
def test_a_main_process_that_does_not_answer_ends(start_server: Start, options: dict[str, Any]) -> None:
    server = start_server(**options)
    kill_handler(server)
    server.kill("scheduler_TP0")
    assert server.process.wait(LONG) == ServerExit.KILLED
    wait_until(lambda: all(procfs.read_stat(pid) is None for pid in server.ranks.values()), "its ranks are gone")


@pytest.mark.parametrize("seen", [False, True])
def test_a_teardown_is_no_crash_whoever_saw_it(start_server: Start, seen: bool) -> None:
    server = start_server()
    if not seen:
        kill_handler(server)
    assert server.ask("teardown children") == "done"
    server.handler.send_signal(signal.SIGKILL)
    assert serves_on(server)


# -- what is no crash


def test_a_server_that_is_asked_to_end_ends_as_before(start_server: Start) -> None:
    server = start_server()
    kill_handler(server)
    os.kill(server.pid, signal.SIGTERM)
    assert server.process.wait(LONG) == 41


@pytest.mark.parametrize(("fault", "status"), [("exit 0", None), ("SIGTERM", None), ("SIGKILL", ServerExit.KILLED)])
def test_ranks_that_end_well_in_a_drain_are_no_crash(start_server: Start, fault: str, status: int | None) -> None:
    server = start_server(tears_down_on_sigterm=False, environ=QUICK)
    kill_handler(server)
    os.kill(server.pid, signal.SIGTERM)
    assert server.line() == "draining"
    server.strike("scheduler_TP1", fault)
    assert serves_on(server) if status is None else server.process.wait(LONG) == status


def test_a_rank_that_dies_in_a_start_is_the_waiters(start_server: Start) -> None:
    server = start_server(started=False)
    kill_handler(server)
    server.kill("scheduler_TP1")
    assert serves_on(server)


def test_helpers_and_copies_of_a_rank_may_end(start_server: Start) -> None:
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


# -- a scheduler that was asked to kill its group on an exception waits for the dump


FLAG = "SGLANG_KILLPG_ON_SCHEDULER_EXCEPTION"


@pytest.mark.parametrize("dump_secs", [0.0, 1.0])
def test_without_a_handler_the_dump_is_written_before_the_kill(start_server: Start, dump_secs: float) -> None:
    server = start_server(environ={FLAG: "1"}, dump_secs=dump_secs)
    server.handler.send_signal(signal.SIGKILL)
    server.wait_for_handler()
    server.say("tell scheduler_TP1 raise odd")
    server.process.wait(LONG)
    assert saved(server) == b"requests"
    wait_until(lambda: all(procfs.read_stat(pid) is None for pid in server.ranks.values()), "all ranks are gone")


def test_a_server_that_does_not_end_is_killed(start_server: Start) -> None:
    environ = {FLAG: "1", "SGLANG_CRASHKIT_BUDGET_SECS": "1"}
    server = start_server(environ=environ, ends_after_dump=False)
    server.handler.send_signal(signal.SIGKILL)
    server.wait_for_handler()
    server.say("tell scheduler_TP1 raise odd")
    assert server.process.wait(LONG) == -signal.SIGKILL
