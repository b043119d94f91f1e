from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sglang_crashkit.handler.peers.losses import PeerLosses
from sglang_crashkit.handler.server import CrashHandler
from sglang_crashkit.incident.store import find_incidents
from sglang_crashkit.model.peers import LostPeer, WaitingRequest
from unit.handler.launching import handling
from unit.waiting import wait_until

SINCE = "2026-09-01T00:00:00.000000Z"

SERVER = """
rank = os.fork()
if not rank:
    import ctypes, setproctitle; setproctitle.setproctitle("sglang::scheduler_TP0")
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    ready(os.getpid())
pause()
"""


class Case:
    """A handler in this process, with a clock that stands still."""

    def __init__(self, handler: CrashHandler, folder: Path) -> None:
        self.handler = handler
        self.folder = folder
        self.now = 1000.0
        self.said: list[str] = []
        current = handler.session
        self.losses = PeerLosses(handler.tree, current, self.said.append, lambda: self.now)

    def lose(self, *numbers: int, waiting: tuple[str, ...] = ()) -> None:
        requests = [WaitingRequest(rid) for rid in waiting]
        self.losses.report([LostPeer.of(f"10.0.0.{n}:8998", "prefill", "refused", SINCE, requests) for n in numbers])

    def finish(self) -> None:
        self.handler.session.finish_observed()

    def documents(self) -> list[dict[str, Any]]:
        """Return the incidents, oldest first."""
        return [found.document for found in reversed(find_incidents(self.folder)) if found.document]

    def addresses(self) -> list[list[str]]:
        return [[peer["address"] for peer in document["peers"]] for document in self.documents()]


@pytest.fixture
def case(tmp_path: Path, short_folder: Path) -> Iterator[Case]:
    with handling(SERVER, tmp_path, short_folder) as (handler, _server):
        handler.look()
        yield Case(handler, tmp_path)


@pytest.mark.parametrize(("count", "apart", "incidents"), [(2, 599.0, [2]), (2, 601.0, [1, 1]), (10, 500.0, [8, 2])])
def test_losses_soon_after_each_other_are_one_incident(
    case: Case, count: int, apart: float, incidents: list[int]
) -> None:
    for number in range(1, count + 1):
        case.lose(number)
        case.finish()
        case.now += apart
    assert [len(found) for found in case.addresses()] == incidents


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
    assert (pieces["proc_state"], pieces["stack"]) == ("captured", "skipped")
    assert not list(case.folder.rglob("stacks"))
    assert len(case.said) == 50


def test_peers_lost_at_once_are_told_in_one_line(case: Case) -> None:
    case.lose(1, 2)
    assert case.said == [
        "prefill server 10.0.0.1:8998 is gone; no request waits for it. Its port refuses connections. "
        "prefill server 10.0.0.2:8998 is gone; no request waits for it. Its port refuses connections."
    ]
    case.finish()
    assert case.addresses() == [["10.0.0.1:8998", "10.0.0.2:8998"]]


def test_an_incident_that_was_removed_gives_way_to_another(case: Case) -> None:
    case.lose(1)
    case.finish()
    for found in find_incidents(case.folder):
        shutil.rmtree(found.path)
    case.lose(2)
    case.finish()
    assert case.addresses() == [["10.0.0.2:8998"]]


def test_so_much_is_named_that_the_incident_stays_readable(case: Case) -> None:
    case.lose(*range(1, 101), waiting=tuple(f"request-{number}" for number in range(64)))
    case.finish()
    (document,) = case.documents()
    assert sum(len(peer["requests"]) for peer in document["peers"]) == 1024
    assert [peer["count"] for peer in document["peers"]] == [64] * 64


def test_a_death_found_as_the_incident_opens_is_it(case: Case) -> None:
    (rank,) = (one for one in case.handler.tree if one.title == "sglang::scheduler_TP0")
    os.kill(rank.pid, signal.SIGKILL)
    wait_until(rank.handle.has_exited, "the rank is dead")
    case.lose(1)
    run = case.handler.session.run
    assert (run.incident.kind, [peer.address for peer in run.incident.peers]) == ("killed", ["10.0.0.1:8998"])


@pytest.mark.parametrize("waiting", [(), ("a",)])
def test_losses_count_in_a_drain_where_requests_wait(case: Case, waiting: tuple[str, ...]) -> None:
    case.handler.session.triage.shutdown.draining = True
    case.lose(1, waiting=waiting)
    assert bool(case.documents()) == bool(waiting)
    case.handler.session.triage.shutdown.expected.add(case.handler.tree.root.pid)
    case.lose(2, waiting=waiting)
    assert len(case.said) == bool(waiting)
