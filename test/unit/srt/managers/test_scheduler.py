"""The server's part of a process group is killed, what started it is not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from sglang_crashkit.kernel import procfs
from sglang_crashkit.srt.managers import scheduler
from unit.support.waiting import LONG, wait_until

#: A wrapper starts a bystander and a server; the server has a controller, and that one a scheduler, which kills.
TREE = """
import os, subprocess, sys, time
import setproctitle
from sglang_crashkit.srt.managers.scheduler import kill_own_group

def fork(title, work):
    pid = os.fork()
    if pid == 0:
        setproctitle.setproctitle(title)
        work()
        time.sleep(120)
        os._exit(1)
    return pid

def scheduler():
    os.read(go, 1)
    kill_own_group()

def controller():
    pids.append(fork("sglang::scheduler_DP0", scheduler))
    os.write(tell, f"{pids[-1]} ".encode())

def server():
    pids.append(fork("sglang::data_parallel_controller", controller))
    os.write(tell, f"{pids[-1]} ".encode())

pids = []
go, start = os.pipe()
told, tell = os.pipe()
if sys.argv[1] == "strangers":
    found = [subprocess.Popen(["sleep", "120"]).pid, fork("python -m launch", server)]
else:
    os.setpgid(0, 0)
    setproctitle.setproctitle("python -m launch")
    found = []
    server()
expected = len(found) + 2
while len(found) < expected:
    found += [int(word) for word in os.read(told, 100).split()]
print(*found, flush=True)
os.write(start, b".")
time.sleep(120)
"""


@pytest.fixture
def tree(request: pytest.FixtureRequest) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    process = subprocess.Popen(
        [sys.executable, "-c", TREE, request.param],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=request.param == "strangers",
    )
    with process:
        pids = [int(word) for word in process.stdout.readline().split()]
        yield process, pids
        for pid in (process.pid, *pids):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


@pytest.mark.parametrize("tree", ["strangers"], indirect=True)
def test_foreign_processes_are_named_and_left_alive(tree) -> None:
    wrapper, (bystander, *server) = tree
    wait_until(lambda: not any(map(procfs.is_running, server)), "the server's processes are gone")
    assert len(server) == 3
    assert wrapper.poll() is None
    assert procfs.is_running(bystander)
    wrapper.kill()
    os.kill(bystander, signal.SIGKILL)
    warning = wrapper.stderr.read()
    assert f"process group {wrapper.pid} has 2 processes of other programs" in warning
    assert f"are not killed: {min(wrapper.pid, bystander)}, {max(wrapper.pid, bystander)};" in warning


@pytest.mark.parametrize("tree", ["alone"], indirect=True)
def test_a_group_of_the_servers_own_is_killed_whole(tree) -> None:
    server, workers = tree
    assert server.wait(LONG) == -signal.SIGKILL
    wait_until(lambda: not any(map(procfs.is_running, workers)), "the workers are gone")
    assert server.stderr.read() == ""


def test_a_process_without_a_workers_title_is_its_own_server() -> None:
    assert scheduler.find_server(os.getpid()) == os.getpid()


def test_nothing_is_done_without_killpg_or_its_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[str] = []
    monkeypatch.setattr(scheduler, "kill_own_group", lambda: killed.append("group"))
    monkeypatch.setenv("SGLANG_CRASHKIT_BUDGET_SECS", "0.1")
    monkeypatch.delenv("SGLANG_KILLPG_ON_SCHEDULER_EXCEPTION", raising=False)
    scheduler.on_parent_told()
    monkeypatch.setenv("SGLANG_KILLPG_ON_SCHEDULER_EXCEPTION", "true")
    monkeypatch.setenv("SGLANG_CRASHKIT_ENABLED", "0")
    scheduler.on_parent_told()
    monkeypatch.delenv("SGLANG_CRASHKIT_ENABLED")
    with monkeypatch.context() as without:
        without.delattr(os, "killpg")
        scheduler.on_parent_told()
    assert killed == []
    scheduler.on_parent_told()
    assert killed == ["group"]
