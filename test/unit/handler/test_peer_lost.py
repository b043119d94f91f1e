"""The other server of a pair is lost: an incident of a server that goes on, without stacks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from sglang_crashkit.protocol import notify
from unit.handler.driver import Server
from unit.waiting import LONG, child, descriptors, wait_until

#: A decode rank, as far as a connection shows.
LISTEN = """
import socket
listener = socket.create_server(("127.0.0.1", 0))
ready(listener.getsockname()[1])
kept = []
while True:
    kept.append(listener.accept())
"""
Start = Callable[..., Server]
SINCE = "2026-09-01T00:00:00.000000Z"


def tell(server: Server, rank: str, address: str = "10.0.0.1:8998", **fields: Any) -> None:
    requests = [{"rid": rid, "room": room} for room, rid in enumerate(fields.pop("waiting", ()))]
    report = {"address": address, "role": "prefill", "sign": "refused", "since": SINCE, "requests": requests}
    server.say(f"tell {rank} lost {json.dumps(report | {'count': len(requests)} | fields)}")


def finished(server: Server) -> list[dict[str, Any]]:
    """Return the finished incidents, oldest first."""
    return [found.document for found in reversed(server.incidents()) if found.finished and found.document]


def test_a_lost_peer_is_an_incident_that_names_it_and_those_that_wait(start_server: Start) -> None:
    server = start_server()
    tell(server, "scheduler_TP1", waiting=["a", "b", "c"])
    stored = server.incident()
    document = stored.document
    assert document is not None
    rank = server.ranks["scheduler_TP1"]
    assert (document["kind"], document["complete"]) == ("peer_lost", True)
    assert (document["trigger"]["event"], document["trigger"]["pid"]) == ("peer_lost", rank)
    assert document["peers"] == [
        {
            "address": "10.0.0.1:8998",
            "role": "prefill",
            "sign": "refused",
            "since": SINCE,
            "requests": [{"rid": "a", "room": 0}, {"rid": "b", "room": 1}, {"rid": "c", "room": 2}],
            "count": 3,
            "unassigned": [],
            "unassigned_count": 0,
            "alone": True,
            "reported_by": [rank],
        }
    ]
    text = "prefill server 10.0.0.1:8998 is gone; 3 requests wait for it: a, b, c. Its port refuses connections."
    assert document["verdict"] == {
        "kind": "peer_lost",
        "first_failure": None,
        "level": "established",
        "text": text,
        "basis": [text],
    }
    assert document["requests"]["reason"] == "the server went on"
    for process in document["processes"]:
        assert {piece["kind"]: piece["status"] for piece in process["evidence"]} == {
            "proc_state": "captured",
            "stack": "skipped",
        }
    assert not (stored.path / "stacks").exists()
    assert {process["title"] for process in document["processes"]} >= {"sglang::scheduler_TP0", "sglang::scheduler_TP1"}
    summary = (stored.path / "summary.md").read_text()
    assert text in summary
    assert "- waits for it: b (room 1)" in summary
    command = [sys.executable, "-m", "sglang_crashkit", "incidents", str(server.crash_folder)]
    listed = subprocess.run(command, capture_output=True, text=True, timeout=LONG, check=True).stdout
    assert f"{text} [established]" in listed
    listed = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=LONG, check=True).stdout
    assert json.loads(listed)[0]["peers"] == document["peers"]
    assert server.process.poll() is None, "nothing was told to end"
    assert "sigquit_sent" not in [entry["event"] for entry in document["timeline"]]


def test_what_sglang_alone_says_is_supported_only(start_server: Start) -> None:
    server = start_server()
    tell(server, "scheduler_TP0", sign="heartbeat")
    document = server.incident().document
    assert document is not None
    assert document["verdict"]["level"] == "supported"


def test_all_ranks_reports_of_a_peer_are_one_incident(start_server: Start) -> None:
    server = start_server()
    tell(server, "scheduler_TP0", waiting=["a", "b"])
    tell(server, "scheduler_TP1", waiting=["a", "b", "c"])
    tell(server, "scheduler_TP1", "10.0.0.7:8998")
    document = server.incident().document
    assert document is not None
    first, second = document["peers"]
    assert set(first["reported_by"]) == {server.ranks["scheduler_TP0"], server.ranks["scheduler_TP1"]}
    assert (first["count"], second["address"]) == (3, "10.0.0.7:8998")
    assert document["verdict"]["text"].count(" is gone") == 2


def test_another_peer_that_is_lost_soon_after_it_is_added_to_the_incident_that_is_there(start_server: Start) -> None:
    server = start_server()
    tell(server, "scheduler_TP0", "10.0.0.2:41", role="decode", waiting=["a"])
    server.incident()
    tell(server, "scheduler_TP1", "10.0.0.2:42", role="decode", waiting=["a"])
    wait_until(lambda: len(finished(server)[0]["peers"]) == 2, "the incident is written anew")
    (document,) = finished(server)
    assert "decode server 10.0.0.2:41 and 10.0.0.2:42 are gone; 1 request waits" in document["verdict"]["text"]


def test_a_peer_that_was_told_of_is_not_told_of_again(start_server: Start) -> None:
    server = start_server()
    tell(server, "scheduler_TP0")
    server.incident()
    tell(server, "scheduler_TP0", sign="heartbeat", waiting=["a"])
    tell(server, "scheduler_TP0", "10.0.0.7:8998", waiting=["b"])
    wait_until(lambda: len(finished(server)[0]["peers"]) == 2, "the incident is written anew")
    (document,) = finished(server)
    assert [(peer["sign"], peer["count"]) for peer in document["peers"]] == [("refused", 0), ("refused", 1)]


def test_a_peer_that_a_rank_works_with_is_watched_from_outside(start_server: Start) -> None:
    server = start_server()
    with child(LISTEN) as peer:
        port = int(peer.first_line)
        server.say(f"tell scheduler_TP0 pair {port}")
        wait_until(lambda: sum("socket" in name for name in descriptors(peer.pid).values()) > 1, "it is watched")
        (owner,) = {its.pid for its in psutil.net_connections("tcp4") if its.raddr and its.raddr.port == port} - {None}
        assert server.handler is not None
        assert owner == server.handler.pid
        peer.kill()
        document = server.incident().document
    assert document is not None
    (lost,) = document["peers"]
    assert (lost["address"], lost["sign"], lost["role"]) == (f"127.0.0.1:{port}", "refused", "decode")
    assert (lost["count"], lost["requests"]) == (1, [{"rid": "waits", "room": 1}])
    assert lost["reported_by"] == [document["trigger"]["pid"]] == [server.ranks["scheduler_TP0"]]


@pytest.mark.parametrize("whole", [True, False])
def test_a_crash_after_it_is_an_incident_of_its_own(start_server: Start, whole: bool) -> None:
    server = start_server()
    tell(server, "scheduler_TP0", waiting=["a"])
    if whole:
        server.incident()
    else:
        wait_until(server.incidents, "the incident is begun")
    server.kill("scheduler_TP1")
    assert server.line() == "sigquit"
    server.process.wait(LONG)
    server.wait_for_handler()
    lost, killed = finished(server)
    assert (lost["kind"], killed["kind"], killed["peers"]) == ("peer_lost", "killed", [])
    assert killed["verdict"]["first_failure"]["title"] == "sglang::scheduler_TP1"


def test_a_crash_at_hand_takes_it_in(start_server: Start) -> None:
    server = start_server(answers_sigquit=False)
    server.kill("scheduler_TP1")
    assert server.line() == "sigquit"
    tell(server, "scheduler_TP0", waiting=["a"])
    document = server.incident().document
    assert document is not None
    assert document["kind"] == "killed"
    assert document["verdict"]["first_failure"]["title"] == "sglang::scheduler_TP1"
    assert "prefill server 10.0.0.1:8998 is gone; 1 request waits for it: a." in document["verdict"]["text"]


@pytest.mark.parametrize("waiting", [[], ["a"]])
def test_while_the_server_ends_only_a_loss_that_keeps_requests_waiting_counts(
    start_server: Start, waiting: list[str]
) -> None:
    server = start_server(tears_down_on_sigterm=False)
    os.kill(server.pid, signal.SIGTERM)
    assert server.line() == "draining"
    tell(server, "scheduler_TP0", waiting=waiting)
    if waiting:
        server.incident()
    else:
        server.settle()
        assert server.incidents() == []


def test_a_server_whose_end_was_announced_says_nothing_of_its_peer(start_server: Start) -> None:
    server = start_server()
    notify(str(server.runtime / "handler.sock"), "teardown", pid=server.pid)
    tell(server, "scheduler_TP0", waiting=["a"])
    server.settle()
    assert server.incidents() == []


def test_what_is_no_report_opens_nothing(start_server: Start) -> None:
    server = start_server()
    tell(server, "scheduler_TP0", role="router")
    tell(server, "scheduler_TP0", sign=["refused"])
    notify(str(server.runtime / "handler.sock"), "peer_lost", address="h:1", role="prefill", sign="refused")
    server.settle()
    assert server.incidents() == []


def test_very_many_peers_leave_the_incident_readable(start_server: Start) -> None:
    server = start_server()
    for number in range(100):
        tell(server, "scheduler_TP0", f"10.0.1.{number}:8998")

    def told() -> int:
        # What comes in once it is finished is added to it.
        (document,) = finished(server) or [{"timeline": []}]
        return sum(entry["event"] == "peer_lost" for entry in document["timeline"])

    wait_until(lambda: told() == 100, "the incident tells of all of them")
    (document,) = finished(server)
    assert len(document["peers"]) == 64
    assert "10.0.1.7:8998 and 56 more are gone; no request waits for them." in document["verdict"]["text"]
