"""A node of rank above 0 and its schedulers, in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sglang_crashkit.incident.exit_status import ServerExit
from sglang_crashkit.settings import SOCKET_VARIABLE
from unit.srt.conftest import Listener
from unit.waiting import LONG, wait_until

#: Ends as upstream's main process does: it joins its schedulers in order, ends its children, and ends with 0.
NODE = """
import ctypes, multiprocessing, os, signal, sys
from types import SimpleNamespace
from sglang_crashkit.srt import crash_exit, handler_process
from sglang_crashkit.srt.entrypoints.engine import on_engine_launch, on_wait_for_scheduler_ready
from sglang_crashkit.srt.utils.common import on_kill_process_tree

@on_kill_process_tree
def kill_process_tree(parent_pid, include_parent=True):
    for process in multiprocessing.active_children():
        process.kill()

@on_wait_for_scheduler_ready
def wait_for_scheduler_ready(readers, processes):
    raise AssertionError("upstream's")

def scheduler(writer, commands):
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    writer.send({"status": "ready"})
    os._exit(commands.recv())

if __name__ == "__main__":
    handler_process.start = lambda folder: None
    if os.environ.get("SGLANG_BLOCK_NONZERO_RANK_CHILDREN") != "0":
        crash_exit.note_server_program()
    context = multiprocessing.get_context("fork")
    on_engine_launch(SimpleNamespace(crash_dump_folder=None, node_rank=int(sys.argv[1])))
    readers, processes, commands = [], [], []
    for _ in range(2):
        reader, writer = context.Pipe(duplex=False)
        theirs, ours = context.Pipe(duplex=False)
        processes.append(context.Process(target=scheduler, args=(writer, theirs)))
        processes[-1].start()
        readers.append(reader)
        commands.append(ours)
    wait_for_scheduler_ready(readers, processes)
    print(*(process.pid for process in processes), flush=True)
    for line in sys.stdin:
        which, status = line.split()
        if which == "join":
            break
        commands[int(which)].send(int(status))
    for process in processes:
        process.join()
    kill_process_tree(os.getpid(), include_parent=False)
"""
Start = Callable[..., "Node"]


class Node:
    """The node's main process, and the pids of its two schedulers."""

    def __init__(self, rank: int, environ: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", NODE, str(rank)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | environ,
        )
        assert self.process.stdout is not None
        self.schedulers = [int(pid) for pid in self.process.stdout.readline().split()]

    def say(self, line: str) -> None:
        """Let scheduler N exit with a status ("N STATUS"), or the main process begin to join them ("join x")."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def close(self) -> None:
        """End it; the kernel ends its schedulers."""
        self.process.kill()
        self.process.wait(LONG)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


@pytest.fixture
def start() -> Iterator[Start]:
    nodes: list[Node] = []

    def start_node(rank: int = 1, **environ: str) -> Node:
        nodes.append(Node(rank, environ))
        return nodes[-1]

    yield start_node
    for node in nodes:
        node.close()


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize(("how", "status"), [("kill", ServerExit.KILLED), ("3", ServerExit.EXITED)])
def test_it_ends_with_any_of_its_schedulers(start: Start, victim: int, how: str, status: int) -> None:
    node = start()
    if how == "kill":
        node.say("join x")
        os.kill(node.schedulers[victim], signal.SIGKILL)
    else:
        node.say(f"{victim} {how}")
    assert node.process.wait(LONG) == status
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in node.schedulers), "nothing is left")


def test_it_ends_as_upstreams_when_rank_0_ends_its_schedulers(listener: Listener, start: Start) -> None:
    node = start(**{SOCKET_VARIABLE: str(listener.path)})
    for line in ("0 0", "1 0", "join x"):
        node.say(line)
    assert node.process.wait(LONG) == 0
    assert [listener.heard()["event"] for _ in range(4)] == ["launch", "members", "draining", "teardown"]


def test_a_scheduler_that_does_not_follow_the_others_ends_it(start: Start) -> None:
    node = start(SGLANG_CRASHKIT_END_SECS="0.3")
    node.say("1 0")
    assert node.process.wait(LONG) == ServerExit.EXITED


def test_a_join_that_returns_first_does_not_end_it_with_success(start: Start) -> None:
    for _ in range(3):
        node = start()
        node.say("join x")
        for pid in node.schedulers:
            os.kill(pid, signal.SIGKILL)
        assert node.process.wait(LONG) == ServerExit.KILLED


def test_the_handlers_word_is_waited_for(listener: Listener, start: Start) -> None:
    node = start(**{SOCKET_VARIABLE: str(listener.path)})
    os.kill(node.schedulers[1], signal.SIGKILL)
    assert node.process.wait(LONG) == 137
    assert [listener.heard()["event"] for _ in range(2)] == ["launch", "members"]
    told = listener.heard()
    assert told["event"] == "child_failed"
    assert f"(pid {node.schedulers[1]}) was killed by SIGKILL" in told["message"]
    assert listener.heard()["event"] == "teardown"


@pytest.mark.parametrize(("rank", "environ"), [(0, {}), (1, {"SGLANG_BLOCK_NONZERO_RANK_CHILDREN": "0"})])
def test_a_node_of_rank_0_and_a_programs_node_are_left_to_upstream(
    start: Start, rank: int, environ: dict[str, str]
) -> None:
    node = start(rank, **environ)
    for pid in node.schedulers:
        os.kill(pid, signal.SIGKILL)
    node.say("join x")
    assert node.process.wait(LONG) == 0
