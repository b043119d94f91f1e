"""The whole handler process beside a stand-in server: what opens an incident, and what the incident holds."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import setproctitle

import sglang_crashkit
from sglang_crashkit.handler.folders import Place
from sglang_crashkit.handler.server import CrashHandler
from sglang_crashkit.handler.session import Session
from sglang_crashkit.incident.exit_status import TERMINATION_LOG, ServerExit
from sglang_crashkit.incident.store import StoredIncident
from sglang_crashkit.kernel import procfs
from sglang_crashkit.protocol import Mailbox, notify
from sglang_crashkit.settings import Settings
from unit.handler.driver import HOST, Server
from unit.handler.launching import launch
from unit.waiting import LONG, child, descriptors, wait_until

Start = Callable[..., Server]


def document_of(server: Server) -> dict[str, Any]:
    """Wait until the server and its handler are gone and return the one incident that they left."""
    stored = server.wait_for_the_end()
    assert stored is not None, "there is no incident"
    assert stored.finished
    assert stored.document is not None
    return stored.document


def process_of(document: dict[str, Any], title: str) -> dict[str, Any]:
    found = [process for process in document["processes"] if process["title"] == f"sglang::{title}"]
    assert len(found) == 1, found
    process: dict[str, Any] = found[0]
    return process


def piece_of(process: dict[str, Any], kind: str) -> dict[str, Any]:
    found = [piece for piece in process["evidence"] if piece["kind"] == kind]
    assert len(found) == 1, process["evidence"]
    piece: dict[str, Any] = found[0]
    return piece


def events_of(document: dict[str, Any]) -> list[str]:
    return [entry["event"] for entry in document["timeline"]]


@pytest.mark.story
def test_a_killed_rank_makes_one_whole_incident(start_server: Start) -> None:
    server = start_server()
    server.kill("scheduler_TP1")
    assert server.line() == "sigquit"
    stored = server.wait_for_the_end()
    assert stored is not None
    document = stored.document
    assert document is not None

    assert document["schema_version"] == 1
    assert document["complete"] is True
    assert document["kind"] == "killed"
    assert document["id"] in stored.path.name
    killed = {"pid": server.ranks["scheduler_TP1"], "title": "sglang::scheduler_TP1"}
    assert {"event": "process_exited"} | killed == {k: v for k, v in document["trigger"].items() if k != "time"}
    assert {"pid", "start_ticks", "pid_namespace", "sglang_version", "kit_version", "hostname"} == document[
        "server"
    ].keys()
    assert document["server"]["pid"] == server.pid
    assert document["requests"] == {
        "finished": 3,
        "unfinished": 1,
        "path": str(server.crash_folder / HOST / "crash_dump.pkl"),
        "reason": None,
        "source": "pickle",
        "journal": None,
    }
    assert Path(document["requests"]["path"]).read_bytes() == b"requests"
    verdict = document["verdict"]
    assert (verdict["kind"], verdict["level"], verdict["first_failure"]) == ("signal", "established", killed)

    dead, survivor = process_of(document, "scheduler_TP1"), process_of(document, "scheduler_TP0")
    assert (dead["role"], dead["rank"]) == ("scheduler", {"tp": 1})
    assert (dead["exit"]["code"], dead["exit"]["signal"], dead["exit"]["cause"]) == (None, "SIGKILL", "signal")
    assert piece_of(dead, "exit")["status"] == "captured"
    assert piece_of(dead, "stack")["status"] == "skipped"
    assert survivor["exit"] is None
    assert piece_of(survivor, "proc_state")["status"] == "captured"
    piece = piece_of(survivor, "stack")
    assert (piece["status"], piece["reason"]) == ("captured", None)
    assert "wait_for_a_command (fake_server.py:" in (stored.path / piece["path"]).read_text()
    assert survivor["doing"][0].startswith("wait_for_a_command (fake_server.py:")
    assert survivor["doing"][0] in verdict["text"]
    as_json = json.loads((stored.path / piece["path"]).with_suffix(".json").read_text())
    assert as_json["threads"][0]["frames"][0]["function"] == "wait_for_a_command"
    for process in document["processes"]:
        for piece in process["evidence"]:
            assert (piece["status"] == "captured") == (piece["reason"] is None)
            assert piece["path"] is None or (stored.path / piece["path"]).is_file()

    times = [entry["time"] for entry in document["timeline"]]
    assert times == sorted(times)
    wanted = [
        "stacks_captured",
        "sigquit_sent",
        "crash_dump_begun",
        "requests_saved",
        "incident_finished",
        "server_exited",
    ]
    assert events_of(document)[0] == "process_exited"
    assert [event for event in events_of(document) if event in wanted] == wanted
    assert verdict["text"] in (stored.path / "summary.md").read_text()


@pytest.mark.parametrize("signum", [signal.SIGSEGV, signal.SIGBUS])
def test_a_rank_that_crashes_is_named_with_its_signal(start_server: Start, signum: signal.Signals) -> None:
    server = start_server()
    server.kill("scheduler_TP0", signum)
    document = document_of(server)
    assert document["kind"] == "killed"
    assert process_of(document, "scheduler_TP0")["exit"]["signal"] == signum.name
    assert document["verdict"]["level"] == "established"
    assert f"was killed by {signum.name}" in document["verdict"]["text"]


def test_a_rank_that_exits_with_a_status_is_an_incident(start_server: Start) -> None:
    server = start_server()
    server.say("tell scheduler_TP1 exit 3")
    document = document_of(server)
    assert document["kind"] == "exited"
    end = process_of(document, "scheduler_TP1")["exit"]
    assert (end["code"], end["signal"], end["cause"]) == (3, None, "exit_status")
    assert document["verdict"]["kind"] == "exit_status"
    assert piece_of(process_of(document, "scheduler_TP0"), "stack")["status"] == "captured"
    assert "sigquit_sent" in events_of(document)


@pytest.mark.story
def test_a_dead_detokenizer_is_an_incident(start_server: Start) -> None:
    server = start_server()
    server.kill("detokenizer")
    assert document_of(server)["verdict"]["first_failure"]["title"] == "sglang::detokenizer"


@pytest.mark.story
def test_an_exception_of_a_rank_makes_an_incident_with_its_own_record(start_server: Start) -> None:
    server = start_server()
    server.say(r"tell scheduler_TP0 raise the weights in \udcff are odd")
    stored = server.wait_for_the_end()
    assert stored is not None
    assert stored.document is not None
    document = stored.document
    assert document["kind"] == "exception"
    assert document["verdict"]["kind"] == "exception"
    # A file name that is not UTF-8 is told escaped: no reader has to cope with half a character.
    assert r"ValueError: the weights in \udcff are odd" in document["verdict"]["text"]
    rank = process_of(document, "scheduler_TP0")
    assert rank["doing"][0].startswith("sample (")
    assert rank["doing"][1].startswith("forward_one_batch (")
    record = json.loads((stored.path / piece_of(rank, "exception")["path"]).read_text())
    assert record["message"] == "ValueError: the weights in \udcff are odd"
    assert piece_of(process_of(document, "scheduler_TP1"), "stack")["status"] == "captured"
    # The rank itself is held in the hook meanwhile, so its stacks were captured as well.
    assert piece_of(rank, "stack")["status"] == "captured"
    assert document["requests"]["unfinished"] == 1
    assert not server.spool.exists()


def test_a_rank_killed_while_another_one_raises_is_one_incident(start_server: Start) -> None:
    server = start_server()
    assert server.handler is not None
    # Else the server may have ended before the other rank comes to raise.
    os.kill(server.handler.pid, signal.SIGSTOP)
    server.kill("scheduler_TP1")
    server.say("tell scheduler_TP0 raise Connection closed by peer")
    wait_until(lambda: list(server.spool.glob("*")), "the rank has left its record")
    os.kill(server.handler.pid, signal.SIGCONT)
    document = document_of(server)
    assert document["verdict"]["first_failure"]["title"] == "sglang::scheduler_TP1"
    assert "Connection closed by peer" in document["verdict"]["text"]
    assert piece_of(process_of(document, "scheduler_TP0"), "exception")["status"] == "captured"


@pytest.mark.story
def test_the_death_of_the_server_itself_is_an_incident(start_server: Start) -> None:
    server = start_server()
    os.kill(server.pid, signal.SIGKILL)
    document = document_of(server)
    assert document["verdict"]["first_failure"]["pid"] == server.pid
    assert document["verdict"]["kind"] == "signal"
    assert document["requests"]["path"] is None


@pytest.mark.story
def test_a_failed_launch_is_an_incident_before_the_tree_is_killed(start_server: Start) -> None:
    server = start_server(launching=True)
    server.say("tell scheduler_TP0 raise out of memory")
    document = document_of(server)
    assert document["requests"]["reason"] == "the server had not started to serve"
    assert document["verdict"]["kind"] == "exception"
    assert events_of(document).index("incident_finished") < events_of(document).index("teardown")


def test_a_dump_that_fails_is_named_and_the_server_still_ends(start_server: Start) -> None:
    server = start_server(dump_error="no room")
    server.kill("scheduler_TP0")
    document = document_of(server)
    assert document["requests"]["path"] is None
    assert document["requests"]["reason"] == "ValueError: no room"
    assert server.process.returncode == ServerExit.KILLED


def test_a_server_that_does_not_answer_gets_its_incident_after_a_while(start_server: Start) -> None:
    server = start_server(answers_sigquit=False, environ={"SGLANG_CRASHKIT_BUDGET_SECS": "0.7"})
    server.kill("scheduler_TP0")
    document = server.incident().document
    assert document is not None
    assert "budget_spent" in events_of(document)
    assert document["verdict"]["first_failure"]["title"] == "sglang::scheduler_TP0"
    assert server.process.poll() is None


def test_a_server_without_a_handler_for_sigquit_is_not_sent_one(start_server: Start) -> None:
    server = start_server(catches_sigquit=False)
    server.kill("scheduler_TP0")
    document = server.incident().document
    assert document is not None
    assert "sigquit_sent" not in events_of(document)
    assert document["requests"]["reason"] == "the server has no handler for SIGQUIT"
    assert server.process.poll() is None


def test_stacks_can_be_switched_off(start_server: Start) -> None:
    server = start_server(environ={"SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0"})
    server.kill("scheduler_TP0")
    piece = piece_of(process_of(document_of(server), "scheduler_TP1"), "stack")
    assert (piece["status"], piece["reason"]) == ("skipped", "switched off by SGLANG_PYSPY_DUMP_BEFORE_CRASH")


def test_a_main_process_that_somebody_stopped_stays_stopped(start_server: Start) -> None:
    server = start_server(environ={"SGLANG_CRASHKIT_BUDGET_SECS": "0.5", "SGLANG_CRASHKIT_END_SECS": "0.05"})
    os.kill(server.pid, signal.SIGSTOP)
    server.kill("scheduler_TP0")
    server.incident()
    stat = procfs.read_stat(server.pid)
    assert stat is not None
    assert stat.state == "T"
    # Nobody ends it by itself.
    os.kill(server.pid, signal.SIGKILL)


def test_a_stopped_rank_is_captured_and_stays_stopped(start_server: Start) -> None:
    server = start_server(answers_sigquit=False)
    server.kill("scheduler_TP0", signal.SIGSTOP)
    wait_until(lambda: procfs.read_stat(server.ranks["scheduler_TP0"]).state == "T", "the rank is stopped")  # type: ignore[union-attr]
    server.kill("scheduler_TP1")
    assert server.line() == "sigquit"
    stat_line = procfs.read_stat(server.ranks["scheduler_TP0"])
    assert stat_line is not None
    assert stat_line.state == "T"
    os.kill(server.pid, signal.SIGKILL)
    rank = process_of(document_of(server), "scheduler_TP0")
    assert rank["state"]["State"].startswith("T")
    assert piece_of(rank, "stack")["status"] == "captured"


# -- what is no incident


@pytest.mark.story
def test_an_announced_teardown_is_no_incident_and_the_handler_leaves_nothing(start_server: Start) -> None:
    server = start_server()
    server.say("teardown")
    assert server.wait_for_the_end() is None
    assert not server.runtime.exists()
    assert not server.spool.exists()
    assert server.crash_folder is not None
    assert sorted(os.listdir(server.crash_folder / HOST)) == ["crash_handler.log", "incidents"]  # noqa: PTH208
    assert list((server.crash_folder / HOST / "incidents").iterdir()) == []


def test_sigterm_to_the_whole_group_is_no_incident(start_server: Start) -> None:
    server = start_server()
    os.killpg(server.pid, signal.SIGTERM)
    assert server.wait_for_the_end() is None


def test_ranks_that_end_before_the_shutdown_is_announced_are_no_incident(start_server: Start) -> None:
    server = start_server()
    server.kill("scheduler_TP0", signal.SIGTERM)
    wait_until(server.incidents, "the exit is captured as if it were one")
    server.say("teardown")
    assert server.wait_for_the_end() is None


def test_an_announcement_counts_although_the_server_is_dead_when_it_is_read(
    short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # GIVEN a rank that ended softly, and a server that announces its end and dies while that is looked into
    monkeypatch.setattr(tempfile, "tempdir", str(short_folder))
    place = Place(short_folder / "host", short_folder / "spool", short_folder / "runtime")
    place.runtime.mkdir()
    code = """
