from __future__ import annotations

import dataclasses
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sglang_crashkit.handler.folders import Place
from sglang_crashkit.handler.loop import CrashHandler
from sglang_crashkit.handler.peers import PeerLosses
from sglang_crashkit.incident.store import find_incidents
from sglang_crashkit.model.peers import LostPeer, WaitingRequest
from sglang_crashkit.protocol import Mailbox
from sglang_crashkit.settings import Settings
from unit.handler.launching import launch
from unit.waiting import child, wait_until

SERVER = """
rank = os.fork()
if not rank:
    import setproctitle; setproctitle.setproctitle("sglang::scheduler_TP0")
    ready()
pause()
"""
SINCE = "2026-09-01T00:00:00.000000Z"


class Case:
    """A handler in this process, with a clock that stands still."""

    def __init__(self, handler: CrashHandler, folder: Path) -> None:
        self.handler = handler
        self.folder = folder
        self.now = 1000.0
        self.said: list[str] = []
        current = handler._current
        self.losses = PeerLosses(handler._tree, handler._outlook, current, self.said.append, lambda: self.now)

    def lose(self, *numbers: int, waiting: tuple[str, ...] = ()) -> None:
        requests = [WaitingRequest(rid) for rid in waiting]
        self.losses.tell([LostPeer.of(f"10.0.0.{n}:8998", "prefill", "refused", SINCE, requests) for n in numbers])

    def finish(self) -> None:
        self.handler._current.finish_observed()

    def documents(self) -> list[dict[str, Any]]:
        """Return the incidents, oldest first."""
        return [found.document for found in reversed(find_incidents(self.folder)) if found.document]

    def addresses(self) -> list[list[str]]:
        return [[peer["address"] for peer in document["peers"]] for document in self.documents()]


@pytest.fixture
def case(tmp_path: Path, short_folder: Path) -> Iterator[Case]:
    settings = dataclasses.replace(Settings.from_environ({}), stacks=False)
    place = Place(host_folder=tmp_path / "host", spool=tmp_path / "spool", runtime=short_folder)
    with child(SERVER) as process, Mailbox.bind(short_folder / "sock") as receiver:
        handler = CrashHandler(process.pid, Mailbox(receiver), place, settings)
        handler.look()
        (rank,) = (one for one in handler._tree if one.title == "sglang::scheduler_TP0")
        launch(handler, rank.pid)
        handler.look()
        yield Case(handler, tmp_path)
        rank.handle.send_signal(signal.SIGKILL) if not rank.handle.has_exited() else None
        for one in handler._tree:
            one.handle.close()
        handler._prober.close()
        handler._selector.close()


def test_a_rolling_restart_is_one_incident_without_stacks(case: Case) -> None:
    for number in range(1, 51):
        case.lose(number, waiting=("a", "b"))
        case.finish()
        case.now += 60.0
    (document,) = case.documents()
    assert (document["kind"], document["complete"], len(document["peers"])) == ("peer_lost", True, 50)
    assert document["verdict"]["text"].startswith(
        "prefill server 10.0.0.1:8998, 10.0.0.2:8998, 10.0.0.3:8998, 10.0.0.4:8998, 10.0.0.5:8998, 10.0.0.6:8998, "
        "10.0.0.7:8998, 10.0.0.8:8998 and 42 more are gone; 100 requests wait for them: a, b and 98 more."
    )
    pieces = {piece["kind"]: piece["status"] for process in document["processes"] for piece in process["evidence"]}
    assert pieces == {"proc_state": "captured", "stack": "skipped"}
    assert not list(case.folder.rglob("stacks"))
    assert len(case.said) == 50


def test_peers_that_are_lost_at_once_are_told_in_one_line(case: Case) -> None:
    case.lose(1, 2)
    assert case.said == [
        "crash kit: prefill server 10.0.0.1:8998 is gone; no request waits for it. Its port refuses connections. "
        "prefill server 10.0.0.2:8998 is gone; no request waits for it. Its port refuses connections."
    ]
    case.finish()
    assert case.addresses() == [["10.0.0.1:8998", "10.0.0.2:8998"]]


def test_a_loss_long_after_the_last_one_is_an_incident_of_its_own(case: Case) -> None:
    case.lose(1)
    case.finish()
    case.now += 601.0
    case.lose(2)
    case.finish()
    assert case.addresses() == [["10.0.0.1:8998"], ["10.0.0.2:8998"]]


def test_an_incident_does_not_take_in_losses_for_ever(case: Case) -> None:
    for number in range(1, 11):
        case.lose(number)
        case.finish()
        case.now += 500.0
    assert [len(found) for found in case.addresses()] == [8, 2]


def test_an_incident_that_was_removed_gives_way_to_another(case: Case) -> None:
    case.lose(1)
    case.finish()
    for found in find_incidents(case.folder):
        shutil.rmtree(found.path)
    case.lose(2)
    case.finish()
    assert case.addresses() == [["10.0.0.2:8998"]]


def test_so_many_requests_are_named_that_the_incident_stays_readable(case: Case) -> None:
    case.lose(*range(1, 65), waiting=tuple(f"request-{number}" for number in range(64)))
    case.finish()
    (document,) = case.documents()
    assert sum(len(peer["requests"]) for peer in document["peers"]) == 1024
    assert [peer["count"] for peer in document["peers"]] == [64] * 64


def test_a_death_that_is_found_as_the_incident_is_opened_is_the_incident(case: Case) -> None:
    (rank,) = (one for one in case.handler._tree if one.title == "sglang::scheduler_TP0")
    os.kill(rank.pid, signal.SIGKILL)
    wait_until(rank.handle.has_exited, "the rank is dead")
    case.lose(1)
    run = case.handler._current.run
    assert run is not None
    assert (run.incident.kind, [peer.address for peer in run.incident.peers]) == ("killed", ["10.0.0.1:8998"])


@pytest.mark.parametrize("waiting", [(), ("a",)])
def test_while_the_server_ends_only_a_loss_that_keeps_requests_waiting_counts(
    case: Case, waiting: tuple[str, ...]
) -> None:
    case.handler._outlook.draining = True
    case.lose(1, waiting=waiting)
    assert bool(case.documents()) == bool(waiting)
    case.handler._outlook.expected.add(case.handler._tree.root.pid)
    case.lose(2, waiting=waiting)
    assert len(case.said) == bool(waiting)
