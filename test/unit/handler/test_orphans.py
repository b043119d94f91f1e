"""What becomes of the ranks of a stand-in server whose main process, or data-parallel controller, is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_crashkit.core.armed import ArmedFiles
from sglang_crashkit.core.exit_status import ServerExit
from sglang_crashkit.core.pidfd import ProcessHandle
from sglang_crashkit.handler.orphans import Outliving, ended_with_parent
from sglang_crashkit.handler.tree import ProcessTree
from unit.handler.driver import Server, document_of, report_of
from unit.targets import make_tool, settle
from unit.waiting import child, wait_until

Start = Callable[..., Server]
RANKS = ("scheduler_TP0", "scheduler_TP1", "detokenizer")


def stack_of(document: dict[str, Any], title: str) -> dict[str, Any]:
    (found,) = [piece for piece in report_of(document, title)["evidence"] if piece["kind"] == "stack"]
    assert isinstance(found, dict)
    return found


@pytest.fixture
def without_pyspy(tmp_path: Path) -> dict[str, str]:
    """Else it may be quicker than the end of those whose parent is killed."""
    return {"SGLANG_CRASHKIT_PYSPY": make_tool(tmp_path, "exit 1")}


class Orphan:
    """A rank without a parent."""

    pid, matters, is_root, parent, title = 10, True, False, None, "TP0"


def test_an_orphan_that_writes_a_gpu_core_is_not_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    root: Any = SimpleNamespace(exited_at=1.0)
    orphan: Any = Orphan()
    orphan.handle = SimpleNamespace(send_signal=sent.append)
    tree: Any = SimpleNamespace(root=root, alive=lambda: [orphan])
    writing = {10}
    monkeypatch.setattr("sglang_crashkit.handler.orphans._OUTLIVE_SECS", 0.0)
    outliving = Outliving(tree, lambda: writing)
    outliving.act_on_time()
    assert (sent, outliving.next_due()) == ([], float("inf"))
    writing.clear()
    outliving.act_on_time()
    assert sent == [signal.SIGKILL]


@pytest.mark.parametrize(
    ("code", "is_with_parent"), [("os._exit(3)", False), ("os.kill(os.getpid(), signal.SIGKILL)", True)]
)
def test_one_that_was_ending_by_itself_when_it_was_killed_for_its_parents_end_did_not_end_with_it(
    tmp_path: Path, code: str, is_with_parent: bool
) -> None:
    with child(f"ready(); sys.stdin.readline(); {code}") as process:
        tree = ProcessTree(process.pid)
        assert process.stdin is not None
        process.stdin.close()
        wait_until(tree.root.handle.has_exited, "it is dead")
        # A thread of it was left when SIGKILL was sent.
        tree.root.outlived_parent = True
        assert ended_with_parent(tree.root, tmp_path) is is_with_parent
        tree.root.handle.close()


def test_of_a_killed_server_every_rank_left_its_stacks(start_server: Start, without_pyspy: dict[str, str]) -> None:
    server = start_server(environ=without_pyspy)
    os.kill(server.pid, signal.SIGKILL)
    document = document_of(server)
    assert document["verdict"]["first_failure"]["pid"] == server.pid
    assert (document["verdict"]["kind"], document["verdict"]["level"]) == ("signal", "established")
    for title in RANKS:
        piece = stack_of(document, title)
        # Without py-spy a thread of the process may answer before it is known to have written them by itself.
        assert piece["status"] == "captured", piece
        assert piece["source"] in ("faulthandler", "in-process")
        text = (Path(document["folder"]) / piece["path"]).read_text()
        assert "wait_for_a_command" in text
        assert "responder.py" not in text
        report = report_of(document, title)
        assert report["doing"][0].startswith("wait_for_a_command (")
        assert report["exit"]["cause"] == "parent_ended"
        assert f"sglang::{title} (pid {report['pid']}) then ended with the process" in document["verdict"]["text"]


def test_a_rank_that_is_stopped_is_gone_with_the_killed_server(start_server: Start) -> None:
    server = start_server()
    server.kill("scheduler_TP1", signal.SIGSTOP)
    settle(server.ranks["scheduler_TP1"], "T")
    rank = ProcessHandle(server.ranks["scheduler_TP1"])
    try:
        os.kill(server.pid, signal.SIGKILL)
        wait_until(rank.has_exited, "the stopped rank is gone")
    finally:
        rank.close()
    document = document_of(server)
    assert document["verdict"]["first_failure"]["pid"] == server.pid
    assert stack_of(document, "scheduler_TP1")["status"] == "captured"
    # It lived for seconds after the server, and is in the incident all the same.
    assert report_of(document, "scheduler_TP1")["exit"]["cause"] == "parent_ended"


def controller_of(server: Server) -> int:
    """Make a rank the data-parallel controller, and return the pid of the rank below it."""
    pid = int(server.ask("tell scheduler_TP1 become_armed_controller sglang::scheduler_DP1_TP0"))
    server.settle()
    return pid


def test_ranks_that_end_with_their_controller_are_not_the_first_failure(
    start_server: Start, without_pyspy: dict[str, str]
) -> None:
    server = start_server(environ=without_pyspy)
    pid = controller_of(server)
    server.kill("scheduler_TP1")
    document = document_of(server)
    assert document["verdict"]["first_failure"]["pid"] == server.ranks["scheduler_TP1"]
    assert server.process.returncode == ServerExit.KILLED
    assert report_of(document, "scheduler_DP1_TP0")["pid"] == pid
    assert report_of(document, "scheduler_DP1_TP0")["exit"]["cause"] == "parent_ended"
    assert stack_of(document, "scheduler_DP1_TP0")["status"] == "captured"


def test_a_stopped_rank_is_gone_with_its_controller_although_nobody_else_ends(start_server: Start) -> None:
    server = start_server(answers_sigquit=False)
    pid = controller_of(server)
    os.kill(pid, signal.SIGSTOP)
    settle(pid, "T")
    rank = ProcessHandle(pid)
    try:
        server.kill("scheduler_TP1")
        wait_until(rank.has_exited, "the stopped rank is gone")
    finally:
        rank.close()
    assert server.process.poll() is None
    os.kill(server.pid, signal.SIGKILL)
    document = document_of(server)
    assert report_of(document, "scheduler_DP1_TP0")["exit"]["cause"] == "parent_ended"
    assert document["verdict"]["first_failure"]["pid"] == server.ranks["scheduler_TP1"]


@pytest.mark.parametrize("end", ["leave 0", "SIGTERM"])
def test_a_server_that_ends_well_leaves_its_ranks_to_the_kernel_and_no_incident(start_server: Start, end: str) -> None:
    server = start_server(catches_sigterm=False)
    files = [ArmedFiles.of(server.runtime, one.pid, one.start_ticks) for one in server._handles[1:]]
    assert all(one.orphan.stat().st_size == 0 for one in files)
    if end == "SIGTERM":
        os.kill(server.pid, signal.SIGTERM)
    else:
        server.say(end)
    assert server.wait_for_the_end() is None
    assert not server.runtime.exists()