import subprocess
head = "import setproctitle, signal; setproctitle.setproctitle('sglang::scheduler_TP0'); print(flush=True); "
rank = subprocess.Popen([sys.executable, "-c", head + "signal.pause()"], stdout=subprocess.PIPE)
rank.stdout.readline()
ready(rank.pid)
pause()
"""
    path = place.runtime / "handler.sock"
    with child(code) as server, Mailbox.bind(path) as receiver:
        begin = Session._open

        def begin_late(session: Session, *args: Any) -> None:
            begin(session, *args)
            notify(str(path), "teardown", pid=server.pid)
            server.kill()
            server.wait(30)

        monkeypatch.setattr(Session, "_open", begin_late)
        handler = CrashHandler(server.pid, Mailbox(receiver), place, Settings.from_environ({}))
        os.kill(int(server.first_line), signal.SIGTERM)  # type: ignore[attr-defined]
        launch(handler, int(server.first_line))  # type: ignore[attr-defined]
        # WHEN the handler does its work
        handler.run()
    # THEN there is no incident
    assert list((place.host_folder / "incidents").iterdir()) == []


# -- the handler as a process


def test_it_is_neither_in_the_servers_tree_nor_on_its_descriptors(start_server: Start) -> None:
    server = start_server()
    assert server.handler is not None
    children = {process.pid for process in psutil.Process(server.pid).children(recursive=True)}
    assert set(server.ranks.values()) <= children
    assert server.handler.pid not in children
    assert os.getsid(server.handler.pid) != os.getsid(server.pid)
    assert server.process.stdout is not None
    output = os.fstat(server.process.stdout.fileno()).st_ino
    held = [entry for entry in Path(f"/proc/{server.handler.pid}/fd").iterdir() if entry.exists()]
    assert output not in {entry.stat().st_ino for entry in held}


def test_a_reader_of_the_servers_output_sees_its_end_while_the_handler_still_works(start_server: Start) -> None:
    server = start_server()
    assert server.handler is not None
    os.kill(server.handler.pid, signal.SIGSTOP)
    try:
        for name in server.ranks:
            server.kill(name)
        os.kill(server.pid, signal.SIGKILL)
        assert server.process.stdout is not None
        assert server.process.stdout.read() == b""
        assert not server.handler.has_exited()
    finally:
        os.kill(server.handler.pid, signal.SIGCONT)
    server.wait_for_handler()


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT])
def test_a_signal_to_end_does_not_end_it_before_the_server(quiet_server: Server, signum: signal.Signals) -> None:
    assert quiet_server.handler is not None
    quiet_server.handler.send_signal(signum)
    quiet_server.settle()


def test_all_it_writes_is_for_its_user_alone_whatever_the_umask(start_server: Start) -> None:
    server = start_server(umask=0)
    server.say("tell scheduler_TP0 raise x")
    stored = server.wait_for_the_end()
    assert stored is not None
    assert server.crash_folder is not None
    modes = {path: stat.S_IMODE(path.lstat().st_mode) for path in server.crash_folder.rglob("*")}
    modes[server.crash_folder] = stat.S_IMODE(server.crash_folder.lstat().st_mode)
    modes[server.fallback] = stat.S_IMODE(server.fallback.lstat().st_mode)
    assert {path: oct(mode) for path, mode in modes.items() if path.is_dir() and mode != 0o700} == {}
    assert {path: oct(mode) for path, mode in modes.items() if path.is_file() and mode != 0o600} == {}
    assert any(path.name.endswith(".exception.json") for path in modes)


def test_without_a_usable_crash_folder_the_incident_goes_to_the_temporary_one(
    start_server: Start, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    server = start_server(crash_folder=tmp_path / "file" / "crash", dump_error="no such folder")
    server.kill("scheduler_TP1")
    server.process.wait(30)
    server.wait_for_handler()
    document = server.incident(server.fallback).document
    assert document is not None
    assert document["verdict"]["first_failure"]["title"] == "sglang::scheduler_TP1"


def test_a_link_in_a_shared_crash_folder_is_not_followed(start_server: Start, tmp_path: Path) -> None:
    (tmp_path / "crash").mkdir()
    (tmp_path / "theirs").mkdir()
    (tmp_path / "crash" / HOST).symlink_to(tmp_path / "theirs")
    server = start_server()
    server.kill("scheduler_TP1")
    server.process.wait(30)
    server.wait_for_handler()
    stored = server.incident(server.fallback)
    assert stored.document is not None
    assert stored.document["requests"]["path"] == str(server.fallback / HOST / "crash_dump.pkl")
    assert list((tmp_path / "theirs").iterdir()) == []


def test_a_crash_folder_that_is_lost_later_does_not_lose_the_incident(start_server: Start) -> None:
    server = start_server()
    assert server.crash_folder is not None
    server.crash_folder.rename(server.crash_folder.with_name("elsewhere"))
    server.crash_folder.write_text("not a folder")
    server.kill("scheduler_TP1")
    server.process.wait(30)
    server.wait_for_handler()
    assert server.incident(server.fallback).document is not None


@pytest.mark.story
def test_without_py_spy_the_incident_is_whole_and_says_so(start_server: Start, tmp_path: Path) -> None:
    python = tmp_path / "environment" / "bin" / "python3"
    python.parent.mkdir(parents=True)
    python.symlink_to(psutil.Process().exe())
    site = Path(setproctitle.__file__).parents[1]
    kit = Path(sglang_crashkit.__file__).parents[1]
    server = start_server(python=str(python), environ={"PYTHONPATH": f"{kit}:{site}", "PATH": "/nowhere:/usr/bin:/bin"})
    server.kill("scheduler_TP1")
    document = document_of(server)
    piece = piece_of(process_of(document, "scheduler_TP0"), "stack")
    assert (piece["status"], piece["source"]) == ("captured", "in-process")
    assert piece["reason"] == "py-spy is not installed; next: pip install py-spy"
    assert document["verdict"]["level"] == "established"


def test_a_rank_that_dies_while_it_is_captured_is_said_to(start_server: Start, tmp_path: Path) -> None:
    # GIVEN a py-spy that ends a rank; without the main process the others would end by themselves
    python = tmp_path / "environment" / "bin" / "python3"
    python.parent.mkdir(parents=True)
    python.symlink_to(psutil.Process().exe())
    site = Path(setproctitle.__file__).parents[1]
    kit = Path(sglang_crashkit.__file__).parents[1]
    tool = python.with_name("py-spy")
    kill = 'grep -q "^sglang::scheduler" /proc/$5/cmdline && kill -9 $5'
    tool.write_text(f"#!/bin/sh\n{kill}\nsleep 0.05; echo Error: no such process >&2; exit 1\n")
    tool.chmod(0o755)
    server = start_server(python=str(python), environ={"PYTHONPATH": f"{kit}:{site}"})
    # WHEN a rank is killed, and py-spy takes the other one down with it
    server.kill("scheduler_TP1")
    # THEN that is said to have ended while its stacks were taken, and the first one is the cause
    document = document_of(server)
    piece = piece_of(process_of(document, "scheduler_TP0"), "stack")
    assert piece["status"] == "failed"
    assert piece["reason"] == "it ended while its stacks were taken (no such process)"
    assert document["verdict"]["first_failure"]["title"] == "sglang::scheduler_TP1"
    assert process_of(document, "scheduler_TP0")["exit"]["signal"] == "SIGKILL"


@pytest.mark.story
def test_a_handler_that_dies_does_not_hold_up_the_server(start_server: Start) -> None:
    server = start_server()
    assert server.handler is not None
    server.handler.send_signal(signal.SIGKILL)
    wait_until(server.handler.has_exited, "the handler is dead")
    server.say("tell scheduler_TP0 raise x")
    assert server.line() == "sigquit"
    assert server.process.wait(30) == ServerExit.CRASHED
    assert server.crash_folder is not None
    assert (server.crash_folder / HOST / "crash_dump.pkl").read_bytes() == b"requests"


#: Runs the handler, with a first child that is slow to write its file into the folder, which it makes anew if need be.
SLOW_CHILD = """
import sys, time
from sglang_crashkit.handler import __main__ as program
write = program.write_private

