"""A rank raises an exception that SGLang catches, or one that ends a thread of it, and serves on."""

from __future__ import annotations

from typing import Any

from unit.support.server_driver import Server, Start, events_of, finished
from unit.support.waiting import wait_until

STOPPED = "the KV caches of its queue are not sent to decode servers any more, and their requests hang"


def observed(server: Server, kind: str, words: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the incident of the second rank, of a server that goes on, and by name what was printed."""
    stored = server.incident()
    document, rank = stored.document, server.ranks["scheduler_TP1"]
    assert (document["kind"], document["requests"]["reason"]) == (kind, "the server went on")
    verdict = document["verdict"]
    assert (verdict["kind"], verdict["first_failure"]["pid"]) == (kind, rank)
    assert verdict["basis"][0] == f"sglang::scheduler_TP1 (pid {rank}) {words}"
    assert server.process.poll() is None, "nothing was told to end"
    assert "sigquit_sent" not in events_of(document)
    return document, {path.name: path.read_text() for path in stored.path.glob("ranks/*exception*.txt")}


def incidents_of_two(server: Server, first: str, then: str) -> list[dict[str, Any]]:
    """Tell a process to fail, and one again once that is an incident; return the documents of both incidents."""
    server.say(f"tell {first}")
    wait_until(lambda: finished(server), "the first incident is whole")
    server.say(f"tell {then}")
    return wait_until(lambda: len(finished(server)) == 2 and finished(server), "the second incident is whole")


def test_an_exception_that_sglang_catches_is_an_incident_of_a_server_that_goes_on(start_server: Start) -> None:
    server = start_server()
    server.say("tell scheduler_TP1 catch no such page")
    server.say("tell scheduler_TP1 catch reset by peer")
    # Otherwise which rank is first is chance.
    wait_until(server.incidents, "the incident of the first one is open")
    server.say("tell scheduler_TP0 catch no such page")
    words = "raised ValueError: no such page, which SGLang caught; it serves on."
    _document, printed = observed(server, "exception", words)
    last = sorted(text.splitlines()[-1] for text in printed.values())
    assert last == ["RuntimeError: reset by peer", "ValueError: no such page", "ValueError: no such page"]


def test_one_that_ends_the_server_later_is_an_incident_of_its_own(start_server: Start) -> None:
    documents = incidents_of_two(start_server(), "scheduler_TP1 catch no such page", "scheduler_TP0 raise no such slot")
    assert sorted(one["verdict"]["text"].count("caught") for one in documents) == [0, 1]


def test_a_thread_that_an_exception_ends_is_an_incident_of_a_server_that_goes_on(start_server: Start) -> None:
    server = start_server()
    server.say("tell scheduler_TP1 lose_thread no such page")
    words = f"goes on without its thread Thread-7 (transfer_worker), which raised ValueError: no such page; {STOPPED}."
    document, printed = observed(server, "thread_died", words)
    assert document["verdict"]["level"] == "established"
    assert (document["cause"]["class"], document["cause"]["level"]) == ("thread_died", "established")
    assert "in thread Thread-7 (transfer_worker)" in document["cause"]["reasons"][0]
    ((name, text),) = printed.items()
    assert name.endswith(".thread_exception.txt")
    assert text.startswith("Traceback")
    assert text.endswith("ValueError: no such page\n")


def test_what_fails_in_the_same_process_right_after_it_has_it_first(start_server: Start) -> None:
    documents = incidents_of_two(start_server(), "scheduler_TP1 lose_thread no such page", "scheduler_TP1 exit 3")
    (document,) = [one for one in documents if one["kind"] != "thread_died"]
    assert document["verdict"]["basis"][0].endswith(f"ValueError: no such page; {STOPPED}.")
    assert document["verdict"]["level"] == "supported"
    assert "then ended by exit status 3" in document["verdict"]["text"]
