"""The whole handler process beside a stand-in server: what opens an incident, and what the incident holds."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_crashkit.incident.exit_status import TERMINATION_LOG, ServerExit
from sglang_crashkit.incident.marker import MARKER
from sglang_crashkit.kernel import procfs
from sglang_crashkit.protocol import notify
from unit.support.server_driver import HOST, Server, document_of, events_of, finished, piece_of, report_of
from unit.support.targets import make_tool
from unit.support.waiting import LONG, wait_until

Start = Callable[..., Server]


@pytest.mark.story
def test_a_killed_rank_makes_one_whole_incident(start_server: Start) -> None:
    """What is in the files; `stories/test_golden` has the fields."""
    server = start_server()
    server.kill("scheduler_TP1")
    assert server.line() == "sigquit"
    document = document_of(server)
    folder, summary = document["folder"], (document["folder"] / "summary.md").read_text()
    assert document["id"] in folder.name
    assert (server.crash_folder / HOST / "crash_dump.pkl").read_bytes() == b"requests"
    survivor = report_of(document, "scheduler_TP0")
    stack = folder / piece_of(survivor, "stack")["path"]
    assert "wait_for_a_command (fake_server.py:" in stack.read_text()
    assert survivor["doing"][0] in document["verdict"]["text"]
    as_json = json.loads(stack.with_suffix(".json").read_text())
    assert as_json["threads"][0]["frames"][0]["function"] == "wait_for_a_command"
    for piece in (piece for process in document["processes"] for piece in process["evidence"]):
        assert piece["path"] is None or (folder / piece["path"]).is_file()
    times = [entry["time"] for entry in document["timeline"]]
    assert times == sorted(times)
    assert document["verdict"]["text"] in summary
    assert f"sglang-crashkit show {folder} --stacks\n" in summary


@pytest.mark.story
@pytest.mark.parametrize("mode", ["server", "library"])
def test_a_server_that_is_killed_with_its_handler_is_told_at_the_next_start(start_server: Start, mode: str) -> None:
    server = start_server(mode=mode)
    marker = server.spool / MARKER
    is_program = mode == "server"
    wait_until(lambda: marker.stat().st_size or not is_program, "the marker names the server")
    pids = (server.handler.pid, server.pid, *server.ranks.values())
    for signum in (signal.SIGSTOP, signal.SIGKILL):
        for pid in pids:
            os.kill(pid, signum)
    wait_until(lambda: not procfs.is_running(server.handler.pid), "the handler is gone")
    after = start_server(mode=mode)
    wait_until(lambda: not marker.exists(), "the next handler has looked")
    causes = [(found.document or {})["cause"] for found in after.incidents()]
    assert [(each["class"], each["level"]) for each in causes] == [("vanished", "established")] * is_program
    after.say("teardown")
    after.process.wait(LONG)
    after.wait_for_handler()
    assert not after.spool.exists()
    assert len(after.incidents()) == is_program


@pytest.mark.story
def test_a_rank_that_raises_has_its_own_record(start_server: Start) -> None:
    server = start_server()
    server.say(r"tell scheduler_TP0 raise the weights in \udcff are odd")
    document = document_of(server)
    assert (document["kind"], document["verdict"]["kind"]) == ("exception", "exception")
    # A file name that is not UTF-8 is told escaped: no reader has to cope with half a character.
    assert r"ValueError: the weights in \udcff are odd" in document["verdict"]["text"]
    rank = report_of(document, "scheduler_TP0")
    assert [frame.partition(" (")[0] for frame in rank["doing"][:2]] == ["sample", "forward_one_batch"]
    record = json.loads((document["folder"] / piece_of(rank, "exception")["path"]).read_text())
    assert record["message"] == "ValueError: the weights in \udcff are odd"
    # The rank itself is held in the hook meanwhile, so its stacks were captured as well.
    for title in ("scheduler_TP0", "scheduler_TP1"):
        assert piece_of(report_of(document, title), "stack")["status"] == "captured"
    assert document["requests"]["unfinished"] == 1
    assert not server.spool.exists()


def test_a_rank_killed_while_another_one_raises_is_one_incident(start_server: Start) -> None:
    server = start_server()
    # Else the server may have ended before the other rank comes to raise.
    os.kill(server.handler.pid, signal.SIGSTOP)
    server.kill("scheduler_TP1")
    wait_until(lambda: not procfs.is_running(server.ranks["scheduler_TP1"]), "the rank has ended")
    server.say("tell scheduler_TP0 raise Connection closed by peer")
    wait_until(lambda: list(server.spool.glob("*")), "the rank has left its record")
    os.kill(server.handler.pid, signal.SIGCONT)
    document = document_of(server)
    assert document["verdict"]["first_failure"]["title"] == "sglang::scheduler_TP1"
    assert "Connection closed by peer" in document["verdict"]["text"]
    assert piece_of(report_of(document, "scheduler_TP0"), "exception")["status"] == "captured"


def test_a_dump_that_fails_is_named(start_server: Start) -> None:
    server = start_server(dump_error="no room")
    server.kill("scheduler_TP0")
    document = document_of(server)
    assert document["requests"]["path"] is None
    assert document["requests"]["reason"] == "ValueError: no room"
    assert server.process.returncode == ServerExit.KILLED


def test_a_server_that_does_not_catch_sigquit_gets_none(start_server: Start) -> None:
    server = start_server(catches_sigquit=False)
    server.kill("scheduler_TP0")
    document = server.incident().document
    assert "sigquit_sent" not in events_of(document)
    assert document["requests"]["reason"] == "the server has no handler for SIGQUIT"
    assert server.process.poll() is None


def test_stacks_can_be_switched_off(start_server: Start) -> None:
    server = start_server(environ={"SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0"})
    # None is promised.
    assert server.ask("tell scheduler_TP1 watchdog soft") == "upstream's"
    server.kill("scheduler_TP0")
    server.process.wait(LONG)
    server.wait_for_handler()
    piece = piece_of(report_of(finished(server)[-1], "scheduler_TP1"), "stack")
    assert (piece["status"], piece["reason"]) == ("skipped", "switched off by SGLANG_PYSPY_DUMP_BEFORE_CRASH")


def test_a_main_process_that_somebody_stopped_stays_stopped(start_server: Start) -> None:
    server = start_server(environ={"SGLANG_CRASHKIT_BUDGET_SECS": "0.5", "SGLANG_CRASHKIT_END_SECS": "0.05"})
    os.kill(server.pid, signal.SIGSTOP)
    server.kill("scheduler_TP0")
    server.incident()
    assert procfs.read_stat(server.pid).state == "T"
    # No one ends it by itself.
    os.kill(server.pid, signal.SIGKILL)


# -- what is no incident


@pytest.mark.story
def test_an_announced_teardown_leaves_nothing(start_server: Start) -> None:
    server = start_server()
    assert {path.stat().st_mode & 0o077 for path in server.runtime.iterdir() if path.is_file()} == {0}
    server.say("teardown")
    assert server.wait_for_the_end() is None
    assert not server.runtime.exists()
    assert not server.spool.exists()
    assert sorted(os.listdir(server.crash_folder / HOST)) == ["crash_handler.log", "incidents"]  # noqa: PTH208
    assert list((server.crash_folder / HOST / "incidents").iterdir()) == []


# -- the handler as a process


def test_a_lost_crash_folder_loses_no_incident(start_server: Start) -> None:
    server = start_server()
    server.crash_folder.rename(server.crash_folder.with_name("elsewhere"))
    server.crash_folder.write_text("not a folder")
    server.kill("scheduler_TP1")
    server.process.wait(LONG)
    server.wait_for_handler()
    assert server.incident(server.fallback).document is not None


def test_a_rank_that_dies_in_its_capture_is_told(start_server: Start, tmp_path: Path) -> None:
    # GIVEN a py-spy that ends a rank; without the main process the others would end by themselves
    kill = 'grep -q "^sglang::scheduler" /proc/$5/cmdline && kill -9 $5'
    tool = make_tool(tmp_path, f"{kill}\nsleep 0.05; echo Error: no such process >&2; exit 1")
    server = start_server(environ={"SGLANG_CRASHKIT_PYSPY": tool})
    # WHEN a rank is killed, and py-spy takes the other one down with it
    server.kill("scheduler_TP1")
    # THEN that is said to have ended while its stacks were taken, and the first one is the cause
    document = document_of(server)
    rank = report_of(document, "scheduler_TP0")
    reason = "it ended while its stacks were taken (no such process)"
    assert (piece_of(rank, "stack")["status"], piece_of(rank, "stack")["reason"]) == ("failed", reason)
    assert document["verdict"]["first_failure"]["title"] == "sglang::scheduler_TP1"
    assert rank["exit"]["signal"] == "SIGKILL"


@pytest.mark.story
def test_a_handler_that_dies_does_not_hold_up_the_server(start_server: Start) -> None:
    server = start_server()
    server.handler.send_signal(signal.SIGKILL)
    wait_until(server.handler.has_exited, "the handler is dead")
    server.say("tell scheduler_TP0 raise x")
    assert server.line() == "sigquit"
    assert server.process.wait(LONG) == ServerExit.CRASHED
    assert (server.crash_folder / HOST / "crash_dump.pkl").read_bytes() == b"requests"


# -- watchdogs


@pytest.mark.story
def test_a_hard_watchdog_has_all_ranks_captured_first(start_server: Start) -> None:
    server = start_server()
    assert server.ask("tell scheduler_TP1 watchdog hard") == "the handler"
    assert server.line() == "sigquit"
    document = document_of(server)
    assert (document["kind"], document["trigger"]["event"]) == ("hang", "watchdog_timeout")
    for name in ("scheduler_TP0", "scheduler_TP1", "detokenizer"):
        assert piece_of(report_of(document, name), "stack")["status"] == "captured"
    verdict = document["verdict"]
    assert (verdict["kind"], verdict["level"]) == ("hang", "supported")
    assert verdict["first_failure"]["title"] == "sglang::scheduler_TP1"
    assert "made no progress for 20 s" in verdict["text"]
    wanted = ["watchdog_timeout", "stacks_captured", "requests_saved"]
    assert [event for event in events_of(document) if event in wanted] == wanted


@pytest.mark.parametrize("how", ["kill", "exit 0"])
def test_a_node_that_waits_for_its_ranks_ends_with_any(start_server: Start, how: str) -> None:
    server = start_server(launching=True)
    if how == "exit 0":
        server.say("tell scheduler_TP1 exit_later 0")
    server.say("join scheduler_TP0")
    if how == "kill":
        server.kill("scheduler_TP1")
    assert server.line() == "sigquit"
    document = document_of(server)
    assert server.process.returncode == (ServerExit.KILLED if how == "kill" else ServerExit.FAILED_START)
    assert document["verdict"]["first_failure"]["title"] == "sglang::scheduler_TP1"
    assert piece_of(report_of(document, "scheduler_TP0"), "stack")["status"] == "captured"


# -- one quiet server for what is no incident and changes nothing


def test_a_forked_copy_with_its_parents_title_may_end(quiet_server: Server) -> None:
    server = quiet_server
    copies = [int(server.ask("tell scheduler_TP0 copy")) for _ in range(2)]
    assert {procfs.read_title(pid) for pid in copies} == {"sglang::scheduler_TP0"}
    wait_until(lambda: set(copies) <= server.watched(), "the handler sees the copies")
    os.kill(copies[0], signal.SIGUSR1)
    os.kill(copies[1], signal.SIGKILL)
    wait_until(lambda: not set(copies) & server.watched(), "the handler lets go of the copies")
    assert server.incidents() == []


@pytest.mark.parametrize(
    ("title", "told"), [("sglang::scheduler_TP2", True), ("sglang::encoder_TP1", True), ("cc", False)]
)
def test_a_rank_that_another_daemon_started_is_the_servers_by_its_own_word(
    start_server: Start, title: str, told: bool
) -> None:
    server = start_server(mode="library")
    say = "import sys; from sglang_crashkit.protocol import notify; notify(sys.argv[1], 'member', title=sys.argv[2]); "
    command = [
        sys.executable,
        "-c",
        f"{say} print(flush=True); sys.stdin.read()",
        str(server.runtime / "handler.sock"),
        title,
    ]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as rank:
        rank.stdout.readline()
        server.settle()
        rank.kill()
    if told:
        document = server.incident().document
        assert document["kind"] == "killed"
        assert document["verdict"]["first_failure"] == {"pid": rank.pid, "title": title}
    else:
        server.settle()
        assert server.incidents() == []


def test_what_is_no_message_of_a_process_of_the_server_means_nothing(quiet_server: Server) -> None:
    server = quiet_server
    path = str(server.runtime / "handler.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        for data in (b"", b"{", b"[]", b"{}", b'{"event": 1}', b"\xff" * 1000, b"[" * 50_000, b'{"event": "unheard"}'):
            sender.sendto(data, path)
    # A process outside the tree cannot open an incident, and a teardown of something else is none of the server.
    dumps, others = ("crash_dump_begun", "crash_dump_ended"), ("launch_failed", "watchdog_timeout", "stacks_wanted")
    for event in ("exception", *dumps, *others):
        notify(path, event, pid=server.pid, message="ValueError: not mine")
    for pid in (os.getpid(), -1, "x", None, 2**70, [1]):
        notify(path, "teardown", pid=pid)
    server.settle()
    assert server.incidents() == []


@pytest.mark.parametrize(
    ("fault", "status", "verdict"),
    [
        ("SIGKILL", ServerExit.KILLED, "signal"),
        ("abort", 128 + signal.SIGABRT, "signal"),
        ("raise ValueError", ServerExit.RAISED, "exception"),
        ("raise Connection closed by peer", ServerExit.LOST_PEER, "lost_peer"),
        ("exit 0", ServerExit.EXITED, "exit_status"),
        ("exit 3", ServerExit.EXITED, "exit_status"),
        ("watchdog hard", ServerExit.HUNG, "hang"),
    ],
)
def test_the_servers_status_tells_what_came_first(start_server: Start, fault: str, status: int, verdict: str) -> None:
    server, name = start_server(), "detokenizer" if fault == "SIGKILL" else "scheduler_TP1"
    server.strike(name, fault)
    assert server.process.wait(LONG) == status
    found = document_of(server)["verdict"]
    assert (found["kind"], found["first_failure"]["title"]) == (verdict, f"sglang::{name}")


@pytest.mark.story
@pytest.mark.parametrize(
    ("fault", "started", "status", "event", "reason"),
    [
        ("raise out of memory", False, ServerExit.FAILED_START, "launch_failed", "the server had not started to serve"),
        ("abort", False, 128 + signal.SIGABRT, "launch_failed", "the server had not started to serve"),
        ("raise x", True, ServerExit.RAISED, "child_failed", "the server's main process held no requests"),
    ],
)
def test_so_does_that_of_a_server_that_did_not_start(
    start_server: Start, fault: str, started: bool, status: int, event: str, reason: str
) -> None:
    server = start_server(launching=True, started=started)
    server.say(f"tell scheduler_TP0 {fault}")
    assert server.process.wait(LONG) == status
    document = document_of(server)
    assert document["requests"]["reason"] == reason
    events = events_of(document)
    assert event in events
    assert events.index("incident_finished") < events.index("teardown")


@pytest.mark.parametrize(
    ("fault", "status"), [("SIGKILL", ServerExit.KILLED), ("raise ValueError", ServerExit.RAISED), ("exit 0", 84)]
)
def test_an_unwritten_crash_ends_the_server_with_its_status(
    start_server: Start, tmp_path: Path, capfd: pytest.CaptureFixture[str], fault: str, status: int
) -> None:
    message = tmp_path / "message"
    message.touch()
    server = start_server(environ={TERMINATION_LOG: str(message)})
    for folder in (server.crash_folder / HOST, server.fallback):
        shutil.rmtree(folder / "incidents", ignore_errors=True)
        (folder / "incidents").write_text("a file")
    server.strike("scheduler_TP1", fault)
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
    server = start_server(environ={TERMINATION_LOG: str(message)})
    assert server.ask("tell scheduler_TP0 watchdog soft") == "the handler"
    server.incident()
    os.kill(server.pid, signal.SIGTERM)
    assert server.process.wait(LONG) == 41
    assert message.read_text() == ""


def test_a_main_process_that_hangs_in_its_dump_ends(start_server: Start) -> None:
    environ = {"SGLANG_CRASHKIT_BUDGET_SECS": "0.5", "SGLANG_CRASHKIT_END_SECS": "0.2"}
    server = start_server(environ=environ, dump_secs=3600.0)
    server.kill("scheduler_TP0")
    assert server.process.wait(LONG) == ServerExit.CRASHED


# -- an end that was asked for


@pytest.mark.parametrize(
    ("catches", "signum", "status"),
    [
        pytest.param(True, signal.SIGTERM, 41, marks=pytest.mark.story),
        # As a node of rank above 0 has it before 0.5.21, and any server before it serves.
        *((False, signum, -signum) for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)),
    ],
)
def test_a_server_that_is_asked_to_end_ends_as_before(
    start_server: Start, catches: bool, signum: signal.Signals, status: int
) -> None:
    server = start_server(catches_sigterm=catches)
    os.kill(server.pid, signum)
    assert server.process.wait(LONG) == status
    assert server.wait_for_the_end() is None