def write_late(path, data):
    time.sleep(0.3)
    path.parent.mkdir(exist_ok=True)
    write(path, data)

program.write_private = write_late
sys.exit(program.main())
"""


@pytest.mark.parametrize("program", [("-m", "sglang_crashkit.handler"), ("-c", SLOW_CHILD)], ids=["itself", "slow"])
def test_a_handler_whose_server_is_gone_at_once_leaves_no_folder(short_folder: Path, program: tuple[str, str]) -> None:
    with child("ready()") as process:
        process.wait(LONG)
    runtime, crash = short_folder / "runtime", short_folder / "crash"
    runtime.mkdir()
    options = {"server-pid": process.pid, "crash-folder": crash, "runtime": runtime}
    with Mailbox.bind(runtime / "handler.sock") as receiver:
        options |= {"socket-fd": receiver.fileno()}
        subprocess.run(
            [sys.executable, *program, *(f"--{name}={value}" for name, value in options.items())],
            pass_fds=[receiver.fileno()],
            check=True,
            timeout=LONG,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"SGLANG_CRASHKIT_JOURNAL": "0"},
        )
    wait_until(lambda: not runtime.exists() and not list(crash.glob("*/incidents/.*")), "both folders are removed")


# -- watchdogs


def finished_kinds(server: Server) -> list[str]:
    stored = [found for found in server.incidents() if found.finished and found.document]
    return [str(found.document["kind"]) for found in stored if found.document]


@pytest.mark.story
def test_a_watchdog_that_ends_the_server_has_all_ranks_captured_first(start_server: Start) -> None:
    server = start_server()
    assert server.ask("tell scheduler_TP1 watchdog hard") == "the handler"
    assert server.line() == "sigquit"
    document = document_of(server)
    assert document["kind"] == "hang"
    assert document["trigger"]["event"] == "watchdog_timeout"
    for name in ("scheduler_TP0", "scheduler_TP1", "detokenizer"):
        assert piece_of(process_of(document, name), "stack")["status"] == "captured"
    verdict = document["verdict"]
    assert (verdict["kind"], verdict["level"]) == ("hang", "supported")
    assert verdict["first_failure"]["title"] == "sglang::scheduler_TP1"
    assert "made no progress for 20 s" in verdict["text"]
    events = [
        event for event in events_of(document) if event in ("stacks_captured", "watchdog_timeout", "requests_saved")
    ]
    assert events == ["watchdog_timeout", "stacks_captured", "requests_saved"]


def test_a_soft_watchdog_makes_an_incident_of_a_server_that_goes_on(start_server: Start) -> None:
    server = start_server()
    assert server.ask("tell scheduler_TP1 watchdog soft") == "the handler"
    assert server.ask("tell scheduler_TP0 watchdog soft") == "the handler"
    document = server.incident().document
    assert document is not None
    assert document["kind"] == "hang"
    assert document["requests"]["reason"] == "the server went on"
    assert events_of(document).count("watchdog_timeout") == 2
    assert server.process.poll() is None


@pytest.mark.parametrize("whole", [False, True])
def test_a_death_after_a_soft_watchdog_is_an_incident_of_its_own(start_server: Start, whole: bool) -> None:
    server = start_server()
    assert server.ask("tell scheduler_TP1 watchdog soft") == "the handler"
    if whole:
        server.incident()
    server.kill("scheduler_TP0")
    assert server.line() == "sigquit"
    server.process.wait(LONG)
    server.wait_for_handler()
    assert sorted(finished_kinds(server)) == ["hang", "killed"]
    killed = next(found.document for found in server.incidents() if found.document and found.document["kind"] != "hang")
    assert killed["verdict"]["first_failure"]["title"] == "sglang::scheduler_TP0"
    assert killed["requests"]["path"] is not None


def test_stacks_can_be_asked_for(start_server: Start) -> None:
    server = start_server()
    assert server.ask("tell scheduler_TP0 snapshot") == "the handler"
    document = server.incident().document
    assert document is not None
    assert (document["kind"], document["verdict"]["kind"]) == ("snapshot", "unknown")
    assert piece_of(process_of(document, "scheduler_TP1"), "stack")["status"] == "captured"
    # What it has by now is no answer to another question, which is an incident of its own.
    assert server.ask("tell scheduler_TP0 snapshot") == "the handler"
    wait_until(lambda: finished_kinds(server) == ["snapshot"] * 2, "the second incident is finished")


def test_no_stack_is_promised_where_stacks_are_switched_off(start_server: Start) -> None:
    server = start_server(environ={"SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0"})
    assert server.ask("tell scheduler_TP1 watchdog soft") == "upstream's"


# -- several tokenizers


def start_two_tokenizers(server: Server) -> list[str]:
    names = ["tokenizer_worker:1", "tokenizer_worker:2"]
    for name in names:
        server.ranks[name] = int(server.ask(f"start sglang::{name}"))
    server.settle()
    return names


def test_the_requests_of_all_tokenizers_are_one_incidents(start_server: Start) -> None:
    server = start_server(answers_sigquit=False)
    names = start_two_tokenizers(server)
    server.kill("scheduler_TP1")
    assert server.line() == "sigquit"
    server.ask("dump_begun")
    for name in names:
        # None waits for the incident, which waits for all of them.
        assert server.ask(f"tell {name} dump {server.crash_folder}") == "dumped"
    path = server.ask("dump_ended")
    document = server.incident().document
    assert document is not None
    assert document["id"] in path
    requests = document["requests"]
    assert (requests["finished"], requests["unfinished"], requests["reason"]) == (6, 2, None)
    saved = [entry["path"] for entry in document["timeline"] if entry["event"] == "requests_saved"]
    assert [Path(name).name for name in saved] == ["crash_dump.pkl", "crash_dump.1.pkl"]
    assert requests["path"] == saved[0]


def test_a_tokenizer_that_is_killed_does_not_end_the_server(start_server: Start) -> None:
    server = start_server()
    first, _second = start_two_tokenizers(server)
    server.kill(first)
    document = server.incident().document
    assert document is not None
    assert (document["kind"], document["requests"]["reason"]) == ("killed", "the server went on")
    assert "sigquit_sent" not in events_of(document)
    assert server.process.poll() is None
    # What happens to a rank next is another matter.
    server.kill("scheduler_TP0")
    assert server.line() == "sigquit"
    server.process.wait(LONG)
    server.wait_for_handler()
    assert finished_kinds(server) == ["killed", "killed"]


def test_a_tokenizer_that_was_replaced_while_it_started_explains_nothing(start_server: Start) -> None:
    server = start_server()
    start_two_tokenizers(server)
    pid = int(server.ask(f"start {SPAWNED}"))
    wait_until(lambda: pid in server.watched(), "the handler sees the child")
    os.kill(pid, signal.SIGKILL)
    server.settle()
    server.kill("scheduler_TP1")
    document = document_of(server)
    assert document["verdict"]["first_failure"]["title"] == "sglang::scheduler_TP1"


# -- a node of rank above 0, and the data-parallel controller


@pytest.mark.parametrize("how", ["kill", "exit 0"])
def test_a_node_that_waits_for_its_ranks_in_order_ends_with_any_of_them(start_server: Start, how: str) -> None:
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
    assert piece_of(process_of(document, "scheduler_TP0"), "stack")["status"] == "captured"


def test_a_rank_below_the_data_parallel_controller_is_watched(start_server: Start) -> None:
    server = start_server()
    pid = int(server.ask("tell scheduler_TP1 become_armed_controller sglang::scheduler_DP1_TP0"))
    server.settle()
    os.kill(pid, signal.SIGKILL)
    document = document_of(server)
    assert document["verdict"]["first_failure"] == {"pid": pid, "title": "sglang::scheduler_DP1_TP0"}


# -- one quiet server for what is no incident and changes nothing


@pytest.fixture(scope="module")
def quiet_server() -> Iterator[Server]:
    folder = Path(tempfile.mkdtemp(prefix="ck-"))
    try:
        server = Server(folder, crash_folder=folder / "crash")
        try:
            yield server
            assert server.process.poll() is None
            assert server.incidents() == []
        finally:
            server.close()
    finally:
        shutil.rmtree(folder)


def test_a_forked_copy_with_its_parents_title_may_end(quiet_server: Server) -> None:
    server = quiet_server
    copies = [int(server.ask("tell scheduler_TP0 copy")) for _ in range(2)]
    assert {procfs.read_title(pid) for pid in copies} == {"sglang::scheduler_TP0"}
    wait_until(lambda: set(copies) <= server.watched(), "the handler sees the copies")
    os.kill(copies[0], signal.SIGUSR1)
    os.kill(copies[1], signal.SIGKILL)
    wait_until(lambda: not set(copies) & server.watched(), "the handler lets go of the copies")
    assert server.incidents() == []


SPAWNED = "python -c multiprocessing.spawn"


def test_a_child_that_dies_before_it_says_what_it_is_opens_no_incident(start_server: Start) -> None:
    server = start_server()
    pid = int(server.ask(f"start {SPAWNED}"))
    wait_until(lambda: pid in server.watched(), "the handler sees the child")
    os.kill(pid, signal.SIGKILL)
    server.settle()
    assert server.incidents() == []


def test_a_child_that_died_before_it_said_what_it_is_explains_a_failed_launch(start_server: Start) -> None:
    server = start_server(launching=True)
    pid = int(server.ask(f"start {SPAWNED}"))
    wait_until(lambda: pid in server.watched(), "the handler sees the child")
    os.kill(pid, signal.SIGKILL)
    server.settle()
    os.kill(server.pid, signal.SIGQUIT)
    incident = server.wait_for_the_end()
    assert incident is not None
    assert incident.document is not None
    assert incident.document["verdict"]["first_failure"] == {"pid": pid, "title": SPAWNED}
    assert incident.document["verdict"]["kind"] == "signal"


def test_a_helper_may_be_killed(quiet_server: Server) -> None:
    quiet_server.settle()
    assert quiet_server.incidents() == []


def test_rubbish_is_passed_over(quiet_server: Server) -> None:
    server = quiet_server
    path = str(server.runtime / "handler.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        for data in (b"", b"{", b"[]", b"{}", b'{"event": 1}', b"\xff" * 1000, b"[" * 50_000, b'{"event": "unheard"}'):
            sender.sendto(data, path)
    server.settle()
    assert server.incidents() == []


#: Sends without an end, as fast as the handler takes it.
FLOOD = """
import json, socket
sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
data = json.dumps({"event": "exception", "wait": True}).encode()
sender.sendto(data, sys.argv[1])
ready()
while True:
    try: sender.sendto(data, sys.argv[1])
    except OSError: time.sleep(0.01)
