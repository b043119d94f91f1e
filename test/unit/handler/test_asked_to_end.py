"""A stand-in server that hangs, or seems to, as it is asked to end."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sglang_crashkit.incident.store import StoredIncident
from unit.handler.driver import Server, report_of
from unit.waiting import LONG, wait_until

Start = Callable[..., Server]
RANKS = ("scheduler_TP0", "scheduler_TP1")
#: After so long a scheduler is silent: of a server whose health check failed, and of any other.
UNHEALTHY_SECS, HEALTHY_SECS = 2.0, 5.0


def start_beating(start_server: Start, **environ: str) -> Server:
    server = start_server(environ=environ)
    for name in RANKS:
        assert server.ask(f"tell {name} beat") == "beating"
    return server


def stop(server: Server, *names: str) -> None:
    for name in names:
        server.kill(name, signal.SIGSTOP)


def hush(server: Server, *names: str) -> None:
    for name in names:
        assert server.ask(f"tell {name} hush") == "silent"


def wait_for(seconds: float) -> None:
    threading.Event().wait(seconds + 0.2)


def end_unhealthy(server: Server) -> dict[str, Any]:
    """Ask a server to end whose health check failed, let it save its requests at once, and return its incident."""
    server.ask("draining unhealthy")
    server.ask("dump_begun")
    assert server.ask("dump_ended") != "None"
    (stored,) = server.incidents()
    assert stored.finished
    assert stored.document is not None
    document = stored.document
    assert (document["kind"], document["trigger"]["event"]) == ("hang", "unhealthy_at_sigterm")
    # It does not matter how soon the requests were saved.
    assert [len(report_of(document, name)["looks"]) for name in RANKS] == [2, 2]
    return document


def make_collective(folder: Path) -> Path:
    """Return a program that is where a rank is that waits for the others; py-spy names a file with its packages."""
    file = folder / "torch" / "distributed" / "distributed_c10d.py"
    file.parent.mkdir(parents=True)
    for package in (file.parent, file.parent.parent):
        (package / "__init__.py").touch()
    file.write_text("import time\n\n\ndef broadcast():\n    time.sleep(600)\n\n\nbroadcast()\n")
    return file


def events_of(stored: StoredIncident) -> list[str]:
    return [entry["event"] for entry in (stored.document or {"timeline": []})["timeline"]]


def named(document: dict[str, Any]) -> str | None:
    first = document["verdict"]["first_failure"]
    return first["title"].removeprefix("sglang::") if first else None


# -- its health check had failed


def test_the_rank_that_is_stopped_is_named(start_server: Start) -> None:
    server = start_beating(start_server)
    stop(server, "scheduler_TP1")
    hush(server, "scheduler_TP0")
    wait_for(UNHEALTHY_SECS)
    document = end_unhealthy(server)
    assert (named(document), document["verdict"]["kind"]) == ("scheduler_TP1", "hang")
    assert "is stopped (state T)" in document["verdict"]["basis"][0]
    silent = {entry["pid"] for entry in document["timeline"] if entry["event"] == "no_progress"}
    assert silent == {server.ranks[name] for name in RANKS}


@pytest.mark.parametrize("hang_secs", ["60", "0"], ids=["silent", "nobody knows whether it beats"])
def test_the_rank_that_another_waits_for_is_named(start_server: Start, tmp_path: Path, hang_secs: str) -> None:
    server = start_beating(start_server, SGLANG_CRASHKIT_HANG_SECS=hang_secs)
    hush(server, *RANKS)
    server.say("tell scheduler_TP1 spin")
    server.say(f"tell scheduler_TP0 run {make_collective(tmp_path)}")
    wait_for(UNHEALTHY_SECS)
    document = end_unhealthy(server)
    assert (named(document), document["verdict"]["level"]) == ("scheduler_TP1", "supported")
    assert "was in spin (fake_server.py" in document["verdict"]["text"]


def test_another_stopped_process_is_named_while_schedulers_go_on(start_server: Start) -> None:
    server = start_beating(start_server)
    stop(server, "detokenizer")
    wait_for(UNHEALTHY_SECS)
    document = end_unhealthy(server)
    assert (named(document), document["verdict"]["level"]) == ("detokenizer", "established")


@pytest.mark.story
def test_nobody_is_named_where_all_go_on(start_server: Start) -> None:
    document = end_unhealthy(start_beating(start_server))
    assert (named(document), document["verdict"]["level"]) == (None, "unknown")
    assert "no process was seen to stand still" in document["verdict"]["text"]


# -- its health check had not failed


def hang_at_sigterm(start_server: Start, **environ: str) -> tuple[Server, StoredIncident]:
    """Return a server with a stopped rank that was asked to end, and its incident."""
    server = start_beating(start_server, **environ)
    stop(server, "scheduler_TP1")
    hush(server, "scheduler_TP0")
    wait_for(HEALTHY_SECS)
    server.ask("draining healthy")

    def captured() -> list[StoredIncident]:
        return [one for one in server.incidents() if "stacks_captured" in events_of(one)]

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


def tear_down(server: Server) -> None:
    os.kill(server.pid, signal.SIGTERM)


def let_the_ranks_end_first(server: Server) -> None:
    server.say("tell scheduler_TP0 exit 0")
    server.say("join scheduler_TP0")
    server.say("leave 0")


def go_on(server: Server) -> None:
    server.kill("scheduler_TP1", signal.SIGCONT)
    assert server.ask("tell scheduler_TP0 beat") == "beating"
    wait_until(lambda: not server.incidents(), "the incident is removed")
    server.say("leave 0")


@pytest.mark.parametrize("finished", [False, True])
@pytest.mark.parametrize(
    "end", [tear_down, lambda server: server.say("leave 0"), let_the_ranks_end_first, go_on], ids=range(4)
)
def test_there_was_no_hang_where_it_ends_in_order(
    start_server: Start, end: Callable[[Server], None], finished: bool
) -> None:
    server, _stored = hang_at_sigterm(start_server)
    if finished:
        wait_until(lambda: any(one.finished for one in server.incidents()), "the incident is finished")
    end(server)
    server.process.wait(LONG)
    server.wait_for_handler()
    assert server.incidents() == []
