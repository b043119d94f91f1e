"""Stacks in an incident where the surroundings are against it, on a stand-in server with its real crash handler."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sglang_crashkit.handler.collectors.process_evidence import innermost, take_fault
from sglang_crashkit.handler.processes import TrackedProcess
from sglang_crashkit.incident.folder import IncidentFolder, new_id
from sglang_crashkit.kernel.pidfd import ProcessHandle
from sglang_crashkit.kernel.stack_hooks import HookFiles, StackHooks, describe
from sglang_crashkit.model.incident import ProcessReport
from sglang_crashkit.model.sample import Frame, Thread
from unit.support.server_driver import Server, crash, document_of, events_of, report_of
from unit.support.server_driver import piece_of as one_piece_of
from unit.support.targets import make_tool, state_of
from unit.support.waiting import child, wait_until

Start = Callable[..., Server]
HANGS = "exec sleep 600"


def pieces_of(document: dict[str, Any], title: str, kind: str) -> list[dict[str, Any]]:
    return [piece for piece in report_of(document, title)["evidence"] if piece["kind"] == kind]


def piece_of(document: dict[str, Any], title: str, kind: str) -> dict[str, Any]:
    """Return a piece, with its text."""
    piece = one_piece_of(report_of(document, title), kind)
    return piece | {"text": (document["folder"] / piece["path"]).read_text() if piece["path"] else ""}


@pytest.mark.parametrize(
    ("files", "kept"),
    [
        # Innermost first: in a hook, and in what that waits in.
        (["socket.py", "sglang_crashkit/protocol.py", "sglang/srt/a.py"], ["sglang/srt/a.py"]),
        (["socket.py", "sglang_crashkit/protocol.py", "x.py"], ["x.py"]),
        # What a hook only wraps is no part of it, whatever SGLang calls.
        (["x.py", "sglang/srt/b.py", "sglang_crashkit/srt/hooks.py", "sglang/srt/a.py"], None),
        (["/site-packages/sglang/srt/b.py", "/wheels/sglang_crashkit/srt/hooks.py", "x.py"], None),
        (
            ["x.py", "sglang_crashkit/srt/hooks.py", "sglang/srt/b.py", "sglang_crashkit/srt/hooks.py"],
            ["sglang/srt/b.py", "sglang_crashkit/srt/hooks.py"],
        ),
    ],
)
def test_what_a_process_does_is_below_its_hooks(files: list[str], kept: list[str] | None) -> None:
    frames = tuple(Frame("f", file, 1) for file in files)
    thread = Thread("MainThread", 7, active=False, owns_gil=False, frames=frames)
    assert innermost([thread], 7) == [f"f ({file}:1)" for file in (files if kept is None else kept)]


@pytest.fixture
def with_tool(tmp_path: Path) -> Callable[[str], dict[str, str]]:
    # One that hangs is waited for.
    return lambda script: {"SGLANG_CRASHKIT_PYSPY": make_tool(tmp_path, script), "SGLANG_CRASHKIT_CAPTURE_SECS": "3"}


@pytest.mark.story
@pytest.mark.parametrize("script", [HANGS, "echo rubbish", "exec yes", "exit 1"])
def test_where_py_spy_does_not_serve_every_process_tells_itself(
    start_server: Start, with_tool: Callable[[str], dict[str, str]], script: str
) -> None:
    document = crash(start_server(environ=with_tool(script)))
    for title in ("scheduler_TP0", "detokenizer"):
        piece = piece_of(document, title, "stack")
        assert (piece["status"], piece["source"]) == ("captured", "in-process")
        assert piece["reason"].startswith("py-spy")
        assert "wait_for_a_command" in piece["text"]
    assert report_of(document, "scheduler_TP0")["doing"][0].startswith("wait_for_a_command (")
    (root,) = [process for process in document["processes"] if process["role"] == "server"]
    assert one_piece_of(root, "stack")["source"] == "in-process"
    assert "stack: captured by in-process (stacks/" in (document["folder"] / "summary.md").read_text()


def test_faulthandler_tells_of_a_lock_held_in_c(
    start_server: Start, with_tool: Callable[[str], dict[str, str]]
) -> None:
    server = start_server(environ=with_tool(HANGS))
    server.say("tell scheduler_TP0 hold_the_lock")
    wait_until(lambda: state_of(server.ranks["scheduler_TP0"]) == "S", "it holds the lock")
    document = crash(server)
    piece = piece_of(document, "scheduler_TP0", "stack")
    assert (piece["status"], piece["source"]) == ("captured", "faulthandler")
    assert "py-spy did not end" in piece["reason"]
    assert report_of(document, "scheduler_TP0")["doing"][0].startswith("hold_the_lock (")


def test_a_stopped_rank_stays_stopped_and_the_reason_is_told(start_server: Start) -> None:
    server = start_server(environ={"SGLANG_CRASHKIT_NATIVE": "1"}, ends_after_dump=False)
    server.kill("scheduler_TP0", signal.SIGSTOP)
    server.kill("scheduler_TP1")
    wait_until(lambda: server.incident().document, "the incident is whole")
    assert state_of(server.ranks["scheduler_TP0"]) == "T"
    server.say("leave 0")
    piece = piece_of(document_of(server), "scheduler_TP0", "native_stack")
    assert (piece["status"], piece["reason"]) == ("skipped", "it is stopped, and must stay as it was found")


@pytest.mark.story
@pytest.mark.parametrize(("signum", "error"), [(signal.SIGSEGV, "Segmentation fault"), (signal.SIGABRT, "Aborted")])
def test_what_a_fatal_signal_ended_left_its_own_last_stack(
    start_server: Start, capfd: pytest.CaptureFixture[str], signum: int, error: str
) -> None:
    server = start_server()
    document = crash(server, signum)
    assert report_of(document, "scheduler_TP1")["exit"]["signal"] == signal.Signals(signum).name
    piece = piece_of(document, "scheduler_TP1", "fault_stack")
    assert (piece["status"], piece["source"]) == ("captured", "faulthandler")
    assert piece["text"].startswith(f"Fatal Python error: {error}\n")
    stored = json.loads((document["folder"] / piece["path"]).with_suffix(".json").read_text())
    assert stored["threads"][0]["frames"][0]["function"] == "wait_for_a_command"
    assert report_of(document, "scheduler_TP1")["doing"][0].startswith("wait_for_a_command (")
    assert pieces_of(document, "scheduler_TP0", "fault_stack") == []
    # The server repeats it on its own standard error.
    words = f"crash kit: process {server.ranks['scheduler_TP1']} of this server wrote before it died:"
    assert f"{words}\nFatal Python error: {error}" in capfd.readouterr().err


FATAL = "Fatal Python error: Segmentation fault\n\n"
MAIN_THREAD = 'hread 0x10 (most recent call first):\n  File "m.py", line 1 in step\n  File "m.py", line 2 in <module>\n'
OTHER_THREAD = 'hread 0x20 (most recent call first):\n  File "g.py", line 1 in compile\n'


@pytest.mark.parametrize(
    ("text", "in_main"),
    [
        (f"{FATAL}Current t{MAIN_THREAD}\nT{OTHER_THREAD}", True),
        (f"{FATAL}Current t{OTHER_THREAD}\nT{MAIN_THREAD}", False),
        # One that never ran Python.
        (f"{FATAL}T{OTHER_THREAD}\nT{MAIN_THREAD}", False),
        # No one hit anything, or no one knows who.
        (f"Current t{MAIN_THREAD}", None),
        (f"{FATAL}T{OTHER_THREAD}", None),
    ],
)
def test_the_thread_that_a_fatal_signal_hit_is_known(tmp_path: Path, text: str, in_main: bool | None) -> None:
    with child("ready(); pause()") as process:
        ended = TrackedProcess(ProcessHandle(process.pid), "sglang::scheduler", False, True, None)
        process.send_signal(signal.SIGSEGV)
        wait_until(ended.handle.has_exited, "it has ended")
        describe(tmp_path, StackHooks(ended.pid, ended.handle.start_ticks, 0x10, 0))
        HookFiles.of(tmp_path, ended.pid, ended.handle.start_ticks).fault.write_text(text)
        report = ProcessReport(ended.pid, ended.title, "scheduler", {})
        take_fault(ended, report, IncidentFolder(tmp_path / "incidents", "killed", new_id(), 0.0), tmp_path)
        ended.handle.close()
    assert report.hit_in_main is in_main
    assert [piece.status for piece in report.evidence] == ["captured"]


def test_native_stacks_are_taken_when_asked_for(start_server: Start) -> None:
    document = crash(start_server(environ={"SGLANG_CRASHKIT_NATIVE": "1"}))
    piece = piece_of(document, "scheduler_TP0", "native_stack")
    assert (piece["status"], piece["source"]) == ("captured", "py-spy")
    assert "native_stacks" in events_of(document)
    assert "wait_for_a_command" in piece["text"]
    # SIGKILL leaves neither of the dead one.
    for kind in ("native_stack", "fault_stack"):
        assert pieces_of(document, "scheduler_TP1", kind) == []


@pytest.mark.parametrize(
    ("native", "watchdog", "taken"), [(None, "hard", True), ("0", "hard", False), (None, "soft", False)]
)
def test_a_hang_that_ends_the_server_has_native_stacks(
    start_server: Start, native: str | None, watchdog: str, taken: bool
) -> None:
    environ = {"SGLANG_CRASHKIT_NATIVE": native} if native else {}
    server = start_server(environ=environ)
    server.say(f"tell scheduler_TP0 watchdog {watchdog}")
    if watchdog == "soft":
        wait_until(lambda: server.incident().document, "the incident is whole")
        server.say("leave 0")
    document = document_of(server)
    assert bool(pieces_of(document, "scheduler_TP0", "native_stack")) == taken