"""


def test_a_flood_of_messages_of_another_process_holds_nobody(start_server: Start) -> None:
    server = start_server()
    with child(FLOOD, str(server.runtime / "handler.sock")):
        server.kill("scheduler_TP1")
        assert server.line() == "sigquit"
        began = time.monotonic()
        assert server.process.wait(LONG) == ServerExit.KILLED
        assert time.monotonic() - began < 10.0
        document = server.incident().document
    assert document is not None
    assert document["verdict"]["first_failure"]["pid"] == server.ranks["scheduler_TP1"]


@pytest.mark.parametrize(
    "event",
    [
        "exception",
        "crash_dump_begun",
        "crash_dump_ended",
        "launch_failed",
        "watchdog_timeout",
        "stacks_wanted",
    ],
)
def test_a_process_outside_the_tree_cannot_open_an_incident(quiet_server: Server, event: str) -> None:
    path = str(quiet_server.runtime / "handler.sock")
    notify(path, event, pid=quiet_server.pid, message="ValueError: not mine")
    quiet_server.settle()
    assert quiet_server.incidents() == []


def test_a_teardown_of_something_else_means_nothing(quiet_server: Server) -> None:
    path = str(quiet_server.runtime / "handler.sock")
    for pid in (os.getpid(), -1, "x", None, 2**70, [1]):
        notify(path, "teardown", pid=pid)
    quiet_server.settle()
    assert quiet_server.incidents() == []


def test_zombies_are_let_go_of_once(quiet_server: Server) -> None:
    server = quiet_server
    assert server.ask("zombies 20") == "done"
    server.settle()
    server.settle()
    assert server.watched() == {server.pid, *server.ranks.values()}


def test_helpers_that_come_and_go_leave_no_descriptor_behind(quiet_server: Server) -> None:
    server = quiet_server
    assert server.handler is not None
    server.settle()
    before = sorted(descriptors(server.handler.pid).values())
    assert server.ask("helpers 500") == "done"
    server.settle()
    assert sorted(descriptors(server.handler.pid).values()) == before


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


@pytest.mark.story
def test_a_server_that_is_asked_to_end_ends_as_before(start_server: Start) -> None:
    server = start_server()
    os.kill(server.pid, signal.SIGTERM)
    assert server.process.wait(LONG) == 41
    assert server.wait_for_the_end() is None


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
    server = start_server(environ={TERMINATION_LOG: str(message)})
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
    server = start_server(environ={TERMINATION_LOG: str(message)})
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
    server = start_server(environ={TERMINATION_LOG: str(message)})
    assert server.ask("tell scheduler_TP0 watchdog soft") == "the handler"
    server.incident()
    os.kill(server.pid, signal.SIGTERM)
    assert server.process.wait(LONG) == 41
    assert message.read_text() == ""


def test_a_main_process_that_hangs_in_its_dump_ends_by_itself(start_server: Start) -> None:
    environ = {"SGLANG_CRASHKIT_BUDGET_SECS": "0.5", "SGLANG_CRASHKIT_END_SECS": "0.2"}
    server = start_server(environ=environ, dump_secs=3600.0)
    server.kill("scheduler_TP0")
    assert server.process.wait(LONG) == ServerExit.CRASHED


# -- an end that was asked for


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_main_process_that_a_signal_asks_to_end_is_no_incident(start_server: Start, signum: signal.Signals) -> None:
    # As a node of rank above 0 has it before 0.5.21, and any server before it serves.
    server = start_server(catches_sigterm=False)
    os.kill(server.pid, signum)
    assert server.process.wait(LONG) == -signum
    assert server.wait_for_the_end() is None


#: Longer than the test waits for anything.
ENDLESS_SECS = 10 * LONG


def stacks_of(stored: StoredIncident) -> set[str]:
    """Return the titles of the processes whose stacks are on disk."""
    assert stored.document is not None
    return {
        process["title"]
        for process in stored.document["processes"]
        for piece in process["evidence"]
        if (piece["kind"], piece["status"]) == ("stack", "captured") and (stored.path / piece["path"]).is_file()
    }


def test_of_a_server_that_hangs_they_are_on_disk_before_it_says_that_it_ends(start_server: Start) -> None:
    server = start_server()
    server.ask("draining unhealthy")
    own = {"sglang::scheduler_TP0", "sglang::scheduler_TP1", "sglang::detokenizer"}

    def with_stacks() -> list[StoredIncident]:
        return [one for one in server.incidents() if one.document is not None and own <= stacks_of(one)]

    (stored,) = wait_until(with_stacks, "the stacks are on disk")
    assert not stored.finished
    server.ask("dump_begun")
    server.ask("dump_ended")
    (stored,) = server.incidents()
    assert stored.finished
    assert stored.document is not None
    events = [entry["event"] for entry in stored.document["timeline"]]
    assert events.index("stacks_captured") < events.index("crash_dump_begun")
    assert (stored.document["kind"], events.count("stacks_captured")) == ("hang", 2)


def test_a_healthy_server_that_is_asked_to_end_is_not_captured(start_server: Start) -> None:
    server = start_server()
    server.ask("draining healthy")
    os.kill(server.pid, signal.SIGTERM)
    server.wait_for_handler()
    assert server.incidents() == []


def test_stacks_and_exits_are_on_disk_while_the_server_still_saves_its_requests(start_server: Start) -> None:
    server = start_server(dump_secs=ENDLESS_SECS)
    server.kill("scheduler_TP1")
    assert server.line() == "sigquit"
    survivors = {"sglang::scheduler_TP0", "sglang::detokenizer"}

    def with_stacks() -> list[StoredIncident]:
        return [one for one in server.incidents() if one.document is not None and survivors <= stacks_of(one)]

    (stored,) = wait_until(with_stacks, "the stacks are on disk")
    assert server.process.poll() is None
    assert not stored.finished
    # WHEN the grace period is over and everything of the container is killed; the ranks go with the server
    assert server.handler is not None
    for pid in (server.handler.pid, server.pid):
        os.kill(pid, signal.SIGKILL)
    server.wait_for_handler()
    (stored,) = server.incidents()
    assert stored.document is not None
    assert survivors <= stacks_of(stored)
    (dead,) = [one for one in stored.document["processes"] if one["title"] == "sglang::scheduler_TP1"]
    assert dead["exit"]["signal"] == "SIGKILL"
    assert stored.document["complete"] is False


@pytest.mark.parametrize("status", [0, 1, 7])
def test_a_program_that_ends_and_takes_its_ranks_with_it_leaves_no_incident(
    start_server: Callable[..., Server], status: int
) -> None:
    server = start_server(mode="library")
    server.settle()
    server.say(f"leave {status}")
    assert server.wait_for_the_end() is None


def test_a_program_that_is_killed_leaves_one(start_server: Callable[..., Server]) -> None:
    server = start_server(mode="library")
    server.settle()
    server.process.kill()
    stored = server.wait_for_the_end()
    assert stored is not None
    assert stored.document is not None
    assert stored.document["verdict"]["first_failure"]["pid"] == server.process.pid
