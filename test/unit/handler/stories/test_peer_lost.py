"""The other server of a pair is lost: an incident of a server that goes on, without stacks."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from sglang_crashkit.protocol import notify
from unit.support.server_driver import Server, Start, finished
from unit.support.waiting import LONG, wait_until

SINCE = "2026-09-01T00:00:00.000000Z"


def tell(server: Server, rank: str, address: str = "10.0.0.1:8998", **fields: Any) -> None:
    requests = [{"rid": rid, "room": room} for room, rid in enumerate(fields.pop("waiting", ()))]
    report = {"address": address, "role": "prefill", "sign": "heartbeat", "since": SINCE, "requests": requests}
    server.say(f"tell {rank} lost {json.dumps(report | {'count': len(requests)} | fields)}")


def test_a_lost_peer_is_an_incident_that_names_it(start_server: Start) -> None:
    server = start_server()
    tell(server, "scheduler_TP1", waiting=["a", "b", "c"], reason="2 heartbeats failed")
    stored = server.incident()
    document = stored.document
    rank = server.ranks["scheduler_TP1"]
    assert (document["kind"], document["complete"]) == ("peer_lost", True)
    assert (document["trigger"]["event"], document["trigger"]["pid"]) == ("peer_lost", rank)
    assert document["peers"] == [
        {
            "address": "10.0.0.1:8998",
            "role": "prefill",
            "sign": "heartbeat",
            "since": SINCE,
            "reason": "2 heartbeats failed",
            "requests": [{"rid": rid, "room": room, "since": ""} for room, rid in enumerate("abc")],
            "count": 3,
            "reported_by": [rank],
        }
    ]
    text = "prefill server 10.0.0.1:8998 missed SGLang's heartbeats; 3 requests wait for it: a, b, c."
    assert document["verdict"] == {
        "kind": "peer_lost",
        "first_failure": None,
        "level": "supported",
        "text": text,
        "basis": [text],
    }
    assert document["requests"]["reason"] == "the server went on"
    for process in document["processes"]:
        pieces = {piece["kind"]: piece["status"] for piece in process["evidence"]}
        assert (pieces["proc_state"], pieces["stack"]) == ("captured", "skipped")
    assert not (stored.path / "stacks").exists()
    assert {process["title"] for process in document["processes"]} >= {"sglang::scheduler_TP0", "sglang::scheduler_TP1"}
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
    tell(server, "scheduler_TP0", waiting=["a"])
    tell(server, "scheduler_TP0", "10.0.0.8:8998", waiting=["b"])
    wait_until(lambda: len(finished(server)[0]["peers"]) == 3, "the incident is written anew")
    (document,) = finished(server)
    first, *others = document["peers"]
    assert set(first["reported_by"]) == {server.ranks["scheduler_TP0"], server.ranks["scheduler_TP1"]}
    assert first["count"] == 3
    assert [peer["address"] for peer in others] == ["10.0.0.7:8998", "10.0.0.8:8998"]
    assert document["verdict"]["text"].startswith(
        "prefill servers 10.0.0.1:8998, 10.0.0.7:8998, 10.0.0.8:8998 missed SGLang's heartbeats; 4 requests wait for "
    )
    noted = [entry["address"] for entry in document["timeline"] if entry["event"] == "peer_lost"]
    assert noted == [peer["address"] for peer in document["peers"]]


def test_what_is_no_report_opens_nothing(start_server: Start) -> None:
    server = start_server()
    tell(server, "scheduler_TP0", role="router")
    tell(server, "scheduler_TP0", sign=["heartbeat"])
    notify(str(server.runtime / "handler.sock"), "peer_lost", address="h:1", role="prefill", sign="heartbeat")
    server.settle()
    assert server.incidents() == []
