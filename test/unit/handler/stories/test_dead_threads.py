"""A thread of a rank ends by an exception, and the rank goes on."""

from __future__ import annotations

from collections.abc import Callable

from unit.support.server_driver import Server, finished
from unit.support.waiting import wait_until

Start = Callable[..., Server]
STOPPED = "the KV caches of its queue are not sent to decode servers any more, and their requests hang"


def test_a_thread_that_an_exception_ends_is_an_incident_of_a_server_that_goes_on(start_server: Start) -> None:
    server = start_server()
    server.say("tell scheduler_TP1 lose_thread no such page")
    stored = server.incident()
    document, rank = stored.document, server.ranks["scheduler_TP1"]
    assert (document["kind"], document["requests"]["reason"]) == ("thread_died", "the server went on")
    verdict = document["verdict"]
    assert (verdict["kind"], verdict["level"], verdict["first_failure"]["pid"]) == ("thread_died", "established", rank)
    assert verdict["basis"][0] == (
        f"sglang::scheduler_TP1 (pid {rank}) goes on without its thread Thread-7 (transfer_worker), which raised "
        f"ValueError: no such page; {STOPPED}."
    )
    assert (document["cause"]["class"], document["cause"]["level"]) == ("thread_died", "established")
    assert "in thread Thread-7 (transfer_worker)" in document["cause"]["reasons"][0]
    (printed,) = [path.read_text() for path in stored.path.glob("ranks/*.thread_exception.txt")]
    assert printed.startswith("Traceback")
    assert printed.endswith("ValueError: no such page\n")
    assert server.process.poll() is None, "nothing was told to end"
    assert "sigquit_sent" not in [entry["event"] for entry in document["timeline"]]


def test_what_fails_in_the_same_process_right_after_it_has_it_first(start_server: Start) -> None:
    server = start_server()
    server.say("tell scheduler_TP1 lose_thread no such page")
    wait_until(lambda: finished(server), "the thread's incident")
    server.say("tell scheduler_TP1 exit 3")
    wait_until(lambda: len(finished(server)) == 2, "the incident of the exit")
    (document,) = [one for one in finished(server) if one["kind"] != "thread_died"]
    assert document["verdict"]["basis"][0].endswith(f"ValueError: no such page; {STOPPED}.")
    assert document["verdict"]["level"] == "supported"
    assert "then ended by exit status 3" in document["verdict"]["text"]
