"""The whole handler beside a stand-in server whose ranks really beat, and really stop; also as it is asked to end."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from sglang_crashkit.incident.store import StoredIncident
from unit.support.server_driver import Server, Start, events_of, report_of
from unit.support.targets import make_tool, state_of
from unit.support.waiting import LONG, wait_until

#: The shortest that there is.
HANG = {"SGLANG_CRASHKIT_HANG_SECS": "2"}
RANKS = ("scheduler_TP0", "scheduler_TP1")


def start_beating(start_server: Start, **options: Any) -> Server:
    server = start_server(**({"environ": HANG} | options))
    for name in RANKS:
        assert server.ask(f"tell {name} beat") == "beating"
    return server


def hush(server: Server, *names: str) -> None:
    for name in names:
        assert server.ask(f"tell {name} hush") == "silent"


def finished(server: Server, count: int) -> list[StoredIncident]:
    """Wait for so many incidents and return them, oldest first."""

    def whole() -> list[StoredIncident]:
        found = [stored for stored in server.incidents() if stored.finished and stored.document]
        return found if len(found) >= count else []

    wait_until(whole, f"{count} incidents are finished")
    found = server.incidents()
    assert len(found) == count, found
    return found[::-1]


def document_of(stored: StoredIncident) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((stored.path / "incident.json").read_text())
    return document


def said_with(capfd: pytest.CaptureFixture[str], words: str) -> str:
    """Wait until the server itself says so, and return the only line of its that holds the words."""
    said = list[str]()

    def lines() -> list[str]:
        said.append(capfd.readouterr().err)
        return [line for line in "".join(said).splitlines() if words in line]

    (line,) = wait_until(lines, "the server says so itself")
    return line


def make_program(folder: Path, file: str, function: str, body: str) -> Path:
    """Return a program that calls a function in a file; py-spy names a file with its packages."""
    program = folder / file
    program.parent.mkdir(parents=True)
    for package in (program.parent, program.parent.parent):
        (package / "__init__.py").touch()
    program.write_text(f"import os, time\ndef {function}():\n    {body}\n{function}()\n")
    return program


def is_over(stored: StoredIncident) -> bool:
    # The summary is written after the document.
    told = "Progress returned after " in (stored.path / "summary.md").read_text()
    return told and any(entry["event"] == "progress_returned" for entry in document_of(stored)["timeline"])


def test_a_hang_may_end_come_again_and_become_a_crash(start_server: Start) -> None:
    server = start_beating(start_server)

    # WHEN one rank is stopped and the other waits for it
    server.kill("scheduler_TP1", signal.SIGSTOP)
    assert server.ask("tell scheduler_TP0 hush") == "silent"
    # THEN that is an incident, which names the one that is stopped, and leaves it stopped; `test_golden` has the fields
    (stored,) = finished(server, 1)
    document = document_of(stored)
    verdict = document["verdict"]
    assert verdict["first_failure"]["pid"] == server.ranks["scheduler_TP1"]
    assert verdict["basis"][0].startswith("TP1 is stopped")
    assert state_of(server.ranks["scheduler_TP1"]) == "T"
    silent = {entry["pid"] for entry in document["timeline"] if entry["event"] == "no_progress"}
    assert silent == {server.ranks[name] for name in RANKS}
    for name in (*RANKS, "detokenizer"):
        paths = [piece["path"] for piece in report_of(document, name)["evidence"] if piece["kind"] == "stack"]
        assert len(paths) == 3
        assert all((stored.path / path).read_text().startswith("Process ") for path in paths)

    # WHEN they go on THEN the incident, finished as it is, says so
    server.kill("scheduler_TP1", signal.SIGCONT)
    assert server.ask("tell scheduler_TP0 beat") == "beating"
    wait_until(lambda: is_over(stored), "the incident says that the hang is over")
    document = document_of(stored)
    assert document["verdict"]["basis"][-1].startswith("Progress returned after ")
    assert server.process.poll() is None

    # WHEN one hangs in the kernel THEN that is another incident
    fifo = server.temp / "fifo"
    os.mkfifo(fifo)
    server.say(f"tell scheduler_TP1 sleep {fifo}")
    wait_until(lambda: state_of(server.ranks["scheduler_TP1"]) == "D", "the rank sleeps")
    assert server.ask("tell scheduler_TP0 hush") == "silent"
    second = finished(server, 2)[1]
    verdict = document_of(second)["verdict"]
    assert verdict["first_failure"]["pid"] == server.ranks["scheduler_TP1"]
    assert "is in uninterruptible sleep (state D" in verdict["basis"][0]

    # WHEN a rank dies before the hang is over THEN that is an incident of its own, which names the dead one
    server.kill("scheduler_TP0")
    assert server.line() == "sigquit"
    fifo.open("w").close()
    server.process.wait(LONG)
    server.wait_for_handler()
    third = document_of(finished(server, 3)[2])
    assert third["kind"] == "killed"
    assert third["verdict"]["first_failure"]["pid"] == server.ranks["scheduler_TP0"]
    assert third["verdict"]["kind"] == "signal"
    assert f"incident {document_of(second)['id']}" in third["verdict"]["text"]


@pytest.mark.parametrize("name", ["detokenizer", "server"])
def test_a_stopped_process_without_heartbeat_is_named_until_it_continues(start_server: Start, name: str) -> None:
    server = start_beating(start_server)
    pid = server.ranks.get(name, server.pid)
    os.kill(pid, signal.SIGSTOP)
    (stored,) = finished(server, 1)
    document = document_of(stored)
    assert (document["kind"], document["verdict"]["first_failure"]["pid"]) == ("hang", pid)
    assert "is stopped (state T, until" in document["verdict"]["basis"][0]
    assert (document["cause"]["class"], document["cause"]["level"]) == ("stopped_process", "established")
    assert state_of(pid) == "T"

    os.kill(pid, signal.SIGCONT)
    wait_until(lambda: is_over(stored), "the incident says that it goes on")


@pytest.mark.parametrize(
    ("way", "tool", "states", "lock", "words"),
    [
        ("spin", "", "RRR", "main", ", busy all the time and held the GIL"),
        ("hold_the_lock", "", "SSS", "main", "and held the GIL in each sample"),
        ("hold_the_lock", "exit 1", "SSS", "taken", "let no other thread have the GIL in time to answer."),
    ],
    ids=["spins", "holds the lock", "holds the lock, and nothing may trace it"],
)
def test_what_holds_a_rank_is_said(
    start_server: Start, tmp_path: Path, way: str, tool: str, states: str, lock: str, words: str
) -> None:
    environ = HANG | ({"SGLANG_CRASHKIT_PYSPY": make_tool(tmp_path, tool)} if tool else {})
    server = start_beating(start_server, environ=environ)
    assert server.ask("tell scheduler_TP1 hush") == "silent"
    server.say(f"tell scheduler_TP1 {way}")
    (stored,) = finished(server, 1)
    document = document_of(stored)
    assert document["verdict"]["first_failure"]["pid"] == server.ranks["scheduler_TP1"]
    looks = report_of(document, "scheduler_TP1")["looks"]
    assert [(look["state"], look["lock"]) for look in looks] == [(state, lock) for state in states]
    # Of one that goes on, no one but py-spy tells what it does while it holds its lock.
    assert all(look["doing"][0].startswith(f"{way} (") if not tool else look["doing"] == [] for look in looks)
    # The frames are in files of their own.
    assert looks[0].keys() == {"time", "state", "cpu_secs", "doing", "lock"}
    # On a machine that is busy with other tests it may not get the CPU that it wants.
    assert words in document["verdict"]["text"] or (way == "spin" and looks[2]["cpu_secs"] - looks[0]["cpu_secs"] < 2.5)


def test_a_hang_is_told_in_the_servers_own_log(start_server: Start, capfd: pytest.CaptureFixture[str]) -> None:
    server = start_beating(start_server)
    hush(server, *RANKS)
    (stored,) = finished(server, 1)
    line = said_with(capfd, f"Incident: {stored.path}")
    assert line.startswith("crash kit: ")
    assert "made no progress" in line
    os.kill(server.pid, signal.SIGTERM)
    assert server.wait_for_the_end() is not None
    document = document_of(stored)
    # No one stands out of two that do the same.
    assert (document["verdict"]["first_failure"], document["verdict"]["level"]) == (None, "supported")
    assert "server_exited" in events_of(document)


@pytest.mark.story
@pytest.mark.parametrize("victim", ["the server", "scheduler_TP1"])
def test_a_dead_ranks_last_heartbeat_is_told(start_server: Start, victim: str) -> None:
    server = start_beating(start_server)
    os.kill(server.pid if victim == "the server" else server.ranks[victim], signal.SIGKILL)
    server.process.wait(LONG)
    server.wait_for_handler()
    (stored,) = finished(server, 1)
    document = document_of(stored)
    dead = [name for name in RANKS if report_of(document, name)["exit"] is not None]
    assert victim in (*dead, "the server")
    for name in dead:
        sign = report_of(document, name)["last_sign"]
        assert (sign["doing"], sign["batches"], sign["mode"]) == ("the event loop, without a batch", 0, "")
        assert 0 <= sign["seconds_before"] < LONG
    assert dead
    # Ranks that agree have one section.
    assert "- last sign: the event loop, without a batch, " in (stored.path / "summary.md").read_text()
    assert report_of(document, "detokenizer")["last_sign"] is None


def test_what_compiles_is_busy_and_its_incident_is_withdrawn(
    start_server: Start, capfd: pytest.CaptureFixture[str]
) -> None:
    server = start_beating(start_server)
    # GIVEN a rank that is in a compiler for longer than a hang takes to be noticed
    go_on = server.temp / "go_on"
    programs = {
        "scheduler_TP0": ("torch/distributed/distributed_c10d.py", "all_reduce", "time.sleep(0.1)"),
        "scheduler_TP1": ("triton/compiler/compiler.py", "compile", "sum(range(10**6))"),
    }
    for name, (file, function, work) in programs.items():
        program = make_program(server.temp, file, function, f"while not os.path.exists({str(go_on)!r}): {work}")
        assert server.ask(f"tell {name} hush") == "silent"
        server.say(f"tell {name} run {program}")
    # THEN it is said to be busy
    (stored,) = finished(server, 1)
    verdict = document_of(stored)["verdict"]
    assert (verdict["kind"], verdict["first_failure"]) == ("busy", None)
    # WHEN it goes on THEN nothing is left of it
    go_on.touch()
    for name in RANKS:
        assert server.ask(f"tell {name} beat") == "beating"
    wait_until(lambda: server.incidents() == [], "the incident is withdrawn")
    assert not stored.path.exists()
    assert said_with(capfd, f"it was no hang, and incident {stored.document['id']} is withdrawn.")


#: After so long a scheduler is silent: of a server whose health check failed, and of any other.
UNHEALTHY_SECS, HEALTHY_SECS = 2.0, 5.0


def wait_for(seconds: float) -> None:
    threading.Event().wait(seconds + 0.2)


def end_unhealthy(server: Server) -> dict[str, Any]:
    """Ask a server to end whose health check failed, let it save its requests at once, and return its incident."""
    server.ask("draining unhealthy")
    server.ask("dump_begun")
    assert server.ask("dump_ended") != "None"
    (stored,) = server.incidents()
    assert stored.finished
    document = stored.document
    assert (document["kind"], document["trigger"]["event"]) == ("hang", "unhealthy_at_sigterm")
    # It does not matter how soon the requests were saved.
    assert [len(report_of(document, name)["looks"]) for name in RANKS] == [2, 2]
    return document


def named(document: dict[str, Any]) -> str | None:
    first = document["verdict"]["first_failure"]
    return first["title"].removeprefix("sglang::") if first else None


# -- as it is asked to end, its health check had failed


@pytest.mark.parametrize("hang_secs", ["60", "0"], ids=["silent", "no one knows whether it beats"])
def test_the_rank_that_another_waits_for_is_named(start_server: Start, tmp_path: Path, hang_secs: str) -> None:
    server = start_beating(start_server, environ={"SGLANG_CRASHKIT_HANG_SECS": hang_secs})
    hush(server, *RANKS)
    server.say("tell scheduler_TP1 spin")
    # Where a rank is that waits for the others.
    waiting = make_program(tmp_path, "torch/distributed/distributed_c10d.py", "broadcast", "time.sleep(600)")
    server.say(f"tell scheduler_TP0 run {waiting}")
    wait_for(UNHEALTHY_SECS)
    document = end_unhealthy(server)
    assert (named(document), document["verdict"]["level"]) == ("scheduler_TP1", "supported")
    assert "runs Python code of its own in spin (fake_server.py" in document["verdict"]["text"]
    silent = {entry["pid"] for entry in document["timeline"] if entry["event"] == "no_progress"}
    assert silent == ({server.ranks[name] for name in RANKS} if hang_secs != "0" else set())


@pytest.mark.story
def test_nobody_is_named_where_all_go_on(start_server: Start) -> None:
    document = end_unhealthy(start_beating(start_server, environ={}))
    assert (named(document), document["verdict"]["level"]) == (None, "unknown")
    assert " had failed: " in document["verdict"]["text"]


# -- as it is asked to end, its health check had not failed


def hang_at_sigterm(start_server: Start) -> tuple[Server, StoredIncident]:
    """Return a server with a stopped rank that was asked to end, and its incident."""
    server = start_beating(start_server, environ={})
    server.kill("scheduler_TP1", signal.SIGSTOP)
    hush(server, "scheduler_TP0")
    wait_for(HEALTHY_SECS)
    server.ask("draining healthy")

    def captured() -> list[StoredIncident]:
        return [one for one in server.incidents() if one.document and "stacks_captured" in events_of(one.document)]

    (stored,) = wait_until(captured, "the stacks are on disk")
    return server, stored


def test_a_silent_rank_is_named_before_the_server_is_killed(start_server: Start) -> None:
    server, stored = hang_at_sigterm(start_server)
    assert (stored.document["kind"], stored.document["trigger"]["event"]) == ("hang", "silent_at_sigterm")
    wait_until(lambda: any(one.finished for one in server.incidents()), "the incident is finished")
    # WHEN the grace period is over
    for pid in (server.handler.pid, server.pid):
        os.kill(pid, signal.SIGKILL)
    last = server.wait_for_the_end()
    assert (named(last.document), last.document["complete"]) == ("scheduler_TP1", True)


@pytest.mark.parametrize("is_whole", [False, True])
def test_what_goes_on_and_ends_in_order_has_no_hang_but_one_that_is_whole(start_server: Start, is_whole: bool) -> None:
    server, _stored = hang_at_sigterm(start_server)
    if is_whole:
        wait_until(lambda: any(one.finished for one in server.incidents()), "the incident is finished")
    server.kill("scheduler_TP1", signal.SIGCONT)
    assert server.ask("tell scheduler_TP0 beat") == "beating"
    wait_until(lambda: all(one.finished and is_over(one) for one in server.incidents()), "it is removed, or over")
    server.say("leave 0")
    server.process.wait(LONG)
    server.wait_for_handler()
    # Others were told of one that is whole, which it may just have become.
    left = server.incidents()
    assert len(left) == 1 if is_whole else len(left) <= 1
