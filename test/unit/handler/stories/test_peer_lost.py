"""The other server of a pair is lost: an incident of a server that goes on, without stacks."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import psutil

from sglang_crashkit.protocol import notify
from unit.support.server_driver import Server, finished
from unit.support.waiting import LONG, child, descriptors, wait_until

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


def test_a_lost_peer_is_an_incident_that_names_it(start_server: Start) -> None:
    server = start_server()
    tell(server, "scheduler_TP1", waiting=["a", "b", "c"])
    stored = server.incident()
    document = stored.document
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
        pieces = {piece["kind"]: piece["status"] for piece in process["evidence"]}
        assert (pieces["proc_state"], pieces["stack"]) == ("captured", "skipped")
    assert not (stored.path / "stacks").exists()
    assert {process["title"] for process in document["processes"]} >= {"sglang::scheduler_TP0", "sglang::scheduler_TP1"}
    summary = (stored.path / "summary.md").read_text()
    assert text in summary
    assert "- waits for it: b (room 1)" in summary
    command = [sys.executable, "-m", "sglang_crashkit", "incidents", str(server.crash_folder)]
    listed = subprocess.run(command, capture_output=True, text=True, timeout=LONG, check=True).stdout
    assert "prefill 10.0.0.1:8998  peer_lost" in listed
    listed = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=LONG, check=True).stdout
    assert json.loads(listed)[0]["peers"] == document["peers"]
    assert server.process.poll() is None, "nothing was told to end"
    assert "sigquit_sent" not in [entry["event"] for entry in document["timeline"]]


def test_all_ranks_reports_of_a_peer_are_one_incident(start_server: Start) -> None:
    server = start_server()
    tell(server, "scheduler_TP0", waiting=["a", "b"])
    tell(server, "scheduler_TP1", waiting=["a", "b", "c"])
    tell(server, "scheduler_TP1", "10.0.0.7:8998")
    server.incident()
    # What is told of again changes nothing, and what comes in once it is finished is added.
    tell(server, "scheduler_TP0", sign="heartbeat", waiting=["a"])
    tell(server, "scheduler_TP0", "10.0.0.8:8998", waiting=["b"])
    wait_until(lambda: len(finished(server)[0]["peers"]) == 3, "the incident is written anew")
    (document,) = finished(server)
    first, *others = document["peers"]
    assert set(first["reported_by"]) == {server.ranks["scheduler_TP0"], server.ranks["scheduler_TP1"]}
    assert (first["count"], first["sign"]) == (3, "refused")
    assert [peer["address"] for peer in others] == ["10.0.0.7:8998", "10.0.0.8:8998"]
    assert document["verdict"]["text"].count(" is gone") == 3


def test_a_ranks_peer_is_watched_from_outside(start_server: Start) -> None:
    server = start_server()
    with child(LISTEN) as peer:
        port = int(peer.first_line)
        server.say(f"tell scheduler_TP0 pair {port}")
        wait_until(lambda: sum("socket" in name for name in descriptors(peer.pid).values()) > 1, "it is watched")
        (owner,) = {its.pid for its in psutil.net_connections("tcp4") if its.raddr and its.raddr.port == port} - {None}
        assert owner == server.handler.pid
        peer.kill()
        document = server.incident().document
    (lost,) = document["peers"]
    assert (lost["address"], lost["sign"], lost["role"]) == (f"127.0.0.1:{port}", "refused", "decode")
    assert (lost["count"], lost["requests"]) == (1, [{"rid": "waits", "room": 1}])
    assert lost["reported_by"] == [document["trigger"]["pid"]] == [server.ranks["scheduler_TP0"]]


def test_what_is_no_report_opens_nothing(start_server: Start) -> None:
    server = start_server()
    tell(server, "scheduler_TP0", role="router")
    tell(server, "scheduler_TP0", sign=["refused"])
    notify(str(server.runtime / "handler.sock"), "peer_lost", address="h:1", role="prefill", sign="refused")
    server.settle()
    assert server.incidents() == []
