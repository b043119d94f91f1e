"""What is remembered of trials, on servers that are none."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from sglang_crashkit.errors import CrashkitError
from sglang_crashkit.replay import trials
from sglang_crashkit.replay.requests import StoredRequest
from sglang_crashkit.replay.sender import Answer
from sglang_crashkit.replay.trials import BudgetSpentError, Plan, Trials

GUILTY = "guilty"
#: The server does not take it; it is never answered, and there is no incident.
REFUSED, LOST = "refused", "lost"
STATUSES = {GUILTY: None, LOST: None, REFUSED: 400}


class Server:
    """Answers, unless a request is the guilty one: then it has ended, and left no incident."""

    started: ClassVar[list[Server]] = []
    status = 200
    is_failing = has_ended = False

    def __init__(self, _command: list[str], folder: Path) -> None:
        self.folder, self.address = folder, self
        self.sent: list[str] = []
        self.is_closed = False
        type(self).started.append(self)

    def start(self, _secs: float, _say: object) -> None:
        pass

    def end(self) -> None:
        self.is_closed = True

    def failure(self, *, wait: bool) -> object:
        return Incident() if wait and self.sent[-1] != LOST else None


class Incident:
    document: ClassVar = {"verdict": {"kind": "exception"}}


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> list[Server]:
    def send_all(server: Server, group: Sequence[StoredRequest], _secs: float, **_more: object) -> list[Answer]:
        server.sent += [one.rid for one in group]
        return [Answer(one.rid, STATUSES.get(one.rid, Server.status)) for one in group]

    monkeypatch.setattr(Server, "started", [])
    monkeypatch.setattr(Server, "status", 200)
    monkeypatch.setattr(trials, "OwnServer", Server)
    monkeypatch.setattr(trials, "send_all", send_all)
    monkeypatch.setattr(trials, "is_same_fault", lambda found, _sought: found is Incident.document)
    return Server.started


def group(*rids: str) -> list[StoredRequest]:
    return [StoredRequest(rid, 0.0, True, {"text": rid}) for rid in rids]


def make(tmp_path: Path, **plan: Any) -> Trials:
    return Trials({"id": "1a2b3c4d"}, Plan(["serve"], tmp_path, **plan), lambda _line: None)


def test_the_first_group_that_fails_is_found_on_one_server(tmp_path: Path, servers: list[Server]) -> None:
    found = make(tmp_path).first_failing([group("a"), group("b", GUILTY), group("c")])
    assert (found, [server.sent for server in servers]) == (1, [["a", "b", GUILTY]])
    assert servers[0].is_closed


def test_what_is_known_is_not_tried_again(tmp_path: Path, servers: list[Server]) -> None:
    groups = [group("a"), group(GUILTY)]
    assert make(tmp_path).first_failing(groups) == 1
    again = make(tmp_path)
    assert (again.first_failing(groups), again.starts, len(servers)) == (1, 0, 1)
    again.forget_survivors()
    assert (again.first_failing(groups), servers[-1].sent) == (1, ["a"])


def test_what_is_known_of_another_command_does_not_count(tmp_path: Path, servers: list[Server]) -> None:
    make(tmp_path).first_failing([group("a")])
    known = json.loads((tmp_path / trials.TRIALS).read_text())
    (tmp_path / trials.TRIALS).write_text(json.dumps(known | {"command": ["another"]}))
    make(tmp_path).first_failing([group("a")])
    assert len(servers) == 2


def test_afresh_is_on_a_server_that_served_nothing_else(tmp_path: Path, servers: list[Server]) -> None:
    one = make(tmp_path)
    one.first_failing([group("a"), group(GUILTY)])
    assert not one.failed_afresh(group(GUILTY))
    assert one.fails_afresh(group(GUILTY))
    assert one.failed_afresh(group(GUILTY))
    assert servers[-1].sent == [GUILTY]


@pytest.mark.parametrize(
    ("innocent", "guilty", "in_order", "found", "sent"),
    [
        ("a", GUILTY, False, "same", [["a", GUILTY]]),
        ("a", GUILTY, True, "same", [["a"], [GUILTY]]),
        ("a", "b", False, "survived", [["a", "b"]]),
        (GUILTY, GUILTY, False, "harm", [[GUILTY]]),
        (REFUSED, GUILTY, False, "unfit", [[REFUSED]]),
        (LOST, GUILTY, False, "unfit", [[LOST]]),
    ],
)
def test_a_group_comes_after_harmless_others(
    tmp_path: Path,
    servers: list[Server],
    innocent: str,
    guilty: str,
    in_order: bool,
    found: str,
    sent: list[list[str]],
) -> None:
    one = make(tmp_path)
    one.first_failing([group("before")])
    assert one.contrast(group(innocent), group(guilty), in_order=in_order) == found
    assert [server.sent for server in servers[1:]] == sent


def test_servers_are_kept_for_the_end(tmp_path: Path, servers: list[Server]) -> None:
    one = make(tmp_path, max_starts=3)
    with one.keeping(2):
        one.first_failing([group(GUILTY)])
        with pytest.raises(BudgetSpentError, match="1 servers were started of the 3"):
            one.first_failing([group("a")])
    assert one.fails_afresh(group(GUILTY))


@pytest.mark.parametrize("jobs", [1, 2])
def test_an_error_of_any_kind_ends_the_search(tmp_path: Path, servers: list[Server], jobs: int) -> None:
    one = make(tmp_path, jobs=jobs)
    (tmp_path / trials.TRIALS).mkdir()
    with pytest.raises(OSError, match="directory"):
        one.first_failing([group("a"), group("b"), group("c")])


@pytest.mark.parametrize("jobs", [1, 2])
def test_no_more_servers_are_started_than_allowed(tmp_path: Path, servers: list[Server], jobs: int) -> None:
    one = make(tmp_path, max_starts=1, jobs=jobs)
    assert one.first_failing([group(GUILTY)]) == 0
    with pytest.raises(BudgetSpentError, match="1 servers were started"):
        one.first_failing([group("a")])


def test_a_server_that_takes_no_request_is_an_error(tmp_path: Path, servers: list[Server]) -> None:
    one = make(tmp_path)
    one.raise_refusal()
    Server.status = 404
    one.first_failing([group("a")])
    with pytest.raises(CrashkitError, match="the server refuses the requests with status 404"):
        one.raise_refusal()
    Server.status = 200
    one.first_failing([group("b")])
    one.raise_refusal()
