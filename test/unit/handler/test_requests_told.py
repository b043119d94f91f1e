from __future__ import annotations

import pytest

from sglang_crashkit.handler.incident import add, add_journal, requests_of
from sglang_crashkit.model.incident import JournaledRequests, Requests


def test_what_was_saved_has_a_path_and_counts() -> None:
    told = requests_of({"path": "/x.pkl", "finished": 3, "unfinished": 1, "reason": "of no account"})
    assert told == Requests(3, 1, "/x.pkl", None, "pickle")


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"error": "OSError: full", "reason": "x"}, "OSError: full"),
        ({"reason": "x"}, "x"),
        ({}, "there were no requests to save"),
        ({"finished": True, "unfinished": "7"}, "there were no requests to save"),
    ],
)
def test_what_was_not_saved_has_a_reason(fields: dict[str, object], reason: str) -> None:
    assert requests_of(fields) == Requests(None, None, None, reason, None)


def test_those_of_two_workers_are_added_up() -> None:
    first, second = Requests(3, 1, "/a.pkl", None, "pickle"), Requests(2, 0, "/b.pkl", None, "pickle")
    assert add(first, second) == Requests(5, 1, "/a.pkl", None, "pickle")
    assert add(Requests(), second) == second
    nothing = Requests(0, None, None, "there were no requests to save", None)
    assert add(first, nothing) == first


def test_the_journal_counts_where_the_server_did_not() -> None:
    journal = JournaledRequests("requests/requests.jsonl", finished=4, unfinished=2)
    by_server, by_nobody = Requests(3, 1, "/a.pkl", None, "pickle"), Requests()
    add_journal(by_server, journal)
    add_journal(by_nobody, journal)
    assert (by_server.finished, by_server.source, by_server.journal) == (3, "pickle", journal)
    assert (by_nobody.finished, by_nobody.unfinished, by_nobody.source) == (4, 2, "journal")
    empty = Requests()
    add_journal(empty, JournaledRequests(reason="torn"))
    assert (empty.finished, empty.source) == (None, None)
