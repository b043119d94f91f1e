"""A scheduler raises an exception that SGLang catches, and serves on."""

from __future__ import annotations

from collections.abc import Callable

from unit.support.server_driver import Server, finished
from unit.support.waiting import wait_until

Start = Callable[..., Server]


def test_an_exception_that_sglang_catches_is_an_incident_of_a_server_that_goes_on(start_server: Start) -> None:
    server = start_server()
    server.say("tell scheduler_TP1 catch no such page")
    server.say("tell scheduler_TP1 catch reset by peer")
    server.say("tell scheduler_TP0 catch no such page")
    stored = server.incident()
    document, rank = stored.document, server.ranks["scheduler_TP1"]
    assert (document["kind"], document["requests"]["reason"]) == ("exception", "the server went on")
    verdict = document["verdict"]
    assert (verdict["kind"], verdict["first_failure"]["pid"]) == ("exception", rank)
    assert verdict["basis"][0] == (
        f"sglang::scheduler_TP1 (pid {rank}) raised ValueError: no such page, which SGLang caught; it serves on."
    )
    printed = sorted(path.read_text().splitlines()[-1] for path in stored.path.glob("ranks/*.exception*.txt"))
    assert printed == ["RuntimeError: reset by peer", "ValueError: no such page", "ValueError: no such page"]
    assert server.process.poll() is None, "nothing was told to end"
    assert "sigquit_sent" not in [entry["event"] for entry in document["timeline"]]


def test_one_that_ends_the_server_later_is_an_incident_of_its_own(start_server: Start) -> None:
    server = start_server()
    server.say("tell scheduler_TP1 catch no such page")
    wait_until(lambda: finished(server), "the incident of what was caught")
    server.say("tell scheduler_TP0 raise no such slot")
    wait_until(lambda: len(finished(server)) == 2, "the incident of what ends it")
    assert sorted(one["verdict"]["text"].count("caught") for one in finished(server)) == [0, 1]
