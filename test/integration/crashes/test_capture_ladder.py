"""Real two-rank servers whose stacks py-spy cannot take: the ranks speak for themselves, dead ones too."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from integration.scenario import EXIT_TIMEOUT_S, PATIENCE, RELEASES, Wreck, wreck
from lanelib.lanes import ensure_lane
from lanelib.servers import Server
from unit.support.targets import make_tool, state_of
from unit.support.waiting import wait_until

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]

FIRST, SECOND = "sglang::scheduler_TP0", "sglang::scheduler_TP1"
DETOKENIZER = "sglang::detokenizer"
PR_CAPBSET_DROP, CAP_SYS_PTRACE = 24, 19
#: What every Python of the server runs first: no one may trace it without the capability, and SIGUSR2 makes it hold its
#: GIL in C for ever, as a stuck extension does.
UNTRACEABLE = """
import ctypes, pathlib, signal
ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)
def hold_the_lock(*_):
    library, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    library.pthread_mutex_lock(mutex)
    pathlib.Path(__file__).with_name("holds").touch()
    library.pthread_mutex_lock(mutex)
signal.signal(signal.SIGUSR2, hold_the_lock)
"""


def text_of(left: Wreck, title: str, kind: str) -> str:
    return (left.folder / left.evidence(title, kind)["path"]).read_text()


@pytest.fixture(scope="module", params=RELEASES)
def without_pyspy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wreck]:
    """A server with a py-spy that never returns, of which one rank ends by SIGSEGV."""
    folder = tmp_path_factory.mktemp("crash")
    # A rank that raises waits two seconds for its stacks: with more time for py-spy it would be gone before its turn.
    env = {
        "SGLANG_CRASHKIT_PYSPY": make_tool(tmp_path_factory.mktemp("tool"), "exec sleep 600"),
        "SGLANG_CRASHKIT_BUDGET_SECS": PATIENCE["SGLANG_CRASHKIT_BUDGET_SECS"],
    }
    args = ["--crash-dump-folder", str(folder)]
    with Server.start(ensure_lane(request.param), tp=2, extra_args=args, env=env) as server:
        server.wait_ready()
        yield wreck(server, folder, lambda s: os.kill(s.pid_of(SECOND), signal.SIGSEGV))


def test_every_survivor_has_a_stack_without_py_spy(without_pyspy: Wreck) -> None:
    server = next(process["title"] for process in without_pyspy.incident["processes"] if process["role"] == "server")
    for process in without_pyspy.incident["processes"]:
        if process["title"] in (FIRST, DETOKENIZER, server):
            (piece,) = [piece for piece in process["evidence"] if piece["kind"] == "stack"]
            assert piece["status"] == "captured", piece
            assert piece["source"] in ("in-process", "faulthandler")
            assert piece["reason"].startswith("py-spy did not end within")
    assert "run_scheduler_process" in text_of(without_pyspy, FIRST, "stack")
    assert "sglang/srt" in text_of(without_pyspy, DETOKENIZER, "stack")


def test_the_dead_rank_left_its_own_last_stack(without_pyspy: Wreck) -> None:
    piece = without_pyspy.evidence(SECOND, "fault_stack")
    assert (piece["status"], piece["source"]) == ("captured", "faulthandler")
    text = text_of(without_pyspy, SECOND, "fault_stack")
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
        while (state := state_of(stopped)) not in ("", "Z", "X"):
            states.append(state)
            time.sleep(0.01)

    args = ["--crash-dump-folder", str(tmp_path)]
    env = {"SGLANG_CRASHKIT_NATIVE": "1"}
    with Server.start(ensure_lane("0.5.23"), tp=2, extra_args=args, env=env) as server:
        server.wait_ready()
        left = wreck(server, tmp_path, fault)
    assert left.evidence(FIRST, "stack")["source"] == "py-spy"
    assert "run_scheduler_process" in text_of(left, FIRST, "stack")
    native = left.evidence(FIRST, "native_stack")
    assert (native["status"], native["reason"]) == ("skipped", "it is stopped, and must stay as it was found")
    # It runs until the signal takes effect, and for a moment when it is killed at last.
    seen = "".join(states).lstrip("RSD")
    assert set(seen.rstrip("RSD")) == {"T"}
    assert len(seen) - len(seen.rstrip("RSD")) < 100
    native = left.evidence(DETOKENIZER, "native_stack")
    assert native["status"] == "captured", native
    assert left.left == []


@pytest.mark.parametrize("release", RELEASES)
def test_without_permission_to_trace_every_rung_below_py_spy_delivers(release: str, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(UNTRACEABLE)
    folder = tmp_path / "crash"
    lane = ensure_lane(release)

    def fault(server: Server) -> None:
        # A rank that serves a request runs Python, which takes the signal.
        os.kill(server.pid_of(FIRST), signal.SIGUSR2)
        wait_until((tmp_path / "holds").exists, "the rank holds the GIL", EXIT_TIMEOUT_S)
        os.kill(server.pid_of(SECOND), signal.SIGKILL)

    with without_capability(
        lambda: Server.start(
            lane, tp=2, extra_args=["--crash-dump-folder", str(folder)], env=PATIENCE | {"PYTHONPATH": str(tmp_path)}
        )
    ) as server:
        server.wait_ready()
        left = wreck(server, folder, fault)
    held = left.evidence(FIRST, "stack")
    assert (held["status"], held["source"]) == ("captured", "faulthandler"), held
    assert "the GIL is not to be had" in held["reason"]
    assert left.report(FIRST)["doing"][0].startswith("hold_the_lock ("), left.report(FIRST)
    assert "run_scheduler_process" in text_of(left, FIRST, "stack")
    free = left.evidence(DETOKENIZER, "stack")
    assert (free["status"], free["source"]) == ("captured", "in-process"), free
    assert left.report(SECOND)["exit"]["signal"] == "SIGKILL"
    assert left.left == []


def without_capability(start: object) -> Server:
    """Start a server that has no capability to trace; a bounding set belongs to the thread that starts it."""
    started: list[Server] = []

    def run() -> None:
        if os.geteuid() == 0:
            assert ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, CAP_SYS_PTRACE, 0, 0, 0) == 0
        started.append(start())  # type: ignore[operator]

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    return started[0]
