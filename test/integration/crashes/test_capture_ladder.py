"""Real two-rank servers whose stacks py-spy cannot take: the ranks speak for themselves, dead ones too."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from integration.faults import DETOKENIZER, send
from integration.faults import TP0 as FIRST
from integration.faults import TP1 as SECOND
from integration.import_hook import write_site
from integration.scenario import EXIT_TIMEOUT_S, PATIENCE, Wreck, break_one, states_until_gone
from lanelib.servers import Server
from unit.support.targets import UNDUMPABLE, make_tool, unprivileged
from unit.support.waiting import wait_until

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]

#: What every Python of the server runs first: no one may trace it without the capability, and SIGUSR2 makes it hold its
#: GIL in C for ever, as a stuck extension does.
UNTRACEABLE = f"""{UNDUMPABLE}
import pathlib, signal
def hold_the_lock(*_):
    library, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    library.pthread_mutex_lock(mutex)
    pathlib.Path(__file__).with_name("holds").touch()
    library.pthread_mutex_lock(mutex)
signal.signal(signal.SIGUSR2, hold_the_lock)
"""


@pytest.fixture(scope="module")
def without_pyspy(release: str, tmp_path_factory: pytest.TempPathFactory) -> Wreck:
    """A server with a py-spy that never returns, of which one rank ends by SIGSEGV."""
    # A rank that raises waits two seconds for its stacks: with more time for py-spy it would be gone before its turn.
    env = {
        "SGLANG_CRASHKIT_PYSPY": make_tool(tmp_path_factory.mktemp("tool"), "exec sleep 600"),
        "SGLANG_CRASHKIT_BUDGET_SECS": PATIENCE["SGLANG_CRASHKIT_BUDGET_SECS"],
    }
    return break_one(release, tmp_path_factory.mktemp("crash"), send(SECOND, signal.SIGSEGV), tp=2, env=env)


def test_every_survivor_has_a_stack_without_py_spy(without_pyspy: Wreck) -> None:
    server = next(process["title"] for process in without_pyspy.incident["processes"] if process["role"] == "server")
    for process in without_pyspy.incident["processes"]:
        if process["title"] in (FIRST, DETOKENIZER, server):
            (piece,) = [piece for piece in process["evidence"] if piece["kind"] == "stack"]
            assert piece["status"] == "captured", piece
            assert piece["source"] in ("in-process", "faulthandler")
            assert piece["reason"].startswith("py-spy did not end within")
    assert "run_scheduler_process" in without_pyspy.text(FIRST, "stack")
    assert "sglang/srt" in without_pyspy.text(DETOKENIZER, "stack")


def test_the_dead_rank_left_its_own_last_stack(without_pyspy: Wreck) -> None:
    piece = without_pyspy.evidence(SECOND, "fault_stack")
    assert (piece["status"], piece["source"]) == ("captured", "faulthandler")
    text = without_pyspy.text(SECOND, "fault_stack")
    assert text.startswith("Fatal Python error: Segmentation fault")
    assert "run_scheduler_process" in text
    assert without_pyspy.report(SECOND)["doing"]
    assert without_pyspy.report(SECOND)["exit"]["signal"] == "SIGSEGV"
    assert without_pyspy.incident["verdict"]["first_failure"]["title"] == SECOND


def test_what_upstream_prints_of_it_is_still_in_the_log(without_pyspy: Wreck) -> None:
    assert "Fatal Python error: Segmentation fault" in without_pyspy.log
    assert f"process {without_pyspy.pids[SECOND]} of this server wrote before it died" in without_pyspy.log


def test_a_hanging_py_spy_does_not_keep_the_server_alive(without_pyspy: Wreck) -> None:
    assert without_pyspy.left == []
    assert without_pyspy.status != 0
    assert without_pyspy.seconds_to_exit < 60


@pytest.mark.matrix
def test_a_stopped_rank_stays_stopped_and_has_a_stack(tmp_path: Path) -> None:
    states: list[str] = []

    def fault(server: Server) -> None:
        stopped = server.pid_of(FIRST)
        os.kill(stopped, signal.SIGSTOP)
        os.kill(server.pid_of(SECOND), signal.SIGKILL)
        states.append(states_until_gone(stopped))

    left = break_one("0.5.23", tmp_path, fault, tp=2, env={"SGLANG_CRASHKIT_NATIVE": "1"})
    assert left.evidence(FIRST, "stack")["source"] == "py-spy"
    assert "run_scheduler_process" in left.text(FIRST, "stack")
    native = left.evidence(FIRST, "native_stack")
    assert (native["status"], native["reason"]) == ("skipped", "it is stopped, and must stay as it was found")
    # It runs until the signal takes effect, and for a moment when it is killed at last.
    seen = states[0].lstrip("RSD")
    assert set(seen.rstrip("RSD")) == {"T"}
    assert len(seen) - len(seen.rstrip("RSD")) < 200
    native = left.evidence(DETOKENIZER, "native_stack")
    assert native["status"] == "captured", native
    assert left.left == []


def test_without_permission_to_trace_every_rung_below_py_spy_delivers(release: str, tmp_path: Path) -> None:
    env = PATIENCE | write_site(tmp_path, UNTRACEABLE)

    def fault(server: Server) -> None:
        # A rank that serves a request runs Python, which takes the signal.
        os.kill(server.pid_of(FIRST), signal.SIGUSR2)
        wait_until((tmp_path / "holds").exists, "the rank holds the GIL", EXIT_TIMEOUT_S)
        os.kill(server.pid_of(SECOND), signal.SIGKILL)

    left = break_one(release, tmp_path / "crash", fault, tp=2, env=env, prefix=unprivileged([]))
    held = left.evidence(FIRST, "stack")
    assert (held["status"], held["source"]) == ("captured", "faulthandler"), held
    assert "the GIL is not to be had" in held["reason"]
    assert left.report(FIRST)["doing"][0].startswith("hold_the_lock ("), left.report(FIRST)
    assert "run_scheduler_process" in left.text(FIRST, "stack")
    free = left.evidence(DETOKENIZER, "stack")
    assert (free["status"], free["source"]) == ("captured", "in-process"), free
    assert left.report(SECOND)["exit"]["signal"] == "SIGKILL"
    assert left.left == []
